//! NVRTC, loaded from the directories in EVENKEEL_CUDA_LIBRARIES.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::{Library, Symbol};

const DIRECTORIES: &str = "EVENKEEL_CUDA_LIBRARIES";

type Program = *mut c_void;
type Strings = *const *const c_char;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    Strings,
    Strings,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, Strings) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

pub struct Nvrtc {
    library: Library,
    /// It opens this library by its bare name.
    _builtins: Option<Library>,
    pub path: PathBuf,
}

/// Every NVRTC 12 and 13 in the directories; empty, after printing the reason, if none are given.
pub fn all() -> Vec<Nvrtc> {
    let Some(directories) = std::env::var_os(DIRECTORIES) else {
        eprintln!(
            "skipped: no kernel is compiled, set {DIRECTORIES} to the directory of libnvrtc.so.12"
        );
        return Vec::new();
    };
    let found: Vec<Nvrtc> = std::env::split_paths(&directories)
        .flat_map(|directory| {
            let wheels = ["nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib"];
            let wheels = wheels.map(|wheel| directory.join(wheel));
            std::iter::once(directory).chain(wheels)
        })
        .flat_map(|directory| ["libnvrtc.so.12", "libnvrtc.so.13"].map(|file| directory.join(file)))
        .filter(|path| path.exists())
        .filter_map(|path| open(&path))
        .collect();
    if found.is_empty() {
        let reason = format!("{DIRECTORIES} ({directories:?}) has no usable libnvrtc.so.12 or .13");
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{reason}");
        eprintln!("skipped: no kernel is compiled, {reason}");
    }
    found
}

fn open(path: &Path) -> Option<Nvrtc> {
    let builtins = path.parent()?.read_dir().ok()?.filter_map(Result::ok);
    let builtins = builtins.map(|entry| entry.path()).find(|path| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        name.starts_with("libnvrtc-builtins.so")
    });
    // SAFETY: NVIDIA's libraries have no harmful initialisers.
    unsafe {
        Some(Nvrtc {
            _builtins: builtins.and_then(|path| Library::new(path).ok()),
            library: Library::new(path).ok()?,
            path: path.to_owned(),
        })
    }
}

impl Nvrtc {
    /// Compiles a source to PTX; it may include the headers.
    pub fn compile(
        &self,
        (file, text): (&str, &str),
        headers: &[(&str, &str)],
        options: &[&str],
    ) -> String {
        let c = |text: &str| CString::new(text).expect("a source has no zero byte");
        let [file, text] = [file, text].map(c);
        let headers: Vec<_> = headers
            .iter()
            .map(|(name, text)| (c(name), c(text)))
            .collect();
        let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let texts: Vec<_> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let options: Vec<CString> = options.iter().map(|option| c(option)).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = ptr::null_mut();
        // SAFETY: signatures and order of calls are those of nvrtc.h; every string outlives its call.
        unsafe {
            let create: Symbol<Create> = self.function("nvrtcCreateProgram");
            let created = create(
                &mut program,
                text.as_ptr(),
                file.as_ptr(),
                headers.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            );
            assert_eq!(created, 0, "nvrtcCreateProgram");
            let compile: Symbol<Compile> = self.function("nvrtcCompileProgram");
            let compiled = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.text(program, "nvrtcGetProgramLog");
            assert_eq!(compiled, 0, "{file:?}: {log}");
            let ptx = self.text(program, "nvrtcGetPTX");
            let destroy: Symbol<Destroy> = self.function("nvrtcDestroyProgram");
            assert_eq!(destroy(&mut program), 0, "nvrtcDestroyProgram");
            ptx
        }
    }

    /// # Safety
    /// The type is the function's.
    unsafe fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: see above.
        let function = unsafe { self.library.get(name.as_bytes()) };
        function.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// # Safety
    /// The program is a live NVRTC program.
    unsafe fn text(&self, program: Program, name: &str) -> String {
        let mut size = 0;
        // SAFETY: see above; the buffer has the size that NVRTC returned.
        let mut bytes = unsafe {
            let size_of: Symbol<Size> = self.function(&format!("{name}Size"));
            assert_eq!(size_of(program, &mut size), 0, "{name}Size");
            let mut bytes = vec![0u8; size];
            let get: Symbol<Get> = self.function(name);
            assert_eq!(get(program, bytes.as_mut_ptr().cast()), 0, "{name}");
            bytes
        };
        bytes.retain(|&byte| byte != 0);
        String::from_utf8(bytes).expect("NVRTC writes ASCII")
    }
}
