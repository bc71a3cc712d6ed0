//! The kernels' source compiled as C++ with `host.h`, and launched on the processor.

use std::ffi::{c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use libloading::{Library, Symbol};

use super::SOURCES;

type Launcher = unsafe extern "C" fn(c_uint, c_uint, *const *const c_void);

/// The kernels as a library for this machine. All blocks share one static buffer as shared memory, so only
/// one kernel runs at a time.
pub struct Host(Mutex<Library>);

impl Host {
    /// The library, built once; `None`, after printing the reason, without a C++ compiler.
    pub fn get() -> Option<&'static Host> {
        static HOST: OnceLock<Option<Host>> = OnceLock::new();
        let host = HOST.get_or_init(Host::build).as_ref();
        if host.is_none() {
            eprintln!("skipped: no kernel was compared, there is no C++ compiler (c++)");
        }
        host
    }

    fn build() -> Option<Host> {
        Command::new("c++").arg("--version").output().ok()?;
        let directory = tempfile::tempdir().unwrap();
        let [text, library] = ["kernels.cpp", "kernels.so"].map(|f| directory.path().join(f));
        let mut lines = vec!["#include \"host.h\"".to_owned()];
        for source in SOURCES {
            lines.push(format!("#include \"{}\"", source.file));
            let launchers = source.kernels.iter();
            lines.extend(launchers.map(|kernel| format!("LAUNCHER({kernel})")));
        }
        std::fs::write(&text, lines.join("\n") + "\n").unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine/cuda/kernels");
        let mut compiler = Command::new("c++");
        compiler.args(["-std=c++17", "-O1", "-pthread"]);
        compiler.args(["-shared", "-fPIC", "-I"]).arg(here);
        let made = compiler
            .arg(&text)
            .arg("-o")
            .arg(&library)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&made.stderr);
        assert!(made.status.success(), "{output}");
        // SAFETY: the library is the one just made; it initialises nothing.
        let library = unsafe { Library::new(&library) }.unwrap();
        Some(Host(Mutex::new(library)))
    }

    /// Like `cuLaunchKernel`: each argument points at a parameter of the kernel's type.
    ///
    /// # Safety
    /// The number and types of the arguments match the parameters, and the memory that they point at is as
    /// large as the kernel expects.
    pub unsafe fn launch(
        &self,
        kernel: &str,
        (blocks, threads): (usize, usize),
        arguments: &[*const c_void],
    ) {
        let library = self.0.lock().unwrap();
        let [blocks, threads] = [blocks, threads].map(|n| c_uint::try_from(n).unwrap());
        // SAFETY: `host.h` defines every launcher with this signature; the rest is the caller's.
        unsafe {
            let launcher: Symbol<Launcher> =
                library.get(format!("launch_{kernel}").as_bytes()).unwrap();
            launcher(blocks, threads, arguments.as_ptr());
        }
    }
}
