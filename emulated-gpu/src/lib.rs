//! A GPU for tests. It executes the PTX that NVRTC compiles and checks what a real GPU does not report.

pub mod launch;
pub mod ptx;
pub mod memory;
pub mod race;
pub mod scripted;
pub mod status;
pub mod stream;
