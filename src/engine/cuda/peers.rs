//! The other ranks of a data-parallel run: NCCL adds gradients on the devices, and the world's connections tell
//! which rank is lost.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::driver::{Device, Stream};
use super::error::CudaError;
use super::nccl::{Communicator, Nccl, UniqueId};
use super::options::Precision;
use crate::comm::activity::Activity;
use crate::comm::{CommError, World};
use crate::engine::{EngineError, sum_over_ranks};

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
    /// Where waits for other ranks are recorded.
    activity: Arc<Activity>,
    communicator: Arc<Communicator>,
    pub stream: Stream,
    /// `None` once it is stopped.
    watchdog: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Peers {
    /// Forms the communicator with all ranks of the world, which call this together.
    pub fn join(
        device: &Arc<Device>,
        world: World,
        activity: Arc<Activity>,
    ) -> Result<Peers, EngineError> {
        let nccl = Nccl::load(&device.driver)?;
        let own = match world.rank() {
            0 => nccl.unique_id()?.0.to_vec(),
            _ => Vec::new(),
        };
        let everyones = world.exchange(&own)?;
        let id = everyones
            .first()
            .and_then(|id| id.as_slice().try_into().ok());
        let id = UniqueId(id.ok_or_else(|| {
            CommError::Rendezvous("rank 0 sent no id of NCCL; its version differs".to_owned())
        })?);
        let place = (world.rank(), world.world());
        let wanted = || world.check().is_ok();
        let communicator = Communicator::form(&nccl, device, id, place, FORMING, &wanted);
        let communicator = Arc::new(communicator.map_err(|error| named(&world, error))?);
        Ok(Peers {
            stream: device.stream()?,
            watchdog: Some(watch(&world, &communicator)),
            communicator,
            world,
            activity,
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
            self.communicator
                .all_reduce(&self.stream, address, elements)
        }
    }

    /// `whole[r · elements + i] = own[i]` of rank r. The memory is live until [`Peers::synchronize`] has
    /// returned.
    pub fn all_gather(
        &self,
        own: u64,
        whole: u64,
        elements: usize,
        element: Precision,
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
            self.communicator
                .reduce_scatter(&self.stream, whole, own, elements)
        }
    }

    /// The sum of a number over all ranks.
    pub fn sum(&self, part: f64) -> Result<f64, EngineError> {
        let sum = || sum_over_ranks(&self.world, part);
        self.activity.wait("exchange", sum)
    }

    /// Waits for the collectives so far. It ends when a rank is lost, too.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.synchronize_with(&self.stream)
    }

    /// Waits for a stream that waits for collectives. It ends when a rank is lost, too.
    pub fn synchronize_with(&self, stream: &Stream) -> Result<(), CudaError> {
        let wait = || self.communicator.synchronize(stream, UNLIMITED);
        self.activity.wait("collectives of NCCL", wait)
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
        if let Some((stop, thread)) = self.watchdog.take() {
            drop(stop);
            let _ = thread.join();
        }
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

/// Aborts a communicator whose world has ended, so that no wait for a lost rank hangs, until the sender is dropped.
/// It asks the world, which tells its end to one listener only, the rank's process.
fn watch(world: &World, communicator: &Arc<Communicator>) -> (Sender<()>, JoinHandle<()>) {
    let (stop, stopped) = channel();
    let (world, communicator) = (world.clone(), communicator.clone());
    let thread = thread::spawn(move || {
        while stopped.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
            if world.check().is_err() {
                return communicator.abort();
            }
        }
    });
    (stop, thread)
}
