//! Launches of the tests once more through the driver, for the question whether the emulator is right.
//!
//! With `EMULATED_GPU_COMPARE=1`, each launch that passes also runs on the first device of `libcuda.so.1`: a GPU, or
//! the emulated one with its directory in `LD_LIBRARY_PATH`. Where every operation is exact, the device's bits must
//! be the emulator's. Elsewhere (approximate functions, sums of `mma`, operations that ptxas may fuse) the test
//! judges the device's results by its own bounds. Standard error has one JSON line per kernel and per difference.

use std::collections::HashSet;
use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

use emulated_gpu::launch::Launch;
use emulated_gpu::ptx::{Limits, Module};
use serde_json::json;

use super::{BASE, Memory};

#[path = "../common/mod.rs"]
mod common;
use common::{Cuda, Handle};

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED: c_int = 8;

struct Device {
    cuda: Cuda,
    context: Handle,
    /// Kernels that have a line.
    seen: Mutex<HashSet<String>>,
}

static DEVICE: LazyLock<Option<Device>> = LazyLock::new(|| {
    std::env::var_os("EMULATED_GPU_COMPARE")?;
    let cuda = Cuda::open_at(Path::new(""));
    assert_eq!(cuda.cuInit(0), 0, "cuInit");
    let context = cuda.enter(0);
    Some(Device {
        cuda,
        context,
        seen: Mutex::default(),
    })
});

/// Whether launches are compared. Bounds of sums are wider then: a GPU cuts summands off.
pub fn compares() -> bool {
    DEVICE.is_some()
}

/// Compares a launch, given the memory before and after it. `variables` are the addresses of the module's own.
pub fn compare(
    (text, module, variables): (&str, &Module, &[u64]),
    kernel: &str,
    launch: &Launch<'_>,
    before: Memory,
    after: &mut Memory,
) {
    let Some(device) = &*DEVICE else { return };
    let exact = is_exact(text);
    let mut line = json!({
        "result": "launch", "test": std::thread::current().name(), "kernel": kernel, "exact": exact,
    });
    if has_addresses(&before) || has_addresses(after) {
        line["skipped"] = json!("its memory has addresses");
    } else if exact && depends_on_order(module, kernel, launch, &before, after) {
        line["skipped"] = json!("its results depend on the order of warps");
    } else {
        match device.run((text, module), kernel, launch, &before) {
            Ok(results) => {
                let mut differences = Vec::new();
                for ((address, expected), got) in after.buffers.iter_mut().zip(results) {
                    if variables.contains(address) {
                        continue;
                    }
                    if exact {
                        differences.extend(different(text, &before, &got, expected));
                    } else {
                        *expected = got;
                    }
                }
                line["ok"] = json!(differences.is_empty());
                line["differences"] = json!(differences.len());
                differences.truncate(3);
                line["first"] = json!(differences);
            }
            Err(problem) => {
                line["ok"] = json!(false);
                line["problem"] = json!(problem);
            }
        }
    }
    let failed = line["ok"] == false;
    if failed {
        // Without what all modules of `kernel` begin with.
        line["text"] = json!(text.rsplit("%fd<16>;\n").next());
    }
    let mut seen = device.seen.lock().unwrap_or_else(PoisonError::into_inner);
    if seen.insert(format!("{kernel}\n{text}")) || failed {
        eprintln!("{line}");
    }
}

/// Words of 8 bytes that differ, and the operands of [`super::lanes::apply`] where these are the first buffer. PTX does
/// not define the bits of an f64 that is not a number.
fn different(text: &str, before: &Memory, got: &[u8], expected: &[u8]) -> Vec<String> {
    let nan = |word: &[u8]| {
        let word = word.try_into().map(f64::from_le_bytes);
        text.contains(".f64") && word.is_ok_and(f64::is_nan)
    };
    let pairs = got.chunks(8).zip(expected.chunks(8)).enumerate();
    let differing = pairs.filter(|(_, (a, b))| a != b && !(nan(a) && nan(b)));
    let hex = |bytes: &[u8]| {
        let digits = bytes.iter().rev().map(|byte| format!("{byte:02x}"));
        digits.collect::<String>()
    };
    let words = differing.map(|(at, (got, expected))| {
        let operands = before.buffers[0].1.get(32 * at..).unwrap_or_default();
        let operands: Vec<String> = operands.chunks(8).take(4).map(hex).collect();
        format!(
            "{at}: {} instead of {}, of {operands:?}",
            hex(got),
            hex(expected)
        )
    });
    words.collect()
}

fn depends_on_order(
    module: &Module,
    kernel: &str,
    launch: &Launch<'_>,
    before: &Memory,
    after: &Memory,
) -> bool {
    let mut again = before.clone();
    let other = Launch {
        seed: launch.seed + 1,
        ..launch.clone()
    };
    let ran = module.run(kernel, &other, &Limits::default(), &mut again);
    ran.is_err() || again.buffers != after.buffers
}

fn has_addresses(memory: &Memory) -> bool {
    let mut words = memory
        .buffers
        .iter()
        .flat_map(|(_, bytes)| bytes.as_chunks().0);
    words.any(|word| is_address(*word))
}

/// Whether every operation has one right result. Without rounding modes, ptxas may fuse a product and a sum.
fn is_exact(text: &str) -> bool {
    let rounds_freely = |operation: &str| {
        let types = [".f", ".bf16", ".ftz.f", ".sat.f", ".ftz.sat.f"];
        types
            .iter()
            .any(|ty| text.contains(&format!("{operation}{ty}")))
    };
    let fusible = rounds_freely("mul") && (rounds_freely("add") || rounds_freely("sub"));
    // Which lanes are active where their paths meet is not defined.
    let inexact = [".approx", "div.full", "mma.sync", "mma_async", "activemask"];
    !fusible && !inexact.iter().any(|form| text.contains(form))
}

/// Whether a word is an address of [`Memory`].
fn is_address(word: [u8; 8]) -> bool {
    (BASE..BASE + (1 << 32)).contains(&u64::from_le_bytes(word))
}

impl Device {
    /// Runs a launch on copies of the buffers, and gives what it leaves in them.
    fn run(
        &self,
        (text, module): (&str, &Module),
        kernel: &str,
        launch: &Launch<'_>,
        before: &Memory,
    ) -> Result<Vec<Vec<u8>>, String> {
        let cuda = &self.cuda;
        let check = |call: &str, code: c_int| match code {
            0 => Ok(()),
            code => Err(format!("{call}: {code}")),
        };
        check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(self.context))?;
        let text = CString::new(text.trim_end_matches('\0')).map_err(|error| error.to_string())?;
        let mut loaded: Handle = 0;
        check(
            "cuModuleLoadData",
            cuda.cuModuleLoadData(&mut loaded, text.as_ptr().cast()),
        )?;
        let function = cuda.function(loaded, kernel);
        let shared = launch.dynamic_shared;
        check(
            "cuFuncSetAttribute",
            cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared as c_int),
        )?;
        let mut copies = Vec::new();
        for (address, bytes) in &before.buffers {
            let copy = cuda.alloc(bytes.len().max(1));
            let code = cuda.cuMemcpyHtoD_v2(copy, bytes.as_ptr().cast(), bytes.len());
            check("cuMemcpyHtoD", code)?;
            copies.push((*address, bytes.len(), copy));
        }
        let mut parameters = launch.parameters.to_vec();
        for word in parameters.as_chunks_mut().0 {
            let value = u64::from_le_bytes(*word);
            let of = copies.iter().rfind(|(address, ..)| *address <= value);
            if let (true, Some((address, _, copy))) = (is_address(*word), of) {
                *word = (copy + value - address).to_le_bytes();
            }
        }
        let of = module.kernel(kernel).expect("the emulator has run it");
        let pointers: Vec<*const c_void> = of
            .parameters
            .iter()
            .map(|parameter| parameters[parameter.offset as usize..].as_ptr().cast())
            .collect();
        let (grid, block) = (launch.grid, launch.block);
        let code = cuda.cuLaunchKernel(
            function,
            grid.x,
            grid.y,
            grid.z,
            block.x,
            block.y,
            block.z,
            shared,
            0,
            pointers.as_ptr(),
            std::ptr::null(),
        );
        check("cuLaunchKernel", code)?;
        check("cuCtxSynchronize", cuda.cuCtxSynchronize())?;
        let mut results = Vec::new();
        for (_, bytes, copy) in copies {
            let mut result = vec![0; bytes];
            let code = cuda.cuMemcpyDtoH_v2(result.as_mut_ptr().cast(), copy, bytes);
            check("cuMemcpyDtoH", code)?;
            check("cuMemFree", cuda.cuMemFree_v2(copy))?;
            results.push(result);
        }
        check("cuModuleUnload", cuda.cuModuleUnload(loaded))?;
        Ok(results)
    }
}
