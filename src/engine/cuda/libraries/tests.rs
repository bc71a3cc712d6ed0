use super::*;

/// Nothing on any machine is called this.
const NOWHERE: Library = Library {
    file: "libevenkeel-nowhere.so.12",
    ..NVRTC
};

#[test]
fn a_library_that_is_nowhere_is_missing_and_says_how_to_get_it() {
    let found = NOWHERE.look(&[PathBuf::from("/nonexistent")]);
    assert_eq!((found.path, found.version), (None, None));
    assert_eq!(
        found.problem.unwrap().to_string(),
        "missing: pip install 'nvidia-cuda-nvrtc-cu12>=12.8'"
    );
}

#[test]
fn a_file_that_is_no_library_is_broken_in_the_loaders_words() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(NOWHERE.file);
    std::fs::write(
        &path,
        "not a shared object, however long it may be\n".repeat(99),
    )
    .unwrap();
    let found = NOWHERE.look(&[directory.path().into()]);
    let said = found.problem.unwrap().to_string();
    assert!(said.starts_with("broken ("), "{said}");
    assert!(said.contains(path.to_str().unwrap()), "{said}");
    assert_eq!(found.path, Some(path));
}

#[test]
fn a_library_that_another_one_lacks_is_not_taken_for_missing_itself() {
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
fn versions_are_read_as_each_library_counts() {
    assert_eq!(thousands(12040), Version(12, 4));
    assert_eq!(thousands(11080), Version(11, 8));
    assert_eq!(ten_thousands(120_901), Version(12, 9));
    assert_eq!(ten_thousands(22_703), Version(2, 27));
    assert_eq!(ten_thousands(2804), Version(2, 8));
    assert!(Version(12, 10) > Version(12, 8));
}
