//! CUDA's libraries, found at run time: a build needs no CUDA, and one binary runs with and without it.
//!
//! Each library is opened and asked only for its version, so no GPU is touched. A library that is missing,
//! cannot be opened or is too old is a [`Problem`] with a message, never a panic.

use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Directories to search first, separated as in `PATH`: they hold the libraries themselves, or Python's
/// wheels (`site-packages`).
pub const DIRECTORIES: &str = "EVENKEEL_CUDA_LIBRARIES";

/// The directory of the emulated GPU, which the engine's tests search first.
#[cfg(test)]
pub static EMULATED: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();

/// A library and its requirements.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    /// The common name of the library.
    pub name: &'static str,
    /// File names with their interface versions, the preferred one first.
    pub files: &'static [&'static str],
    /// The function that returns the version, and the oldest supported version; `None` where opening the library
    /// is the only check.
    needs: Option<(&'static str, Query, Version)>,
    /// How to install the library.
    install: &'static str,
}

/// How a function returns a version.
#[derive(Debug, Clone, Copy)]
enum Query {
    /// `int f(int *version)`, 0 for success, and the decoding of the number.
    Number(fn(usize) -> Version),
    /// `int f(int *major, int *minor)`, 0 for success.
    Pair,
    /// `size_t f(void)`, and the decoding of the number.
    Plain(fn(usize) -> Version),
}

/// A version without the patch level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub usize, pub usize);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The driver's encoding: 12.4 is 12040.
fn thousands(number: usize) -> Version {
    Version(number / 1000, number % 1000 / 10)
}

/// The encoding of cuBLAS and NCCL: 12.9.1 is 120901. Before 2.9, NCCL 2.8.4 was 2804.
fn ten_thousands(number: usize) -> Version {
    if number < 10_000 {
        Version(number / 1000, number % 1000 / 100)
    } else {
        Version(number / 10_000, number % 10_000 / 100)
    }
}

/// The driver. From 525 on, whose own CUDA is 12.0, it runs code that CUDA 12 compiled ("CUDA Compatibility",
/// minor version compatibility).
pub const CUDA: Library = Library {
    name: "driver",
    files: &["libcuda.so.1"],
    needs: Some((
        "cuDriverGetVersion",
        Query::Number(thousands),
        Version(12, 0),
    )),
    install: "install NVIDIA's driver 525 or newer from your distribution, or start the container with \
              its GPUs (docker run --gpus all)",
};

/// The management library. It comes with the driver and reports no version before its initialisation.
pub const NVML: Library = Library {
    name: "NVML",
    files: &["libnvidia-ml.so.1"],
    needs: None,
    install: "it comes with NVIDIA's driver; into containers, where NVIDIA_DRIVER_CAPABILITIES has \
              `utility`",
};

/// Matrix products. 12.8 is the first for compute capability 10.0 ("Blackwell Compatibility Guide").
pub const CUBLAS_LT: Library = Library {
    name: "cuBLASLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12"],
    needs: Some((
        "cublasLtGetVersion",
        Query::Plain(ten_thousands),
        Version(12, 8),
    )),
    install: "pip install 'nvidia-cublas-cu12>=12.8'",
};

/// The compiler of kernels. 12.8 is the first that supports sm_100.
pub const NVRTC: Library = Library {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12"],
    needs: Some(("nvrtcVersion", Query::Pair, Version(12, 8))),
    install: "pip install 'nvidia-cuda-nvrtc-cu12>=12.8'",
};

/// Collectives. 2.14 is the first whose communicators can be aborted while they form.
pub const NCCL: Library = Library {
    name: "NCCL",
    files: &["libnccl.so.2"],
    needs: Some((
        "ncclGetVersion",
        Query::Number(ten_thousands),
        Version(2, 14),
    )),
    install: "pip install 'nvidia-nccl-cu12>=2.14'",
};

/// The result of searching a library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LibraryCheck {
    /// The common name of the library.
    pub name: &'static str,
    /// File name of the library; the preferred one where none was found.
    pub file: &'static str,
    /// Path of the library; `None` where it is missing, or where the loader opened it by its bare name.
    pub path: Option<PathBuf>,
    /// The version, for example `12.9`, if the library is usable and reports one.
    pub version: Option<String>,
    /// Why the library cannot be used.
    pub problem: Option<Problem>,
}

/// Why a library cannot be used, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{fault}: {install}")]
pub struct Problem {
    #[serde(flatten)]
    pub fault: Fault,
    /// How to install a usable library.
    pub install: &'static str,
}

/// What is wrong with a library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Fault {
    /// The file does not exist.
    #[error("missing")]
    Missing,
    /// The file exists, but cannot be opened or does not answer.
    #[error("broken ({words})")]
    Broken {
        /// The loader's message, or the library's answer.
        words: String,
    },
    /// The library is older than required.
    #[error("{version} is too old, {needed} is needed")]
    TooOld {
        version: String,
        /// The oldest supported version.
        needed: String,
    },
    /// Only files of other interface versions exist, or the driver is too old for the only file.
    #[error("found {found}, but {needed} is needed")]
    OtherVersion {
        /// File names of the other versions.
        found: String,
        /// File names of the usable versions.
        needed: String,
    },
    /// The library lacks a function that its version should have.
    #[error("broken (no function {symbol})")]
    MissingFunction {
        /// Name of the function.
        symbol: String,
    },
}

pub fn find() -> Vec<LibraryCheck> {
    let directories = directories();
    [CUDA, NVML, CUBLAS_LT, NVRTC, NCCL]
        .map(|library| library.search(&directories))
        .to_vec()
}

/// The first problem of a library that training needs, on one GPU and on several.
pub fn problems() -> [Option<String>; 2] {
    let directories = directories();
    let problem = |library: Library| {
        let check = library.search(&directories);
        Some(format!("{}: {}", check.name, check.problem?))
    };
    let of_one = [CUDA, CUBLAS_LT, NVRTC].into_iter().find_map(problem);
    let of_several = of_one.clone().or_else(|| problem(NCCL));
    [of_one, of_several]
}

/// Directories that are searched before the loader's: [`DIRECTORIES`], then the wheels of the active virtual
/// environment.
pub fn directories() -> Vec<PathBuf> {
    #[cfg(test)]
    let emulated = EMULATED.get().cloned();
    #[cfg(not(test))]
    let emulated = None;
    let given = std::env::var_os(DIRECTORIES).unwrap_or_default();
    let given = std::env::split_paths(&given).filter(|path| path != Path::new(""));
    let environment = std::env::var_os("VIRTUAL_ENV").filter(|path| !path.is_empty());
    let pythons = environment.map(|path| entries(&Path::new(&path).join("lib")));
    let packages = pythons
        .into_iter()
        .flatten()
        .map(|python| python.join("site-packages"));
    let found = emulated.into_iter().chain(given).chain(packages);
    found.flat_map(with_wheels).collect()
}

/// The directory, and the library directories of NVIDIA's wheels if it is a `site-packages`.
fn with_wheels(directory: PathBuf) -> Vec<PathBuf> {
    let wheels = entries(&directory.join("nvidia"));
    let libraries = wheels.into_iter().map(|wheel| wheel.join("lib"));
    [directory].into_iter().chain(libraries).collect()
}

/// The entries of a directory, sorted; empty if it cannot be read.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let read = std::fs::read_dir(directory).into_iter().flatten();
    let mut entries: Vec<PathBuf> = read.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

impl Library {
    /// Opens the library for use and checks its version. A driver for CUDA `driver_major` limits the interface
    /// versions: a library of CUDA 13 does not work on a driver for CUDA 12.
    pub fn load(
        &self,
        directories: &[PathBuf],
        driver_major: Option<usize>,
    ) -> Result<(libloading::Library, Version), Problem> {
        let (library, _) = self.open(&self.usable(driver_major), directories)?;
        let version = self.check(&library)?;
        Ok((library, version.unwrap_or(Version(0, 0))))
    }

    /// The problem of a library that lacks a function.
    pub fn lacks(&self, symbol: &str) -> Problem {
        let symbol = symbol.to_owned();
        self.problem(Fault::MissingFunction { symbol })
    }

    fn problem(&self, fault: Fault) -> Problem {
        let install = self.install;
        Problem { fault, install }
    }

    fn broken(&self, words: String) -> Problem {
        self.problem(Fault::Broken { words })
    }

    /// The path of the file that [`Library::load`] opens, or `None` where only the loader knows it.
    pub fn path(&self, directories: &[PathBuf], driver_major: Option<usize>) -> Option<PathBuf> {
        self.place(&self.usable(driver_major), directories)
            .map(|(path, _)| path)
    }

    /// The file names that work with the driver.
    fn usable(&self, driver_major: Option<usize>) -> Vec<&'static str> {
        let mut files = self.files.to_vec();
        // The names of libraries without a choice do not follow CUDA's version.
        if let Some(driver_major) = driver_major
            && files.len() > 1
        {
            files.retain(|file| major(file).is_none_or(|major| major <= driver_major));
        }
        files
    }

    /// Opens the file in the first of the directories that has one, or else the one that the loader finds
    /// (`LD_LIBRARY_PATH`, the system's directories).
    fn open(
        &self,
        files: &[&'static str],
        directories: &[PathBuf],
    ) -> Result<(libloading::Library, &'static str), Problem> {
        // SAFETY: opening runs the initialisation of NVIDIA's libraries, which are designed for that. A user
        // who puts another file under their name is responsible for it.
        let open = |name: &Path| unsafe { libloading::Library::new(name) };
        if let Some((path, file)) = self.place(files, directories) {
            let library = open(&path).map_err(|error| self.broken(error.to_string()))?;
            return Ok((library, file));
        }
        for &file in files {
            match open(Path::new(file)) {
                Ok(library) => return Ok((library, file)),
                Err(error) if says_missing(&error.to_string(), file) => {}
                Err(error) => return Err(self.broken(error.to_string())),
            }
        }
        Err(self.missing(files, directories))
    }

    /// Path and name of the file in the first of the directories that has one of the files.
    fn place(
        &self,
        files: &[&'static str],
        directories: &[PathBuf],
    ) -> Option<(PathBuf, &'static str)> {
        let mut candidates = directories.iter().flat_map(|directory| {
            let path = |&file: &&'static str| (directory.join(file), file);
            files.iter().map(path)
        });
        candidates.find(|(path, _)| path.exists())
    }

    fn missing(&self, files: &[&'static str], directories: &[PathBuf]) -> Problem {
        let found = self.other_versions(files, directories);
        self.problem(if found.is_empty() {
            Fault::Missing
        } else {
            Fault::OtherVersion {
                found: found.join(", "),
                needed: files.join(" or "),
            }
        })
    }

    /// Names of files of this library with other interface versions than those of `files`.
    fn other_versions(&self, files: &[&'static str], directories: &[PathBuf]) -> Vec<String> {
        let Some((stem, _)) = self.files.first().and_then(|file| file.rsplit_once('.')) else {
            return Vec::new();
        };
        let loader = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let loader: Vec<PathBuf> = std::env::split_paths(&loader).collect();
        let mut found: Vec<String> = directories
            .iter()
            .chain(&loader)
            .flat_map(|directory| entries(directory))
            .filter_map(|path| path.file_name()?.to_str().map(str::to_owned))
            .filter(|name| {
                let version = name
                    .strip_prefix(stem)
                    .and_then(|rest| rest.strip_prefix('.'));
                version.is_some_and(|version| version.parse::<u32>().is_ok())
                    && !files.contains(&name.as_str())
            })
            .collect();
        found.sort();
        found.dedup();
        found
    }

    fn search(&self, directories: &[PathBuf]) -> LibraryCheck {
        let place = self.place(self.files, directories);
        let opened = self.open(self.files, directories);
        let mut file = place.as_ref().map_or(self.files[0], |(_, file)| file);
        let version = opened.and_then(|(library, name)| {
            file = name;
            let version = self.check(&library);
            // Threads and handlers that the library may have started must not lose their code.
            std::mem::forget(library);
            version
        });
        let (version, problem) = match version {
            Ok(version) => (version, None),
            Err(problem) => (None, Some(problem)),
        };
        LibraryCheck {
            name: self.name,
            file,
            path: place.map(|(path, _)| path),
            version: version.map(|version| version.to_string()),
            problem,
        }
    }

    /// The version, if the library reports one; an error if it is too old.
    fn check(&self, library: &libloading::Library) -> Result<Option<Version>, Problem> {
        let Some((function, query, needed)) = self.needs else {
            return Ok(None);
        };
        let version = query.ask(library, function);
        let version = version.map_err(|words| self.broken(words))?;
        if version < needed {
            return Err(self.problem(Fault::TooOld {
                version: version.to_string(),
                needed: needed.to_string(),
            }));
        }
        Ok(Some(version))
    }
}

/// The interface version at the end of a file name.
fn major(file: &str) -> Option<usize> {
    file.rsplit_once('.')?.1.parse().ok()
}

/// Whether the loader's message says that the file itself is missing, not a dependency.
fn says_missing(words: &str, file: &str) -> bool {
    // glibc names the missing file first; musl names the dependent file last.
    let lacks = words.starts_with(file) || words.contains(&format!("library {file}:"));
    lacks && words.contains("No such file") && !words.contains("needed by")
}

impl Query {
    /// The version, or the reason why it is unknown.
    fn ask(self, library: &libloading::Library, function: &str) -> Result<Version, String> {
        type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
        type Pair = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        type Plain = unsafe extern "C" fn() -> usize;
        let symbol = function.as_bytes();
        let (mut first, mut second) = (0, 0);
        // SAFETY: the types are those of NVIDIA's headers. The functions only write to their arguments and
        // may be called before any other.
        let code = unsafe {
            match self {
                Query::Number(_) => library.get::<Number>(symbol).map(|get| get(&mut first)),
                Query::Pair => {
                    let get = library.get::<Pair>(symbol);
                    get.map(|get| get(&mut first, &mut second))
                }
                Query::Plain(meaning) => {
                    let get = library.get::<Plain>(symbol);
                    return get
                        .map(|get| meaning(get()))
                        .map_err(|error| error.to_string());
                }
            }
        };
        let code = code.map_err(|error| error.to_string())?;
        if code != 0 {
            return Err(format!("{function} gives error {code}"));
        }
        let [first, second] = [first, second].map(|n| usize::try_from(n).unwrap_or(0));
        Ok(match self {
            Query::Number(meaning) => meaning(first),
            Query::Pair | Query::Plain(_) => Version(first, second),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library that no machine has.
    const NOWHERE: Library = Library {
        files: &["libevenkeel-nowhere.so.13", "libevenkeel-nowhere.so.12"],
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
        let path = directory.path().join(NOWHERE.files[1]);
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
}
