use super::*;

/// A library that no machine has.
const NOWHERE: Library = Library {
    file: "libevenkeel-nowhere.so.12",
    ..NVRTC
};

#[test]
fn a_missing_library_is_reported_with_its_installation() {
    let found = NOWHERE.search(&[PathBuf::from("/nonexistent")]);
    assert_eq!((found.path, found.version), (None, None));
    assert_eq!(
        found.problem.unwrap().to_string(),
        "missing: pip install 'nvidia-cuda-nvrtc-cu12>=12.8'"
    );
}

#[test]
fn an_invalid_library_is_broken_with_the_loaders_message() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(NOWHERE.file);
    std::fs::write(
        &path,
        "not a shared object, however long it may be\n".repeat(99),
    )
    .unwrap();
    let found = NOWHERE.search(&[directory.path().into()]);
    let message = found.problem.unwrap().to_string();
    assert!(message.starts_with("broken ("), "{message}");
    assert!(message.contains(path.to_str().unwrap()), "{message}");
    assert_eq!(found.path, Some(path));
}

#[test]
fn a_missing_dependency_is_not_a_missing_library() {
    let missing = |words| says_missing(words, "libnvrtc.so.12");
    assert!(missing(
        "libnvrtc.so.12: cannot open shared object file: No such file or directory"
    ));
    assert!(missing(
        "Error loading shared library libnvrtc.so.12: No such file or directory"
    ));
    assert!(!missing(
        "libnvJitLink.so.12: cannot open shared object file: No such file or directory"
    ));
    assert!(!missing(
        "Error loading shared library libc.so.6: No such file or directory (needed by libnvrtc.so.12)"
    ));
    assert!(!missing("libnvrtc.so.12: file too short"));
}

#[test]
fn versions_are_decoded_as_each_library_encodes_them() {
    assert_eq!(thousands(12040), Version(12, 4));
    assert_eq!(thousands(11080), Version(11, 8));
    assert_eq!(ten_thousands(120_901), Version(12, 9));
    assert_eq!(ten_thousands(22_703), Version(2, 27));
    assert_eq!(ten_thousands(2804), Version(2, 8));
    assert!(Version(12, 10) > Version(12, 8));
}
