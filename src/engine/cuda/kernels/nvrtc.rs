//! NVRTC, NVIDIA's compiler library: compiles CUDA C to a GPU's machine code without a GPU.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;

use libloading::{Library, Symbol};

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

/// The result of a compilation.
pub struct Compiled {
    /// The code (CUBIN), or `None` after a compile error.
    pub code: Option<Vec<u8>>,
    pub log: String,
}

/// Compiles a source, which may include the headers, with the compiler's options.
pub fn compile(
    nvrtc: &Library,
    (file, text): (&str, &str),
    headers: &[(&str, &str)],
    options: &[&str],
) -> Compiled {
    let c = |text: &str| CString::new(text).unwrap();
    let pointers = |texts: &[CString]| -> Vec<*const c_char> {
        texts.iter().map(|text| text.as_ptr()).collect()
    };
    let [file, text] = [file, text].map(c);
    let names: Vec<CString> = headers.iter().map(|(name, _)| c(name)).collect();
    let texts: Vec<CString> = headers.iter().map(|(_, text)| c(text)).collect();
    let options: Vec<CString> = options.iter().map(|option| c(option)).collect();
    let mut program: Program = ptr::null_mut();
    // SAFETY: signatures and order of calls are those of nvrtc.h; every string and array outlives its call.
    unsafe {
        let create: Symbol<Create> = nvrtc.get(b"nvrtcCreateProgram").unwrap();
        let code = create(
            &mut program,
            text.as_ptr(),
            file.as_ptr(),
            headers.len() as c_int,
            pointers(&texts).as_ptr(),
            pointers(&names).as_ptr(),
        );
        assert_eq!(code, 0, "nvrtcCreateProgram");
        let compile: Symbol<Compile> = nvrtc.get(b"nvrtcCompileProgram").unwrap();
        let compiled = compile(program, options.len() as c_int, pointers(&options).as_ptr()) == 0;
        let log = bytes(nvrtc, program, "nvrtcGetProgramLog");
        let code = compiled.then(|| bytes(nvrtc, program, "nvrtcGetCUBIN"));
        let destroy: Symbol<Destroy> = nvrtc.get(b"nvrtcDestroyProgram").unwrap();
        assert_eq!(destroy(&mut program), 0, "nvrtcDestroyProgram");
        let log = String::from_utf8_lossy(&log);
        let log = log.trim_end_matches('\0').trim_end().to_owned();
        Compiled { code, log }
    }
}

/// Reads an output of a program through a pair of functions, of which one returns the size.
///
/// # Safety
/// The program is a live NVRTC program.
unsafe fn bytes(nvrtc: &Library, program: Program, function: &str) -> Vec<u8> {
    // SAFETY: see above; the buffer has the size that NVRTC returned.
    unsafe {
        let size_of: Symbol<Size> = nvrtc.get(format!("{function}Size").as_bytes()).unwrap();
        let get: Symbol<Get> = nvrtc.get(function.as_bytes()).unwrap();
        let mut size = 0;
        assert_eq!(size_of(program, &mut size), 0, "{function}Size");
        let mut bytes = vec![0; size];
        assert_eq!(get(program, bytes.as_mut_ptr().cast()), 0, "{function}");
        bytes
    }
}
