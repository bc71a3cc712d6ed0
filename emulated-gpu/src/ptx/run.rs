//! Runs a launch: its blocks one after the other, in an order drawn from the seed, and within a block its
//! warps, a random number of instructions at a time.

use super::Module;
use super::barrier::Barriers;
use super::counters::Counters;
use super::instruction::{Barrier, Constant, LANES, Special};
use super::module::Kernel;
use super::shared::Shared;
use super::warp::Warp;
use super::wgmma::Warpgroup;
use crate::launch::{Dim, GlobalMemory, Launch, MemoryFault};

/// Generic addresses of shared memory begin here. Device pointers must be smaller.
pub const SHARED_WINDOW: u64 = 1 << 56;
/// Generic addresses of local memory begin here.
pub const LOCAL_WINDOW: u64 = 2 << 56;
/// Generic addresses of parameters begin here.
pub const PARAMETER_WINDOW: u64 = 3 << 56;

/// What a launch may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Threads of a block.
    pub threads: u64,
    /// Bytes of static shared memory of a block.
    pub static_shared: u64,
    /// Bytes of static and dynamic shared memory of a block.
    pub shared: u64,
    /// Registers of a block; `.maxnreg` times threads may not exceed it.
    pub registers: u64,
    /// Warp instructions of a launch, so that an endless loop ends.
    pub instructions: u64,
}

impl Default for Limits {
    /// Those of an H100 whose kernels opted in to all of its shared memory.
    fn default() -> Self {
        Self {
            threads: 1024,
            static_shared: 48 << 10,
            shared: 227 << 10,
            registers: 1 << 16,
            instructions: 10_000_000_000,
        }
    }
}

/// A launch that a driver would refuse.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    #[error("the module has no kernel `{kernel}`")]
    NoKernel { kernel: String },
    #[error("grid {grid} and block {block} must be positive in every direction")]
    Empty { grid: Dim, block: Dim },
    #[error("{threads} threads per block exceed {limit}")]
    Threads { threads: u64, limit: u64 },
    #[error("block {block} must be {required}, as `.reqntid` says")]
    RequiredThreads { block: Dim, required: Dim },
    #[error("grid {grid} exceeds (2147483647, 65535, 65535)")]
    Grid { grid: Dim },
    #[error("{bytes} bytes of static shared memory exceed {limit}")]
    StaticShared { bytes: u64, limit: u64 },
    #[error("{bytes} bytes of shared memory exceed {limit}")]
    Shared { bytes: u64, limit: u64 },
    #[error("{registers} registers of {threads} threads exceed {limit} per block")]
    Registers {
        registers: u64,
        threads: u64,
        limit: u64,
    },
    #[error("{bytes} bytes of parameters were passed; the kernel takes {expected}")]
    Parameters { bytes: u64, expected: u64 },
    #[error("variable `{variable}` has no address; place it before the launch")]
    Unplaced { variable: String },
}

/// What a thread did wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("access of {bytes} bytes at {address:#x} is misaligned")]
    Misaligned { address: u64, bytes: u64 },
    #[error("{bytes} bytes at {address:#x} exceed the {size} bytes of {space} memory")]
    OutOfWindow {
        space: &'static str,
        address: u64,
        bytes: u64,
        size: u64,
    },
    #[error(transparent)]
    Global(#[from] MemoryFault),
    #[error("register `{name}` is read before it is written")]
    UninitialisedRegister { name: String },
    #[error("{space} memory at {address:#x} is read before it is written")]
    UninitialisedMemory { space: &'static str, address: u64 },
    #[error(
        "{access} of shared memory at {address:#x} races with a {other_access} by thread {other}"
    )]
    Race {
        address: u64,
        access: &'static str,
        other_access: &'static str,
        other: Dim,
    },
    #[error(
        "shared memory at {address:#x} is accessed before its asynchronous copy was waited for"
    )]
    PendingCopy { address: u64 },
    #[error("shared memory at {address:#x} is written while a wgmma of thread {other} reads it")]
    OperandUnderWay { address: u64, other: Dim },
    #[error(
        "shared memory at {address:#x} was written by thread {other} without a `fence.proxy.async` before the wgmma"
    )]
    NoProxyFence { address: u64, other: Dim },
    #[error("register `{name}` belongs to a wgmma that was not waited for")]
    RegisterUnderWay { name: String },
    #[error("register `{name}` is used by a wgmma without a `wgmma.fence` after its last write")]
    NoRegisterFence { name: String },
    #[error("the matrix descriptor {descriptor:#x} {problem}")]
    Descriptor {
        descriptor: u64,
        problem: &'static str,
    },
    #[error(
        "wgmma needs four whole warps from a multiple of four on; the block has {threads} threads"
    )]
    NoWarpgroup { threads: u64 },
    #[error("another warp of the warpgroup executes line {line} or other operands instead")]
    WarpgroupDiffers { line: u32 },
    #[error("the warp exits, and another warp of its warpgroup executes line {line} once more")]
    WarpgroupExited { line: u32 },
    #[error("source size {bytes} of an asynchronous copy exceeds {limit}")]
    CopySize { bytes: u32, limit: u32 },
    #[error("lanes {missing:#010x} of the mask {mask:#010x} do not execute the instruction")]
    InactiveLanes { mask: u32, missing: u32 },
    #[error("the mask {mask:#010x} lacks the executing lane")]
    NotInMask { mask: u32 },
    #[error("lanes {missing:#010x} of the warp do not reach the barrier")]
    DivergentBarrier { missing: u32 },
    #[error("barrier {id}: the warp waits for {threads} threads, another warp for {others}")]
    BarrierCount { id: u32, threads: u32, others: u32 },
    #[error("barrier {id}: another warp waits at line {line}")]
    BarrierElsewhere { id: u32, line: u32 },
    #[error("barrier {id} does not exist or cannot have {threads} threads")]
    BarrierInvalid { id: u32, threads: u32 },
    #[error("barrier {id}: {exited} warps have exited without reaching it")]
    BarrierAfterExit { id: u32, exited: u32 },
    #[error("deadlock at barrier {id}: {arrived} of {threads} threads have arrived")]
    Deadlock { id: u32, arrived: u32, threads: u32 },
    #[error("the launch exceeds {instructions} warp instructions")]
    Budget { instructions: u64 },
    #[error("the operand must be the same in all lanes")]
    NotUniform,
    #[error("branch index {index} exceeds {targets} targets")]
    BranchIndex { index: u32, targets: u32 },
    #[error("the kernel trapped")]
    Trap,
}

/// A fault with its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("kernel `{kernel}`, line {line} `{text}`, block {block}, thread {thread}: {fault}")]
pub struct ExecutionError {
    pub kernel: String,
    /// In the module's text.
    pub line: u32,
    /// The line.
    pub text: String,
    pub block: Dim,
    pub thread: Dim,
    pub fault: Fault,
}

/// Why a launch failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Execution(#[from] Box<ExecutionError>),
}

/// A fault of a lane.
#[derive(Debug)]
pub struct LaneFault {
    pub lane: usize,
    pub fault: Fault,
}

impl LaneFault {
    pub fn new(lane: usize, fault: Fault) -> Self {
        Self { lane, fault }
    }

    /// Of the lowest lane of a mask.
    pub fn lowest(mask: u32, fault: Fault) -> Self {
        Self::new(mask.trailing_zeros() as usize % LANES, fault)
    }
}

/// The lanes of a mask, lowest first.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros() as usize;
        left &= left.checked_sub(1)?;
        Some(lane)
    })
}

/// What the warps of a launch share.
pub struct Machine<'a> {
    pub kernel: &'a Kernel,
    pub parameters: &'a [u8],
    pub block: Dim,
    pub memory: &'a mut dyn GlobalMemory,
    pub shared: Shared,
    pub counters: Counters,
    /// Warp instructions left.
    pub budget: u64,
    /// Warp instructions executed.
    pub clock: u64,
    /// Addresses of one access, kept to save allocations.
    pub scratch: Vec<u64>,
    pub warpgroups: Vec<Warpgroup>,
}

impl Machine<'_> {
    /// The coordinates of a thread in its block.
    pub fn thread(&self, linear: u32) -> Dim {
        Dim {
            x: linear % self.block.x,
            y: linear / self.block.x % self.block.y,
            z: linear / self.block.x / self.block.y,
        }
    }
}

/// Why a warp stopped running.
pub enum Stop {
    /// It ran as long as it may.
    Turn,
    Done,
    /// It reached a barrier at an instruction, with the lanes for which the predicate holds.
    Barrier {
        barrier: Barrier,
        pc: u32,
        votes: u32,
    },
}

/// Splitmix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    Waiting,
    Done,
}

impl Module {
    /// Runs a launch to its end or to the first fault.
    pub fn run(
        &self,
        kernel: &str,
        launch: &Launch<'_>,
        limits: &Limits,
        memory: &mut dyn GlobalMemory,
    ) -> Result<Counters, RunError> {
        let Some(kernel) = self.kernel(kernel) else {
            let kernel = kernel.to_owned();
            return Err(LaunchError::NoKernel { kernel }.into());
        };
        check(kernel, launch, limits)?;
        let align = kernel.code.dynamic_align;
        let dynamic_base = kernel.static_shared.next_multiple_of(align);
        let shared_bytes = dynamic_base + u64::from(launch.dynamic_shared);
        let warp_count = launch.block.count().div_ceil(LANES as u64) as usize;
        let mut machine = Machine {
            kernel,
            parameters: launch.parameters,
            block: launch.block,
            memory,
            shared: Shared::new(
                shared_bytes,
                kernel.code.granule,
                warp_count,
                kernel.code.has_wgmma,
            ),
            counters: Counters::default(),
            budget: limits.instructions,
            clock: 0,
            scratch: Vec::new(),
            warpgroups: Vec::new(),
        };
        let mut warps = Vec::new();
        for index in 0..warp_count {
            let mut warp = Warp::new(kernel, launch.block.count(), index);
            self.fill(&mut warp, kernel, launch, dynamic_base, shared_bytes)?;
            warps.push(warp);
        }
        let mut random = Random(launch.seed);
        let mut blocks: Vec<u64> = (0..launch.grid.count()).collect();
        for i in (1..blocks.len()).rev() {
            blocks.swap(i, random.below(i as u64 + 1) as usize);
        }
        for block in blocks {
            let x = u64::from(launch.grid.x);
            let y = u64::from(launch.grid.y);
            let block = Dim {
                x: (block % x) as u32,
                y: (block / x % y) as u32,
                z: (block / x / y) as u32,
            };
            for warp in &mut warps {
                warp.begin(&kernel.code, block);
            }
            machine.shared.begin();
            machine.warpgroups = vec![Warpgroup::default(); warp_count.div_ceil(4)];
            let written = machine.counters.global_bytes_written;
            let (warp, at) = match run_block(&mut machine, &mut warps, &mut random) {
                Ok(()) => {
                    let counters = &mut machine.counters;
                    counters.idle_blocks += u64::from(counters.global_bytes_written == written);
                    continue;
                }
                Err(failed) => failed,
            };
            let LaneFault { lane, fault } = at;
            let fault = match fault {
                Fault::Budget { .. } => Fault::Budget {
                    instructions: limits.instructions,
                },
                fault => fault,
            };
            let line = kernel.code.instructions[warps[warp].pc() as usize].line;
            return Err(RunError::Execution(Box::new(ExecutionError {
                kernel: kernel.name.clone(),
                line,
                text: self.line(line),
                block,
                thread: machine.thread((warp * LANES + lane) as u32),
                fault,
            })));
        }
        Ok(machine.counters)
    }

    /// Sets the constants and special registers of a warp, apart from the block's.
    fn fill(
        &self,
        warp: &mut Warp,
        kernel: &Kernel,
        launch: &Launch<'_>,
        dynamic_base: u64,
        shared_bytes: u64,
    ) -> Result<(), LaunchError> {
        let axis = |dim: Dim, axis: u8| match axis {
            0 => dim.x,
            1 => dim.y,
            _ => dim.z,
        };
        let warps = launch.block.count().div_ceil(LANES as u64) as u32;
        let index = warp.index as u32;
        let value = |constant: Constant, lane: u32| -> Result<u64, LaunchError> {
            let thread = index * LANES as u32 + lane;
            let block = launch.block;
            let tid = Dim {
                x: thread % block.x,
                y: thread / block.x % block.y,
                z: thread / block.x / block.y,
            };
            let special = match constant {
                Constant::Bits(bits) => return Ok(bits),
                Constant::DynamicShared(offset) => return Ok(dynamic_base.wrapping_add(offset)),
                Constant::Variable(variable, offset) => {
                    let address = self.address(variable);
                    let address = address.ok_or_else(|| LaunchError::Unplaced {
                        variable: self.variables()[variable].name.clone(),
                    })?;
                    return Ok(address.wrapping_add(offset));
                }
                Constant::Special(special) => special,
            };
            let at = 1u32 << lane;
            Ok(u64::from(match special {
                Special::Tid(of) => axis(tid, of),
                Special::Ntid(of) => axis(block, of),
                Special::Nctaid(of) => axis(launch.grid, of),
                // Set at the beginning of a block.
                Special::Ctaid(_) => 0,
                Special::LaneId => lane,
                Special::WarpId => index,
                Special::NumberOfWarps => warps,
                Special::GridId | Special::SmId => 0,
                Special::NumberOfSms => 1,
                Special::LaneMaskEqual => at,
                Special::LaneMaskLess => at - 1,
                Special::LaneMaskLessEqual => at | (at - 1),
                Special::LaneMaskGreater => !(at | (at - 1)),
                Special::LaneMaskGreaterEqual => !(at - 1),
                Special::DynamicSharedBytes => launch.dynamic_shared,
                Special::TotalSharedBytes => shared_bytes as u32,
            }))
        };
        let code = &kernel.code;
        for (i, &constant) in code.constants32.iter().enumerate() {
            for lane in 0..LANES {
                let value = value(constant, lane as u32)?;
                warp.r32[code.names[1].len() + i][lane] = value as u32;
            }
        }
        for (i, &constant) in code.constants64.iter().enumerate() {
            for lane in 0..LANES {
                let value = value(constant, lane as u32)?;
                warp.r64[code.names[2].len() + i][lane] = value;
            }
        }
        Ok(())
    }
}

fn check(kernel: &Kernel, launch: &Launch<'_>, limits: &Limits) -> Result<(), LaunchError> {
    let (grid, block) = (launch.grid, launch.block);
    if [grid.x, grid.y, grid.z, block.x, block.y, block.z].contains(&0) {
        return Err(LaunchError::Empty { grid, block });
    }
    if grid.x > i32::MAX as u32 || grid.y > 65535 || grid.z > 65535 {
        return Err(LaunchError::Grid { grid });
    }
    let axes = [block.x, block.y, block.z].map(u64::from);
    let threads = axes.into_iter().fold(1, u64::saturating_mul);
    let limit = limits
        .threads
        .min(1024)
        .min(kernel.max_threads.unwrap_or(u64::MAX));
    if threads > limit {
        return Err(LaunchError::Threads { threads, limit });
    }
    if let Some(required) = kernel.required_threads
        && required != block
    {
        return Err(LaunchError::RequiredThreads { block, required });
    }
    if kernel.static_shared > limits.static_shared {
        return Err(LaunchError::StaticShared {
            bytes: kernel.static_shared,
            limit: limits.static_shared,
        });
    }
    let bytes = kernel
        .static_shared
        .next_multiple_of(kernel.code.dynamic_align)
        + u64::from(launch.dynamic_shared);
    if bytes > limits.shared {
        return Err(LaunchError::Shared {
            bytes,
            limit: limits.shared,
        });
    }
    if let Some(registers) = kernel.max_registers
        && u64::from(registers) * threads > limits.registers
    {
        return Err(LaunchError::Registers {
            registers: u64::from(registers),
            threads,
            limit: limits.registers,
        });
    }
    let (bytes, expected) = (launch.parameters.len() as u64, kernel.parameter_bytes);
    if bytes != expected {
        return Err(LaunchError::Parameters { bytes, expected });
    }
    Ok(())
}

/// Runs one block. On failure gives the warp at fault.
fn run_block(
    machine: &mut Machine<'_>,
    warps: &mut [Warp],
    random: &mut Random,
) -> Result<(), (usize, LaneFault)> {
    let mut states = vec![State::Ready; warps.len()];
    let mut barriers = Barriers::default();
    loop {
        let ready = states
            .iter()
            .filter(|&&state| state == State::Ready)
            .count();
        if ready == 0 {
            break;
        }
        let chosen = random.below(ready as u64) as usize;
        let ready = (0..warps.len()).filter(|&warp| states[warp] == State::Ready);
        let Some(at) = ready.into_iter().nth(chosen) else {
            break;
        };
        let turn = 1 + random.below(2048);
        match warps[at].run(machine, turn).map_err(|fault| (at, fault))? {
            Stop::Turn => {}
            Stop::Done => states[at] = State::Done,
            Stop::Barrier { barrier, pc, votes } => {
                if barrier.kind != super::instruction::BarrierKind::Arrive {
                    states[at] = State::Waiting;
                }
                let released = barriers
                    .arrive(machine, warps, at, &barrier, pc, votes)
                    .map_err(|fault| (at, fault))?;
                for warp in released {
                    states[warp] = State::Ready;
                }
            }
        }
    }
    let exited = states.iter().filter(|&&state| state == State::Done).count();
    match states.iter().position(|&state| state == State::Waiting) {
        None => {
            for (at, warpgroup) in machine.warpgroups.iter().enumerate() {
                if let Some((warp, pc)) = warpgroup.behind() {
                    let line = machine.kernel.code.instructions[pc as usize].line;
                    let fault = Fault::WarpgroupExited { line };
                    return Err((4 * at + warp, LaneFault::new(0, fault)));
                }
            }
            Ok(())
        }
        Some(waiting) => {
            // The barrier is the instruction before.
            warps[waiting].step_back();
            let fault = barriers.stuck(waiting, exited as u32);
            Err((waiting, LaneFault::new(0, fault)))
        }
    }
}
