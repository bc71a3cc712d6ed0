//! Kernels from CUDA C to loaded modules, with a cache on disk.
//!
//! A cached file is named after the hash of source, headers, options, architecture and NVRTC. It begins with
//! the hash of its content, so a damaged file is recompiled. The cache only saves time: problems with it are
//! never errors.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use xxhash_rust::xxh3::xxh3_128;

use super::driver::{Device, Module};
use super::error::CudaError;
use super::libraries::{self, NVRTC};
use super::nvrtc::{Compiled, Nvrtc};
use crate::util::lock::lock;

pub use super::nvrtc::Source;

/// Begins a cached file; changes with its layout.
const MAGIC: &[u8] = b"evenkeel kernels 1\n";
/// Driver codes after which the PTX is tried: the device does not run the machine code.
const NOT_FOR_DEVICE: [&str; 2] = ["CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE"];

/// Compiles and loads kernels.
pub struct Compiler {
    /// Folder of the cache; `None` where the user has none.
    cache: Option<PathBuf>,
    /// Loaded at the first source that is not cached.
    nvrtc: Mutex<Option<Arc<Nvrtc>>>,
}

impl Compiler {
    /// A compiler with a folder for its cache; `None` is the user's, `evenkeel/kernels` in `XDG_CACHE_HOME` or
    /// `~/.cache`.
    pub fn new(cache: Option<PathBuf>) -> Compiler {
        Compiler {
            cache: cache.or_else(|| users_cache("kernels")),
            nvrtc: Mutex::new(None),
        }
    }

    /// The module of a source, compiled for the device unless the cache has it.
    ///
    /// # Errors
    /// NVRTC is needed and cannot be used, refuses the source, or the driver refuses the code.
    pub fn load(
        &self,
        device: &Arc<Device>,
        source: &Source,
        options: &[String],
    ) -> Result<Module, CudaError> {
        let compiled = self.compile(device, source, options)?;
        match device.module(&compiled.cubin, source.file) {
            Err(CudaError::Call { code, .. }) if NOT_FOR_DEVICE.contains(&code.as_str()) => {
                device.module(&compiled.ptx, source.file)
            }
            loaded => loaded,
        }
    }

    fn compile(
        &self,
        device: &Device,
        source: &Source,
        options: &[String],
    ) -> Result<Compiled, CudaError> {
        let driver_major = device.driver.major();
        let architecture = architecture(device.capability);
        let compiler = self.identity(driver_major)?;
        let file = self.cache.as_ref().map(|folder| {
            let key = key(source, options, &architecture, &compiler);
            folder.join(format!("{key:032x}"))
        });
        if let Some(compiled) = file.as_deref().and_then(read) {
            return Ok(compiled);
        }
        let nvrtc = self.nvrtc(driver_major)?;
        let compiled = nvrtc.compile(source, options, &architecture)?;
        if let Some(file) = file {
            // A full or read-only disk costs the next process a compilation.
            let _ = write(&file, &compiled);
        }
        Ok(compiled)
    }

    fn nvrtc(&self, driver_major: usize) -> Result<Arc<Nvrtc>, CudaError> {
        let mut loaded = lock(&self.nvrtc);
        if let Some(nvrtc) = &*loaded {
            return Ok(nvrtc.clone());
        }
        let nvrtc = Arc::new(Nvrtc::load(Some(driver_major))?);
        *loaded = Some(nvrtc.clone());
        Ok(nvrtc)
    }

    /// What tells one NVRTC from another. A file in a known directory is identified without loading it, which
    /// takes longer than to read the cache. One that only the loader finds is asked for its version.
    fn identity(&self, driver_major: usize) -> Result<String, CudaError> {
        let path = NVRTC.path(&libraries::directories(), Some(driver_major));
        let data = path.as_ref().and_then(|path| path.metadata().ok());
        let modified = data.as_ref().and_then(|data| data.modified().ok());
        if let (Some(path), Some(data), Some(modified)) = (path, data, modified) {
            let name = path.file_name().unwrap_or_default().display().to_string();
            return Ok(format!("{name} {} {modified:?}", data.len()));
        }
        Ok(format!("NVRTC {}", self.nvrtc(driver_major)?.version))
    }
}

/// The architecture to compile for. `sm_90a` has Hopper's own instructions; its code runs on Hopper only.
fn architecture((major, minor): (u32, u32)) -> String {
    let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// A file or folder of Evenkeel in the user's cache folder.
pub fn users_cache(name: &str) -> Option<PathBuf> {
    let folder = |variable| {
        let path = std::env::var_os(variable).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let base = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(base.join("evenkeel").join(name))
}

/// The hash of everything that the code depends on.
fn key(source: &Source, options: &[String], architecture: &str, compiler: &str) -> u128 {
    let mut parts = vec![compiler, architecture, source.file, source.text];
    parts.extend(options.iter().map(String::as_str));
    // Separates the options from the headers.
    parts.push("");
    for (name, text) in source.headers {
        parts.extend([name, text]);
    }
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part.as_bytes());
    }
    xxh3_128(&bytes)
}

/// A cached file, if it is complete and undamaged.
fn read(path: &Path) -> Option<Compiled> {
    let bytes = std::fs::read(path).ok()?;
    let rest = bytes.strip_prefix(MAGIC)?;
    let (hash, content) = rest.split_first_chunk::<16>()?;
    if u128::from_le_bytes(*hash) != xxh3_128(content) {
        return None;
    }
    let (length, content) = content.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (cubin, ptx) = content.split_at_checked(length)?;
    Some(Compiled {
        cubin: cubin.to_vec(),
        ptx: ptx.to_vec(),
        log: String::new(),
    })
}

/// Writes a cached file. A rename makes it visible complete, to other processes, too.
fn write(path: &Path, compiled: &Compiled) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let length = (compiled.cubin.len() as u64).to_le_bytes();
    let content = [&length[..], &compiled.cubin, &compiled.ptx].concat();
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(MAGIC)?;
    file.write_all(&xxh3_128(&content).to_le_bytes())?;
    file.write_all(&content)?;
    file.persist(path)?;
    Ok(())
}
