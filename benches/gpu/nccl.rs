//! NCCL's real library with the one GPU that a machine may have: a communicator of one rank, one whose other rank
//! never comes, and two ranks on one GPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use evenkeel::engine::cuda::driver::{Memory, Stream};
use evenkeel::engine::cuda::nccl::{Communicator, Nccl};
use evenkeel::engine::cuda::{CudaError, Precision};
use serde_json::json;

use super::{Gpu, Report};

const ELEMENTS: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(8);
/// How long a rank waits for one that never comes.
const SHORT: Duration = Duration::from_secs(2);

pub fn run(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let nccl = Nccl::load(&gpu.device.driver)?;
    one_rank(gpu, &nccl, report)?;

    // A rank that never comes is an error after the limit, and no hang.
    let begin = Instant::now();
    let id = nccl.unique_id()?;
    let alone = Communicator::form(&nccl, &gpu.device, id, (0, 2), SHORT, &|| true);
    let seconds = begin.elapsed().as_secs_f64();
    let message = said(&alone);
    report.line(&json!({
        "result": "nccl", "of": "a rank that never comes", "message": message, "seconds": seconds,
        "ok": matches!(alone, Err(CudaError::NcclTimeout { .. })) && seconds < 10.0,
    }));

    // NCCL before 2.30 refuses two ranks on one GPU.
    let id = nccl.unique_id()?;
    let form = |rank| {
        let formed = Communicator::form(&nccl, &gpu.device, id, (rank, 2), LONG, &|| true);
        let hung = matches!(formed, Err(CudaError::NcclTimeout { .. }));
        (said(&formed), formed.is_ok(), hung)
    };
    let (first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(|| form(1));
        (form(0), other.join().unwrap_or_default())
    });
    report.line(&json!({
        "result": "nccl", "of": "two ranks on one GPU", "messages": [first.0, second.0],
        "ok": first.1 == second.1 && !(first.2 || second.2),
    }));
    one_rank(gpu, &nccl, report)
}

fn said(formed: &Result<Communicator, CudaError>) -> String {
    match formed {
        Ok(_) => "formed".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// In a world of one, every collective leaves or copies its operand.
fn one_rank(gpu: &Gpu, nccl: &Arc<Nccl>, report: &mut Report) -> anyhow::Result<()> {
    let begin = Instant::now();
    let id = nccl.unique_id()?;
    let place = (0, 1);
    let communicator = Communicator::form(nccl, &gpu.device, id, place, LONG, &|| true)?;
    let formed = begin.elapsed().as_secs_f64();
    let stream = gpu.device.stream()?;
    let bytes = 4 * ELEMENTS;
    let original = gpu.random(bytes as u64, false)?;
    let expected = download(gpu, &stream, &original)?;
    let buffer = gpu.device.allocate(bytes as u64, "a collective")?;
    let mut right = Vec::new();
    // SAFETY: both buffers have the elements, and live until `download` has synchronised the stream.
    unsafe {
        stream.copy(buffer.address(), original.address(), bytes)?;
        communicator.all_reduce(&stream, buffer.address(), ELEMENTS)?;
    }
    right.push(download(gpu, &stream, &buffer)? == expected);
    for (element, elements) in [(Precision::F32, ELEMENTS), (Precision::Bf16, 2 * ELEMENTS)] {
        // SAFETY: as above.
        unsafe {
            stream.fill_zero(buffer.address(), bytes)?;
            communicator.all_gather(
                &stream,
                original.address(),
                buffer.address(),
                elements,
                element,
            )?;
        }
        right.push(download(gpu, &stream, &buffer)? == expected);
    }
    // SAFETY: as above.
    unsafe {
        stream.fill_zero(buffer.address(), bytes)?;
        communicator.reduce_scatter(&stream, original.address(), buffer.address(), ELEMENTS)?;
    }
    right.push(download(gpu, &stream, &buffer)? == expected);
    communicator.check()?;
    communicator.synchronize(&stream, LONG)?;

    let begin = Instant::now();
    communicator.abort();
    let aborted = begin.elapsed().as_secs_f64();
    // SAFETY: the call fails.
    let after = unsafe { communicator.all_reduce(&stream, buffer.address(), ELEMENTS) };
    let Err(error) = after else {
        bail!("an aborted communicator added");
    };
    report.line(&json!({
        "result": "nccl", "of": "one rank", "collectives_right": right, "formed_seconds": formed,
        "aborted_seconds": aborted, "after_abort": error.to_string(),
        "ok": right.iter().all(|&right| right) && matches!(error, CudaError::NcclAborted { .. }),
    }));
    Ok(())
}

fn download(gpu: &Gpu, stream: &Stream, memory: &Memory) -> Result<Vec<u8>, CudaError> {
    let bytes = memory.bytes() as usize;
    let mut pinned = gpu.device.pinned(bytes, "download")?;
    // SAFETY: both live until the stream is synchronised.
    unsafe { stream.download(&mut pinned, 0, memory.address(), bytes)? };
    stream.synchronize()?;
    Ok(pinned.bytes().to_vec())
}
