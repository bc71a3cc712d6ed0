//! The other ranks of a data-parallel run: NCCL adds gradients on the devices, and the world's connections tell
//! which rank is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::driver::{Device, Stream};
use super::error::CudaError;
use super::nccl::{Communicator, Element, Nccl, Reduction, UniqueId};
use crate::comm::{CommError, World};
use crate::engine::EngineError;

/// How long the ranks may take to form their communicator.
const FORMING: Duration = Duration::from_secs(120);
/// The world, not a time, ends a wait for a peer, which may compute for long.
const UNLIMITED: Duration = Duration::MAX;
/// Pause between two checks of the world.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a rank that leaves waits for collectives; then it aborts them.
const LEAVING: Duration = Duration::from_secs(5);
/// How long a failure of NCCL waits for the world to name the lost rank; heartbeats take a few seconds.
const NAMING: Duration = Duration::from_secs(10);

/// A rank's connection to its peers.
pub struct Peers {
    world: World,
    communicator: Arc<Communicator>,
    /// Runs the collectives.
    pub stream: Stream,
    watchdog: Watchdog,
}

impl Peers {
    /// Forms the communicator with all ranks of the world, which call this together.
    pub fn join(device: &Arc<Device>, world: World) -> Result<Peers, EngineError> {
        let nccl = Nccl::load(device.driver())?;
        let own = match world.rank() {
            0 => nccl.unique_id()?.as_bytes().to_vec(),
            _ => Vec::new(),
        };
        let everyones = world.exchange(&own)?;
        let id = everyones
            .first()
            .and_then(|id| id.as_slice().try_into().ok());
        let id = UniqueId::from_bytes(id.ok_or_else(|| {
            CommError::Rendezvous("rank 0 sent no id of NCCL; its version differs".to_owned())
        })?);
        let place = (world.rank(), world.world());
        let limits = [FORMING, UNLIMITED];
        let wanted = || world.check().is_ok();
        let communicator = Communicator::form(&nccl, device, &id, place, limits, &wanted);
        let communicator = Arc::new(communicator.map_err(|error| named(&world, error))?);
        Ok(Peers {
            stream: device.stream()?,
            watchdog: Watchdog::start(&world, &communicator),
            communicator,
            world,
        })
    }

    pub fn world(&self) -> &World {
        &self.world
    }

    /// Adds `elements` f32 over all ranks, in place. The memory is live until [`Peers::synchronize`] has
    /// returned.
    pub fn all_reduce(&self, address: u64, elements: usize) -> Result<(), CudaError> {
        // SAFETY: the engine passes buffers of its state, and ends the collectives before it frees them.
        unsafe {
            self.communicator.all_reduce_in_place(
                &self.stream,
                address,
                elements,
                Element::F32,
                Reduction::Sum,
            )
        }
    }

    /// `whole[r · elements + i] = own[i]` of rank r. The memory is live until [`Peers::synchronize`] has
    /// returned.
    pub fn all_gather(
        &self,
        own: u64,
        whole: u64,
        elements: usize,
        element: Element,
    ) -> Result<(), CudaError> {
        // SAFETY: as in [`Peers::all_reduce`].
        unsafe {
            let communicator = &self.communicator;
            communicator.all_gather(&self.stream, own, whole, elements, element)
        }
    }

    /// `own[i] = Σ over ranks of whole[rank · elements + i]`, f32; in place if `own` is that part of `whole`.
    /// The memory is live until [`Peers::synchronize`] has returned.
    pub fn reduce_scatter(&self, whole: u64, own: u64, elements: usize) -> Result<(), CudaError> {
        // SAFETY: as in [`Peers::all_reduce`].
        unsafe {
            self.communicator.reduce_scatter(
                &self.stream,
                whole,
                own,
                elements,
                Element::F32,
                Reduction::Sum,
            )
        }
    }

    /// Waits for the collectives so far. It ends when a rank is lost, too.
    ///
    /// # Errors
    /// The lost rank, by the world's connections, or else NCCL's error.
    pub fn synchronize(&self) -> Result<(), EngineError> {
        self.synchronize_with(&self.stream)
            .map_err(|error| self.named(error))
    }

    /// Waits for a stream that waits for collectives. It ends when a rank is lost, too.
    pub fn synchronize_with(&self, stream: &Stream) -> Result<(), CudaError> {
        self.communicator.synchronize(stream, UNLIMITED)
    }

    /// The world's reason for a failed collective, if it gives one soon.
    pub fn named(&self, error: CudaError) -> EngineError {
        // NCCL hides the driver's error of a device that is lost.
        match self.stream.is_done() {
            Err(lost) if lost.is_of_a_lost_device() => lost.into(),
            _ => named(&self.world, error),
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.watchdog.stop();
        match self.world.check() {
            Ok(()) => {
                let _ = self.communicator.synchronize(&self.stream, LEAVING);
            }
            Err(_) => self.communicator.abort(),
        }
        // The engine then frees the memory that the stream's work uses.
        let _ = self.stream.synchronize();
    }
}

fn named(world: &World, error: CudaError) -> EngineError {
    let begun = Instant::now();
    while error.is_of_nccl() && begun.elapsed() < NAMING {
        if let Err(reason) = world.check() {
            return reason.into();
        }
        thread::sleep(PAUSE);
    }
    error.into()
}

/// Aborts a communicator whose world has ended, so that no wait for a lost rank hangs. It asks the world, which
/// tells its end to one listener only, the rank's process.
struct Watchdog {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    fn start(world: &World, communicator: &Arc<Communicator>) -> Watchdog {
        let stopped = Arc::<AtomicBool>::default();
        let (world, communicator, stop) = (world.clone(), communicator.clone(), stopped.clone());
        let watch = move || {
            while !stop.load(Ordering::Acquire) {
                if world.check().is_err() {
                    return communicator.abort();
                }
                thread::sleep(PAUSE);
            }
        };
        Watchdog {
            stopped,
            thread: Some(thread::spawn(watch)),
        }
    }

    fn stop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
