//! NVRTC, NVIDIA's compiler library: CUDA C to machine code and PTX, without a GPU.

use std::ffi::{CString, c_char, c_int};

use super::driver::Handle;
use super::error::CudaError;
use super::libraries::{NVRTC, Version};
use super::table::{functions, text};

/// `nvrtcResult`
type Code = c_int;

const OUT_OF_MEMORY: Code = 1;
const INVALID_OPTION: Code = 5;
const COMPILATION: Code = 6;

functions! {
    Functions:
    nvrtcGetErrorString(Code) -> *const c_char;
    nvrtcCreateProgram(
        *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    ) -> Code;
    nvrtcCompileProgram(Handle, c_int, *const *const c_char) -> Code;
    nvrtcDestroyProgram(*mut Handle) -> Code;
    nvrtcGetProgramLogSize(Handle, *mut usize) -> Code;
    nvrtcGetProgramLog(Handle, *mut c_char) -> Code;
    nvrtcGetCUBINSize(Handle, *mut usize) -> Code;
    nvrtcGetCUBIN(Handle, *mut c_char) -> Code;
    nvrtcGetPTXSize(Handle, *mut usize) -> Code;
    nvrtcGetPTX(Handle, *mut c_char) -> Code;
}

/// A source file of kernels with the headers that it may include.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// Its name, for messages.
    pub file: &'static str,
    pub text: &'static str,
    /// Names and texts.
    pub headers: &'static [(&'static str, &'static str)],
}

/// The result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code for the architecture alone.
    pub cubin: Vec<u8>,
    /// Assembly for the same architecture, without its final zero.
    pub ptx: Vec<u8>,
    pub log: String,
}

pub struct Nvrtc {
    functions: Functions,
    pub version: Version,
}

impl Nvrtc {
    /// Loads NVRTC, which is never closed again. `driver_major` is the major version of the CUDA that the
    /// driver supports, if the code is meant for a driver.
    pub fn load(driver_major: Option<usize>) -> Result<Nvrtc, CudaError> {
        let (functions, version) = Functions::open(&NVRTC, driver_major)?;
        Ok(Nvrtc { functions, version })
    }

    /// Compiles a source for an architecture such as `sm_90a`. Options are those of `nvcc`, for example
    /// `-DHEAD_DIM=64`.
    ///
    /// # Errors
    /// [`CudaError::Compile`] has the compiler's log.
    pub fn compile(
        &self,
        source: &Source,
        options: &[String],
        architecture: &str,
    ) -> Result<Compiled, CudaError> {
        let c = |text: &str| {
            CString::new(text).map_err(|_| CudaError::Compile {
                file: source.file,
                log: "a text has a zero byte".to_owned(),
            })
        };
        let (file, text) = (c(source.file)?, c(source.text)?);
        let headers = source
            .headers
            .iter()
            .map(|(name, text)| Ok((c(name)?, c(text)?)));
        let headers = headers.collect::<Result<Vec<_>, CudaError>>()?;
        let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let texts: Vec<_> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let mut handle = Handle::NULL;
        // SAFETY: every text ends with a zero and outlives the call; both arrays have as many elements as is
        // passed.
        let code = unsafe {
            (self.functions.nvrtcCreateProgram)(
                &mut handle,
                text.as_ptr(),
                file.as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.functions.check("nvrtcCreateProgram", code)?;
        let program = Program {
            functions: &self.functions,
            handle,
        };
        let architecture = format!("--gpu-architecture={architecture}");
        let options = [&architecture].into_iter().chain(options);
        let options = options
            .map(|option| c(option))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is live; the array has as many texts as is passed, each with a final zero.
        let code = unsafe {
            (self.functions.nvrtcCompileProgram)(handle, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = program.log()?;
        if code == COMPILATION || (code == INVALID_OPTION && !log.is_empty()) {
            return Err(CudaError::Compile {
                file: source.file,
                log,
            });
        }
        self.functions.check("nvrtcCompileProgram", code)?;
        let Functions {
            nvrtcGetCUBINSize,
            nvrtcGetCUBIN,
            nvrtcGetPTXSize,
            nvrtcGetPTX,
            ..
        } = self.functions;
        let cubin = program.bytes("nvrtcGetCUBIN", nvrtcGetCUBINSize, nvrtcGetCUBIN)?;
        let mut ptx = program.bytes("nvrtcGetPTX", nvrtcGetPTXSize, nvrtcGetPTX)?;
        while ptx.last() == Some(&0) {
            ptx.pop();
        }
        Ok(Compiled { cubin, ptx, log })
    }
}

impl Functions {
    fn check(&self, function: &'static str, code: Code) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        if code == OUT_OF_MEMORY {
            return Err(CudaError::out_of_memory(format!(
                "the compiler of kernels ({function})"
            )));
        }
        // SAFETY: the function returns a constant text for every code.
        let name = unsafe { text((self.nvrtcGetErrorString)(code)) };
        Err(CudaError::Call {
            function,
            code: name.unwrap_or_else(|| format!("error {code}")),
            words: "NVRTC gives no description".to_owned(),
        })
    }
}

/// A program, destroyed when dropped.
struct Program<'a> {
    functions: &'a Functions,
    handle: Handle,
}

impl Program<'_> {
    /// Reads an output through a pair of functions, of which the first returns the size.
    fn bytes(
        &self,
        function: &'static str,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Code,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Code,
    ) -> Result<Vec<u8>, CudaError> {
        let mut bytes = 0;
        // SAFETY: the program is live, and the buffer has the size that NVRTC returns.
        unsafe {
            self.functions
                .check(function, size(self.handle, &mut bytes))?;
            let mut buffer = vec![0; bytes];
            let code = get(self.handle, buffer.as_mut_ptr().cast());
            self.functions.check(function, code)?;
            Ok(buffer)
        }
    }

    fn log(&self) -> Result<String, CudaError> {
        let log = self.bytes(
            "nvrtcGetProgramLog",
            self.functions.nvrtcGetProgramLogSize,
            self.functions.nvrtcGetProgramLog,
        )?;
        let log = String::from_utf8_lossy(&log);
        Ok(log.trim_end_matches('\0').trim_end().to_owned())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is destroyed once.
        unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.handle) };
    }
}
