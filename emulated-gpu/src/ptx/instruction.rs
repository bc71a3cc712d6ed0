//! Decoded instructions.
//!
//! A register has a value for each of a warp's 32 lanes. Registers of up to 32 bits form one file, those of
//! 64 bits another; a predicate is one bit per lane. Constants and special registers lie behind the
//! registers of their file, so every source is an index.

use super::convert::Convert;
use super::counters::Class;
pub use super::parser::Register;

/// Threads of a warp.
pub const LANES: usize = 32;

pub type L32 = [u32; LANES];
pub type L64 = [u64; LANES];

pub type Unary32 = fn(&L32, &mut L32);
pub type Binary32 = fn(&L32, &L32, &mut L32);
pub type Ternary32 = fn(&L32, &L32, &L32, &mut L32);
pub type Unary64 = fn(&L64, &mut L64);
pub type Binary64 = fn(&L64, &L64, &mut L64);
pub type Ternary64 = fn(&L64, &L64, &L64, &mut L64);
pub type Shift64 = fn(&L64, &L32, &mut L64);
pub type Wide = fn(&L32, &L32, &mut L64);
pub type WideAdd = fn(&L32, &L32, &L64, &mut L64);
pub type Widen = fn(&L32, &mut L64);
pub type Narrow = fn(&L64, &mut L32);
pub type Compare32 = fn(&L32, &L32) -> u32;
pub type Compare64 = fn(&L64, &L64) -> u32;
/// One lane's result from up to four sources.
pub type Any = fn([u64; 4]) -> u64;

/// An instruction with what the checks and counters need.
#[derive(Debug, Clone)]
pub struct Instruction {
    pub op: Op,
    /// Lanes whose predicate is false skip the instruction.
    pub guard: Option<Predicate>,
    /// In the module's text.
    pub line: u32,
    pub class: Class,
    /// Registers read, as a range of `Code::reads`.
    pub reads: (u32, u32),
}

/// A predicate register as a source.
#[derive(Debug, Clone, Copy)]
pub struct Predicate {
    pub index: u32,
    pub negated: bool,
}

/// The index of a register file's element.
pub type Index = u32;

/// How `setp` combines its comparison with a predicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logic {
    And,
    Or,
    Xor,
}

/// Where an address lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

/// `[base + offset]`; the base is a register or a constant of 32 or 64 bits.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    pub base: Register,
    pub offset: i64,
}

/// A load or store of one to four elements.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    pub space: Space,
    pub address: Address,
    /// Bytes of an element.
    pub size: u8,
    pub elements: u8,
    /// A load extends the sign.
    pub signed: bool,
    /// `.volatile`, `.relaxed`, `.acquire` and `.release` do not race with each other.
    pub strong: bool,
    /// Destinations or sources; a load discards an element without one.
    pub registers: [Option<Register>; 4],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOp {
    AddInteger,
    AddF32,
    AddF64,
    AddF16x2,
    AddBf16x2,
    MinUnsigned,
    MinSigned,
    MaxUnsigned,
    MaxSigned,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

#[derive(Debug, Clone, Copy)]
pub struct Atomic {
    pub space: Space,
    pub address: Address,
    pub op: AtomicOp,
    /// Bytes of an element.
    pub size: u8,
    pub elements: u8,
    /// `None` for `red`.
    pub destinations: [Option<Register>; 4],
    pub a: [Register; 4],
    pub b: Option<Register>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarrierKind {
    Sync,
    Arrive,
    /// Over a predicate; the destination is a predicate.
    And,
    Or,
    /// The destination is a 32-bit register.
    Count,
}

#[derive(Debug, Clone, Copy)]
pub struct Barrier {
    pub kind: BarrierKind,
    pub id: Index,
    /// Threads; all of the block by default.
    pub threads: Option<Index>,
    pub source: Option<Predicate>,
    pub destination: Option<Register>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Indexed,
}

#[derive(Debug, Clone, Copy)]
pub struct Shuffle {
    pub mode: ShuffleMode,
    pub d: Index,
    pub in_range: Option<Index>,
    pub a: Index,
    pub b: Index,
    pub c: Index,
    pub mask: Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VoteKind {
    All,
    Any,
    Uniform,
    /// The destination is a 32-bit register.
    Ballot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    Add,
    MinUnsigned,
    MinSigned,
    MaxUnsigned,
    MaxSigned,
    And,
    Or,
    Xor,
}

/// What the elements of `mma`'s A and B are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    Bf16,
    F16,
    Tf32,
}

/// D = A · B + C with A of 16 × k, B of k × 8, C and D of 16 × 8 in f32.
#[derive(Debug, Clone, Copy)]
pub struct Mma {
    pub element: Element,
    pub k: u8,
    pub d: [Index; 4],
    pub a: [Index; 4],
    pub b: [Index; 2],
    pub c: [Index; 4],
}

/// The left factor of a `wgmma`, 64 × 16.
#[derive(Debug, Clone, Copy)]
pub enum Left {
    /// Each warp has 16 rows.
    Registers([Index; 4]),
    Shared(Panel),
}

/// A factor in shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Panel {
    /// A register of 64 bits with the matrix descriptor.
    pub descriptor: Index,
    /// Neighbours in memory are neighbours along M or N, not along K.
    pub transposed: bool,
}

/// `wgmma.mma_async`: D = A · B, or D + A · B, with A of 64 × 16 and B of 16 × N in bf16, D in f32.
#[derive(Debug, Clone)]
pub struct Wgmma {
    /// N / 2 registers.
    pub d: Vec<Index>,
    pub a: Left,
    pub b: Panel,
    pub accumulate: Predicate,
    /// The product is subtracted.
    pub negated: bool,
}

/// `ldmatrix` and `stmatrix` of one, two or four 8 × 8 matrices of 16-bit elements.
#[derive(Debug, Clone, Copy)]
pub struct Matrices {
    pub store: bool,
    pub count: u8,
    pub transposed: bool,
    pub address: Address,
    pub registers: [Index; 4],
}

/// `cp.async`.
#[derive(Debug, Clone, Copy)]
pub struct AsyncCopy {
    pub to: Address,
    pub from: Address,
    /// 4, 8 or 16 bytes written.
    pub bytes: u8,
    /// Bytes read; zeroes follow.
    pub source_bytes: Option<Index>,
}

#[derive(Debug, Clone)]
pub enum Op {
    /// `mov` of up to 32 bits.
    Move(Index, Index),
    Unary32(Unary32, Index, Index),
    Binary32(Binary32, Index, [Index; 2]),
    Ternary32(Ternary32, Index, [Index; 3]),
    Unary64(Unary64, Index, Index),
    Binary64(Binary64, Index, [Index; 2]),
    Ternary64(Ternary64, Index, [Index; 3]),
    Shift64(Shift64, Index, Index, Index),
    Wide(Wide, Index, [Index; 2]),
    WideAdd(WideAdd, Index, [Index; 2], Index),
    Widen(Widen, Index, Index),
    Narrow(Narrow, Index, Index),
    /// Any widths, lane by lane.
    Any(Any, Register, [Option<Register>; 4]),
    Convert(Convert, Register, Register),
    Compare {
        compare: Comparison,
        d: Option<Index>,
        /// Gets the opposite comparison.
        q: Option<Index>,
        combine: Option<(Logic, Predicate)>,
    },
    /// `set` of a 32-bit register: the values for true and false.
    Set(Comparison, Index, [u32; 2]),
    Select32(Index, [Index; 2], Predicate),
    Select64(Index, [Index; 2], Predicate),
    /// A logical function of two predicates by its truth table: bit a + 2·b.
    Predicates(u8, Index, [Predicate; 2]),
    /// `mov.b64 {lo, hi}, a` and its like: elements of equal width.
    Unpack(u32, [Option<Register>; 4], Register),
    Branch(u32),
    /// `brx.idx` with the targets.
    BranchIndexed(Index, Box<[u32]>),
    Exit,
    Trap,
    Nothing,
    /// The register counts as written.
    Define(Register),
    /// Warp instructions executed by the block so far.
    Clock(Register),
    Load(Access),
    Store(Access),
    Atomic(Atomic),
    Barrier(Barrier),
    WarpBarrier(Index),
    Shuffle(Shuffle),
    Vote(VoteKind, Register, Predicate, Index),
    ActiveMask(Index),
    /// `match.any` (false) and `match.all` (true) of a register; the destination and the predicate of `all`.
    Match(bool, Index, Option<Index>, Register, Index),
    Reduce(ReduceOp, Index, Index, Index),
    /// `elect.sync`.
    Elect(Option<Index>, Index, Index),
    Mma(Box<Mma>),
    Matrices(Matrices),
    Wgmma(Box<Wgmma>),
    WgmmaFence,
    WgmmaCommit,
    /// Waits until at most this number of newest groups is under way.
    WgmmaWait(u32),
    /// `fence.proxy.async` for shared memory.
    ProxyFence,
    /// `setmaxnreg`, which the whole warp executes.
    SetRegisters,
    Copy(AsyncCopy),
    CopyCommit,
    /// Waits until at most this number of newest groups is pending; `None` waits for every copy.
    CopyWait(Option<u32>),
}

/// A comparison that gives one bit per lane.
#[derive(Debug, Clone, Copy)]
pub enum Comparison {
    B32(Compare32, [Index; 2]),
    B64(Compare64, [Index; 2]),
}

/// The value of a constant source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Constant {
    Bits(u64),
    /// The address of a variable plus an offset.
    Variable(usize, u64),
    /// The shared address of the memory that the launch sizes, plus an offset.
    DynamicShared(u64),
    Special(Special),
}

/// Special registers whose value is constant while a warp runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    /// x, y, z.
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NumberOfWarps,
    GridId,
    SmId,
    NumberOfSms,
    LaneMaskEqual,
    LaneMaskLess,
    LaneMaskLessEqual,
    LaneMaskGreater,
    LaneMaskGreaterEqual,
    DynamicSharedBytes,
    TotalSharedBytes,
}
