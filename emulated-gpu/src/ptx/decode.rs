//! Decodes a parsed kernel: checks every form and chooses the function that executes it.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::HashMap;

use super::LoadError;
use super::convert::{Convert, Type};
use super::counters::Class;
use super::float::{self, Mode, Round, approximate, small};
use super::instruction::*;
use super::lexer::{IMPLICIT_DEF, Number};
use super::module::{Kernel, Parameter};
use super::parser::{Entry, Operand, Register, Room, Source, Statement};
use super::run::{LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW};

/// The decoded body of a kernel.
#[derive(Debug, Clone, Default)]
pub struct Code {
    pub instructions: Vec<Instruction>,
    /// Registers that instructions read: the index times four plus the file (0 predicates, 1 up to 32 bits,
    /// 2 64 bits).
    pub reads: Vec<u32>,
    /// Names of registers by file and index.
    pub names: [Vec<String>; 3],
    /// Constants behind the registers of up to 32 and of 64 bits.
    pub constants32: Vec<Constant>,
    pub constants64: Vec<Constant>,
    /// Bytes to which the launch's shared memory is aligned.
    pub dynamic_align: u64,
    /// The smallest power of two that divides every access to shared memory; races are found per granule.
    pub granule: u64,
}

/// Why an instruction is not decoded.
struct Problem(String);

impl From<&str> for Problem {
    fn from(problem: &str) -> Self {
        Self(problem.to_owned())
    }
}

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self(problem)
    }
}

type Decoded<T> = Result<T, Problem>;

/// Decodes a kernel.
pub fn kernel(text: &str, source: &Source<'_>, entry: &Entry<'_>) -> Result<Kernel, LoadError> {
    let at = |line| move |problem: Problem| LoadError::new(text, line, problem.0);
    let mut decoder = Decoder::new(source, entry).map_err(at(entry.line))?;
    for statement in &entry.statements {
        let instruction = decoder.instruction(statement).map_err(at(statement.line))?;
        decoder.code.instructions.push(instruction);
    }
    let last = entry
        .statements
        .last()
        .map_or(entry.line, |statement| statement.line);
    // A kernel may end at its brace, and a label may precede it.
    decoder.code.instructions.push(Instruction {
        op: Op::Exit,
        guard: None,
        line: last,
        class: Class::Control,
        reads: (0, 0),
    });
    let (parameters, parameter_bytes) = parameters(entry);
    let threads = entry.required_threads.or(entry.max_threads);
    Ok(Kernel {
        name: entry.name.to_owned(),
        parameters,
        parameter_bytes,
        static_shared: decoder.shared_bytes,
        max_threads: threads.map(|threads| threads.count()),
        required_threads: entry.required_threads,
        max_registers: entry.max_registers,
        local_bytes: decoder.local_bytes,
        code: decoder.code,
    })
}

fn parameters(entry: &Entry<'_>) -> (Vec<Parameter>, u64) {
    let mut end = 0u64;
    let place = |(_, room): &(&str, Room)| {
        let offset = end.next_multiple_of(room.align.max(1));
        end = offset + room.bytes;
        Parameter {
            offset,
            bytes: room.bytes,
        }
    };
    (entry.parameters.iter().map(place).collect(), end)
}

/// What a name that is no register stands for.
#[derive(Clone, Copy)]
enum Symbol {
    Variable(usize),
    Shared(Room),
    /// An offset in its window.
    Local(u64),
    Parameter(u64),
}

/// A type of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ty {
    /// Unsigned, signed and untyped integers of so many bits.
    U(u32),
    S(u32),
    B(u32),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
    Pred,
}

impl Ty {
    fn parse(name: &str) -> Option<Self> {
        let bits = |digits: &str| match digits {
            "8" => Some(8),
            "16" => Some(16),
            "32" => Some(32),
            "64" => Some(64),
            _ => None,
        };
        Some(match name {
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "pred" => Self::Pred,
            _ => match name.split_at_checked(1)? {
                ("u", digits) => Self::U(bits(digits)?),
                ("s", digits) => Self::S(bits(digits)?),
                ("b", digits) => Self::B(bits(digits)?),
                _ => return None,
            },
        })
    }

    fn bits(self) -> u32 {
        match self {
            Self::U(bits) | Self::S(bits) | Self::B(bits) => bits,
            Self::F16 | Self::Bf16 => 16,
            Self::F16x2 | Self::Bf16x2 | Self::F32 => 32,
            Self::F64 => 64,
            Self::Pred => 1,
        }
    }
}

/// An opcode's modifiers in order. What is left after decoding is not implemented.
struct Modifiers<'a>(Vec<&'a str>);

impl<'a> Modifiers<'a> {
    fn take(&mut self, name: &str) -> bool {
        let found = self.0.iter().position(|&modifier| modifier == name);
        found.map(|at| self.0.remove(at)).is_some()
    }

    fn any(&mut self, names: &[&str]) -> bool {
        names.iter().fold(false, |any, name| self.take(name) | any)
    }

    fn choose<T: Copy>(&mut self, of: &[(&str, T)]) -> Option<T> {
        of.iter()
            .find_map(|&(name, value)| self.take(name).then_some(value))
    }

    fn first(&mut self) -> Decoded<&'a str> {
        if self.0.is_empty() {
            return Err("a modifier is missing".into());
        }
        Ok(self.0.remove(0))
    }

    /// Takes the type, which is last.
    fn ty(&mut self) -> Decoded<Ty> {
        let name = self.0.pop().ok_or(Problem::from("the type is missing"))?;
        Ty::parse(name).ok_or_else(|| format!("the type `.{name}` is not implemented").into())
    }

    fn mode(&mut self) -> Mode {
        let round = self.choose(&ROUNDINGS).unwrap_or(Round::Nearest);
        Mode {
            round,
            ftz: self.take("ftz"),
            sat: self.take("sat"),
        }
    }

    fn end(&self) -> Decoded<()> {
        match self.0.first() {
            None => Ok(()),
            Some(modifier) => Err(format!("`.{modifier}` is not implemented here").into()),
        }
    }
}

const ROUNDINGS: [(&str, Round); 4] = [
    ("rn", Round::Nearest),
    ("rz", Round::Zero),
    ("rm", Round::Down),
    ("rp", Round::Up),
];

const TO_INTEGER: [(&str, Round); 4] = [
    ("rni", Round::Nearest),
    ("rzi", Round::Zero),
    ("rmi", Round::Down),
    ("rpi", Round::Up),
];

const SPACES: [(&str, Space); 7] = [
    ("global", Space::Global),
    ("shared", Space::Shared),
    ("shared::cta", Space::Shared),
    ("local", Space::Local),
    ("param", Space::Param),
    // The caller places constants in global memory.
    ("const", Space::Global),
    ("param::entry", Space::Param),
];

const STRENGTHS: [&str; 4] = ["volatile", "relaxed", "acquire", "release"];

/// Hints and scopes, which change nothing here.
const HINTS: [&str; 31] = [
    "weak",
    "acq_rel",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::cache_hint",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "noftz",
];

// Lane loops over a function of one lane.
macro_rules! f1 {
    ($f:expr) => {
        (|a: &L32, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Unary32
    };
}
macro_rules! f2 {
    ($f:expr) => {
        (|a: &L32, b: &L32, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Binary32
    };
}
macro_rules! f3 {
    ($f:expr) => {
        (|a: &L32, b: &L32, c: &L32, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane], c[lane]);
            }
        }) as Ternary32
    };
}
macro_rules! g1 {
    ($f:expr) => {
        (|a: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Unary64
    };
}
macro_rules! g2 {
    ($f:expr) => {
        (|a: &L64, b: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Binary64
    };
}
macro_rules! g3 {
    ($f:expr) => {
        (|a: &L64, b: &L64, c: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane], c[lane]);
            }
        }) as Ternary64
    };
}
macro_rules! shift64 {
    ($f:expr) => {
        (|a: &L64, b: &L32, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Shift64
    };
}
macro_rules! wide {
    ($f:expr) => {
        (|a: &L32, b: &L32, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Wide
    };
}
macro_rules! wide_add {
    ($f:expr) => {
        (|a: &L32, b: &L32, c: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]).wrapping_add(c[lane]);
            }
        }) as WideAdd
    };
}
macro_rules! widen {
    ($f:expr) => {
        (|a: &L32, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Widen
    };
}
macro_rules! narrow {
    ($f:expr) => {
        (|a: &L64, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Narrow
    };
}
macro_rules! compare32 {
    ($f:expr) => {
        (|a: &L32, b: &L32| {
            let mut mask = 0;
            for lane in 0..LANES {
                mask |= u32::from($f(a[lane], b[lane])) << lane;
            }
            mask
        }) as Compare32
    };
}
macro_rules! compare64 {
    ($f:expr) => {
        (|a: &L64, b: &L64| {
            let mut mask = 0;
            for lane in 0..LANES {
                mask |= u32::from($f(a[lane], b[lane])) << lane;
            }
            mask
        }) as Compare64
    };
}

/// The expression with the constant that packs the mode.
macro_rules! by_mode {
    ($mode:expr, $m:ident, $e:expr) => {
        by_mode!(@ $mode, $m, $e, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $mode:expr, $m:ident, $e:expr, $($value:literal)*) => {
        match $mode.pack() {
            $($value => {
                const $m: u8 = $value;
                $e
            })*
            _ => return Err("the rounding mode is not implemented".into()),
        }
    };
}

/// The same for operations that only round to nearest.
macro_rules! by_flush {
    ($mode:expr, $m:ident, $e:expr) => {
        by_mode!(@ $mode, $m, $e, 0 4 8 12)
    };
}

macro_rules! compare_integers {
    ($name:expr, $lanes:ident, $of:expr) => {
        match $name {
            "eq" => $lanes!(|a, b| $of(a) == $of(b)),
            "ne" => $lanes!(|a, b| $of(a) != $of(b)),
            "lt" | "lo" => $lanes!(|a, b| $of(a) < $of(b)),
            "le" | "ls" => $lanes!(|a, b| $of(a) <= $of(b)),
            "gt" | "hi" => $lanes!(|a, b| $of(a) > $of(b)),
            "ge" | "hs" => $lanes!(|a, b| $of(a) >= $of(b)),
            other => return Err(format!("the comparison `.{other}` is not implemented").into()),
        }
    };
}

macro_rules! compare_floats {
    ($name:expr, $lanes:ident, $of:expr) => {
        match $name {
            "eq" => $lanes!(|a, b| $of(a) == $of(b)),
            "ne" => $lanes!(|a, b| $of(a) < $of(b) || $of(a) > $of(b)),
            "lt" => $lanes!(|a, b| $of(a) < $of(b)),
            "le" => $lanes!(|a, b| $of(a) <= $of(b)),
            "gt" => $lanes!(|a, b| $of(a) > $of(b)),
            "ge" => $lanes!(|a, b| $of(a) >= $of(b)),
            "equ" => $lanes!(|a, b| matches!($of(a).partial_cmp(&$of(b)), Some(Equal) | None)),
            "neu" => $lanes!(|a, b| $of(a) != $of(b)),
            "ltu" => $lanes!(|a, b| matches!($of(a).partial_cmp(&$of(b)), Some(Less) | None)),
            "leu" => $lanes!(|a, b| $of(a).partial_cmp(&$of(b)) != Some(Greater)),
            "gtu" => $lanes!(|a, b| matches!($of(a).partial_cmp(&$of(b)), Some(Greater) | None)),
            "geu" => $lanes!(|a, b| $of(a).partial_cmp(&$of(b)) != Some(Less)),
            "num" => $lanes!(|a, b| !$of(a).is_nan() && !$of(b).is_nan()),
            "nan" => $lanes!(|a, b| $of(a).is_nan() || $of(b).is_nan()),
            other => return Err(format!("the comparison `.{other}` is not implemented").into()),
        }
    };
}

/// A function of 16-bit numbers on both halves.
fn halves2(a: u32, b: u32, f: impl Fn(u32, u32) -> u32) -> u32 {
    f(a & 0xffff, b & 0xffff) | f(a >> 16, b >> 16) << 16
}

fn s16(a: u32) -> i32 {
    i32::from(a as u16 as i16)
}

fn s32(a: u32) -> i32 {
    a as i32
}

fn s64(a: u64) -> i64 {
    a as i64
}

fn u32_of(a: u32) -> u32 {
    a
}

fn u64_of(a: u64) -> u64 {
    a
}

fn f32_of(a: u32) -> f32 {
    f32::from_bits(a)
}

fn f32_flushed(a: u32) -> f32 {
    f32::from_bits(float::flush(a))
}

fn f64_of(a: u64) -> f64 {
    f64::from_bits(a)
}

fn f16_of(a: u32) -> f64 {
    float::wide(a, float::F16)
}

fn bf16_of(a: u32) -> f64 {
    float::wide(a, float::BF16)
}

/// Division by zero has an unspecified result; the emulator gives all ones, as GPUs do.
fn divided<T>(quotient: Option<T>, ones: T) -> T {
    quotient.unwrap_or(ones)
}

fn quotient32(a: u32, b: u32) -> u32 {
    if b == 0 {
        return u32::MAX;
    }
    (a as i32).wrapping_div(b as i32) as u32
}

fn rest32(a: u32, b: u32) -> u32 {
    if b == 0 {
        return a;
    }
    (a as i32).wrapping_rem(b as i32) as u32
}

fn quotient64(a: u64, b: u64) -> u64 {
    if b == 0 {
        return u64::MAX;
    }
    (a as i64).wrapping_div(b as i64) as u64
}

fn rest64(a: u64, b: u64) -> u64 {
    if b == 0 {
        return a;
    }
    (a as i64).wrapping_rem(b as i64) as u64
}

fn quotient16(a: u32, b: u32) -> u32 {
    match s16(b) {
        0 => 0xffff,
        b => (s16(a).wrapping_div(b) & 0xffff) as u32,
    }
}

fn rest16(a: u32, b: u32) -> u32 {
    match s16(b) {
        0 => a,
        b => (s16(a).wrapping_rem(b) & 0xffff) as u32,
    }
}

fn high_u32(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

fn high_s32(a: u32, b: u32) -> u32 {
    ((i64::from(s32(a)) * i64::from(s32(b))) >> 32) as u32
}

fn high_u64(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

fn high_s64(a: u64, b: u64) -> u64 {
    ((i128::from(s64(a)) * i128::from(s64(b))) >> 64) as u64
}

/// Shifts clamp their count to the width.
fn shr_s32(a: u32, by: u32) -> u32 {
    ((a as i32) >> by.min(31)) as u32
}

fn shr_s64(a: u64, by: u32) -> u64 {
    ((a as i64) >> by.min(63)) as u64
}

fn extract_u(value: u64, at: u64, len: u64, _bits: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    if at >= 64 || len == 0 {
        return 0;
    }
    let field = value >> at;
    if len >= 64 {
        field
    } else {
        field & ((1 << len) - 1)
    }
}

/// The sign bit is the field's highest, or the value's where the field ends beyond it.
fn extract_s(value: u64, at: u64, len: u64, bits: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    let last = u64::from(bits - 1);
    let value = ((value << (64 - bits)) as i64) >> (64 - bits);
    let sign = (value >> (at + len - 1).min(last)) & 1;
    let mut field = 0u64;
    for i in 0..u64::from(bits) {
        let bit = if i < len && at + i <= last {
            (value >> (at + i)) & 1
        } else {
            sign
        };
        field |= (bit as u64) << i;
    }
    field
}

fn insert(field: u64, into: u64, at: u64, len: u64, bits: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    let mut result = into;
    for i in 0..len {
        let to = at + i;
        if to >= u64::from(bits) {
            break;
        }
        result = result & !(1 << to) | (field >> i & 1) << to;
    }
    result
}

fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    let mut result = 0;
    for i in 0..4 {
        let select = selector >> (4 * i) & 0xf;
        let byte = (bytes >> (8 * (select & 7))) as u8;
        let byte = if select & 8 == 0 {
            byte
        } else if byte & 0x80 != 0 {
            0xff
        } else {
            0
        };
        result |= u32::from(byte) << (8 * i);
    }
    result
}

/// The logical function of three inputs by its truth table.
fn lop3(a: u64, b: u64, c: u64, table: u64) -> u64 {
    let mut result = 0;
    for case in 0..8u64 {
        if table >> case & 1 == 1 {
            let a = if case & 4 != 0 { a } else { !a };
            let b = if case & 2 != 0 { b } else { !b };
            let c = if case & 1 != 0 { c } else { !c };
            result |= a & b & c;
        }
    }
    result & 0xffff_ffff
}

/// The position of the highest one (or of the highest bit unlike the sign); all ones without one.
fn highest(a: u64, bits: u32, signed: bool, shift: bool) -> u64 {
    let value = if signed {
        let value = ((a << (64 - bits)) as i64) >> (64 - bits);
        (if value < 0 { !value } else { value }) as u64
    } else {
        a
    };
    if value == 0 {
        return 0xffff_ffff;
    }
    let at = 63 - u64::from(value.leading_zeros());
    if shift { u64::from(bits) - 1 - at } else { at }
}

struct Decoder<'s, 'a> {
    entry: &'s Entry<'a>,
    symbols: HashMap<&'a str, Symbol>,
    /// Shared addresses of the static variables used so far.
    shared: HashMap<&'a str, u64>,
    shared_bytes: u64,
    local_bytes: u64,
    constants32: HashMap<Constant, u32>,
    constants64: HashMap<Constant, u32>,
    code: Code,
    /// Registers that the instruction reads.
    reads: Vec<u32>,
}

impl<'s, 'a> Decoder<'s, 'a> {
    fn new(source: &'s Source<'a>, entry: &'s Entry<'a>) -> Decoded<Self> {
        let mut symbols = HashMap::new();
        let mut local_bytes = 0u64;
        for (name, room) in source.shared.iter().chain(&entry.shared) {
            symbols.insert(*name, Symbol::Shared(*room));
        }
        for (name, room) in &entry.local {
            let at = local_bytes.next_multiple_of(room.align);
            local_bytes = at + room.bytes;
            symbols.insert(*name, Symbol::Local(at));
        }
        if local_bytes > 512 << 10 {
            return Err(format!("{local_bytes} bytes of local memory exceed 512 KiB").into());
        }
        let (parameters, _) = parameters(entry);
        for ((name, _), parameter) in entry.parameters.iter().zip(parameters) {
            symbols.insert(*name, Symbol::Parameter(parameter.offset));
        }
        Ok(Self {
            entry,
            symbols: {
                // Borrowed from the source, whose variables own their names.
                for (index, variable) in source.variables.iter().enumerate() {
                    let name = entry.statements.iter().find_map(|statement| {
                        statement
                            .operands
                            .iter()
                            .find_map(|operand| name_in(operand, &variable.name))
                    });
                    if let Some(name) = name {
                        symbols.entry(name).or_insert(Symbol::Variable(index));
                    }
                }
                symbols
            },
            shared: HashMap::new(),
            shared_bytes: 0,
            local_bytes,
            constants32: HashMap::new(),
            constants64: HashMap::new(),
            code: Code {
                names: entry.register_names.clone(),
                dynamic_align: 1,
                granule: 16,
                ..Code::default()
            },
            reads: Vec::new(),
        })
    }

    fn instruction(&mut self, s: &'s Statement<'a>) -> Decoded<Instruction> {
        self.reads.clear();
        let guard = match s.guard {
            Some((name, negated)) => Some(self.predicate_named(s, name, negated)?),
            None => None,
        };
        let mut parts = s.opcode.split('.');
        let base = parts.next().unwrap_or_default();
        let mut m = Modifiers(parts.collect());
        let (class, op) = self.operation(s, base, &mut m)?;
        m.end()?;
        let start = self.code.reads.len() as u32;
        self.reads.sort_unstable();
        self.reads.dedup();
        self.code.reads.extend(&self.reads);
        Ok(Instruction {
            op,
            guard,
            line: s.line,
            class,
            reads: (start, self.code.reads.len() as u32),
        })
    }

    // Operands.

    fn register_named(&self, s: &Statement<'a>, name: &str) -> Option<Register> {
        self.entry
            .find(s.scope, |scope| scope.registers.get(name).copied())
    }

    fn predicate_named(
        &mut self,
        s: &Statement<'a>,
        name: &str,
        negated: bool,
    ) -> Decoded<Predicate> {
        match self.register_named(s, name) {
            Some(Register { bits: 1, index }) => {
                self.reads.push(index << 2);
                Ok(Predicate { index, negated })
            }
            _ => Err(format!("`{name}` is not a predicate").into()),
        }
    }

    fn operand(&self, s: &'s Statement<'a>, at: usize) -> Decoded<&'s Operand<'a>> {
        s.operands
            .get(at)
            .ok_or_else(|| format!("operand {} is missing", at + 1).into())
    }

    fn count(&self, s: &Statement<'a>, allowed: &[usize]) -> Decoded<()> {
        if allowed.contains(&s.operands.len()) {
            return Ok(());
        }
        let count = s.operands.len();
        Err(format!("the form with {count} operands is not implemented").into())
    }

    /// A destination register of so many bits; `None` for the sink `_`.
    fn destination_or_sink(
        &self,
        s: &Statement<'a>,
        operand: &Operand<'a>,
        bits: u32,
    ) -> Decoded<Option<Register>> {
        let Operand::Name(name) = operand else {
            return Err("a destination must be a register".into());
        };
        if *name == "_" {
            return Ok(None);
        }
        let register = self
            .register_named(s, name)
            .ok_or_else(|| Problem(format!("`{name}` is not a register")))?;
        if register.bits != bits {
            let has = register.bits;
            return Err(format!("`{name}` has {has} bits, the type {bits}").into());
        }
        Ok(Some(register))
    }

    fn destination(&self, s: &'s Statement<'a>, at: usize, bits: u32) -> Decoded<Register> {
        let operand = self.operand(s, at)?;
        self.destination_or_sink(s, operand, bits)?
            .ok_or_else(|| "the sink `_` is not implemented here".into())
    }

    fn d(&self, s: &'s Statement<'a>, at: usize, bits: u32) -> Decoded<Index> {
        self.destination(s, at, bits).map(|register| register.index)
    }

    /// A register of any width that holds at least so many bits, for loads, stores and conversions.
    fn at_least(&self, register: Register, name: &str, bits: u32) -> Decoded<Register> {
        if register.bits < bits || register.bits == 1 {
            let has = register.bits;
            return Err(format!("`{name}` has {has} bits, the type {bits}").into());
        }
        Ok(register)
    }

    fn read(&mut self, register: Register) -> Register {
        let file = if register.bits == 64 { 2 } else { 1 };
        let names = &self.code.names[file as usize];
        // Constants are always initialised.
        if (register.index as usize) < names.len() {
            self.reads.push(register.index << 2 | file);
        }
        register
    }

    fn constant(&mut self, bits: u32, constant: Constant) -> Register {
        let (pool, values, registers) = if bits == 64 {
            (&mut self.constants64, &mut self.code.constants64, 2)
        } else {
            (&mut self.constants32, &mut self.code.constants32, 1)
        };
        let first = self.code.names[registers].len();
        let index = *pool.entry(constant).or_insert_with(|| {
            values.push(constant);
            (first + values.len() - 1) as u32
        });
        Register { bits, index }
    }

    fn bits(&mut self, bits: u32, value: u64) -> Register {
        self.constant(bits, Constant::Bits(value))
    }

    /// A source of the type.
    fn source(&mut self, s: &Statement<'a>, operand: &Operand<'a>, ty: Ty) -> Decoded<Register> {
        let bits = ty.bits();
        match operand {
            Operand::Number(number, negative) => {
                let value = literal(*number, *negative, ty)?;
                Ok(self.bits(bits, value))
            }
            Operand::Name(name) => match self.register_named(s, name) {
                Some(register) if register.bits == bits => Ok(self.read(register)),
                Some(register) => {
                    let has = register.bits;
                    Err(format!("`{name}` has {has} bits, the type {bits}").into())
                }
                None => self.named(name, 0, bits),
            },
            _ => Err("the form of the operand is not implemented".into()),
        }
    }

    /// A special register or the address of a variable plus an offset.
    fn named(&mut self, name: &str, offset: i64, bits: u32) -> Decoded<Register> {
        if name == "WARP_SZ" {
            return Ok(self.bits(bits, LANES as u64));
        }
        if let Some(special) = special(name) {
            if bits != 32 {
                return Err(format!("`{name}` has 32 bits, the type {bits}").into());
            }
            return Ok(self.constant(32, Constant::Special(special)));
        }
        let offset = offset as u64;
        let constant = match self.symbols.get_key_value(name) {
            Some((_, Symbol::Variable(index))) => Constant::Variable(*index, offset),
            Some((_, Symbol::Local(at) | Symbol::Parameter(at))) => {
                Constant::Bits(at.wrapping_add(offset))
            }
            Some((_, Symbol::Shared(room))) if room.dynamic => {
                self.code.dynamic_align = self.code.dynamic_align.max(room.align);
                Constant::DynamicShared(offset)
            }
            Some((&name, Symbol::Shared(room))) => {
                let bytes = &mut self.shared_bytes;
                let at = *self.shared.entry(name).or_insert_with(|| {
                    let at = bytes.next_multiple_of(room.align);
                    *bytes = at + room.bytes;
                    at
                });
                Constant::Bits(at.wrapping_add(offset))
            }
            None => return Err(format!("`{name}` is not declared or not implemented").into()),
        };
        if bits < 32 {
            return Err(format!("an address does not fit {bits} bits").into());
        }
        Ok(self.constant(bits, constant))
    }

    fn s(&mut self, s: &'s Statement<'a>, at: usize, ty: Ty) -> Decoded<Index> {
        let operand = self.operand(s, at)?;
        self.source(s, operand, ty).map(|register| register.index)
    }

    fn predicate(&mut self, s: &'s Statement<'a>, at: usize) -> Decoded<Predicate> {
        match self.operand(s, at)? {
            Operand::Name(name) => self.predicate_named(s, name, false),
            Operand::Not(name) => self.predicate_named(s, name, true),
            // The predicate behind the registers is always false.
            Operand::Number(Number::Integer(value), _) => Ok(Predicate {
                index: self.code.names[0].len() as u32,
                negated: *value != 0,
            }),
            _ => Err("expected a predicate".into()),
        }
    }

    fn address(&mut self, s: &'s Statement<'a>, at: usize) -> Decoded<Address> {
        let Operand::Address(base, offset) = self.operand(s, at)? else {
            return Err(format!("operand {} must be an address", at + 1).into());
        };
        let offset = *offset;
        match &**base {
            Operand::Name(name) => match self.register_named(s, name) {
                Some(register) if register.bits >= 32 => Ok(Address {
                    base: self.read(register),
                    offset,
                }),
                Some(_) => Err(format!("`{name}` is too narrow for an address").into()),
                None => Ok(Address {
                    base: self.named(name, offset, 64)?,
                    offset: 0,
                }),
            },
            Operand::Number(Number::Integer(value), false) => Ok(Address {
                base: self.bits(64, value.wrapping_add_signed(offset)),
                offset: 0,
            }),
            _ => Err("the form of the address is not implemented".into()),
        }
    }

    /// The elements of a vector operand, or the operand itself.
    fn elements(&self, s: &'s Statement<'a>, at: usize) -> Decoded<&'s [Operand<'a>]> {
        let operand = self.operand(s, at)?;
        Ok(match operand {
            Operand::Vector(elements) => elements,
            _ => std::slice::from_ref(operand),
        })
    }

    fn indices<const N: usize>(
        &mut self,
        s: &'s Statement<'a>,
        at: usize,
        destination: bool,
    ) -> Decoded<[Index; N]> {
        let elements = self.elements(s, at)?;
        if elements.len() != N {
            return Err(format!("operand {} must have {N} elements", at + 1).into());
        }
        let mut indices = [0; N];
        for (index, element) in indices.iter_mut().zip(elements) {
            *index = if destination {
                let register = self.destination_or_sink(s, element, 32)?;
                register.ok_or(Problem::from("the sink `_` is not implemented here"))?
            } else {
                self.source(s, element, Ty::B(32))?
            }
            .index;
        }
        Ok(indices)
    }

    // Builders for the usual shapes.

    fn unary32(&mut self, s: &'s Statement<'a>, f: Unary32, ty: Ty) -> Decoded<Op> {
        self.count(s, &[2])?;
        Ok(Op::Unary32(f, self.d(s, 0, ty.bits())?, self.s(s, 1, ty)?))
    }

    fn binary32(&mut self, s: &'s Statement<'a>, f: Binary32, ty: Ty) -> Decoded<Op> {
        self.count(s, &[3])?;
        let d = self.d(s, 0, ty.bits())?;
        Ok(Op::Binary32(f, d, [self.s(s, 1, ty)?, self.s(s, 2, ty)?]))
    }

    fn ternary32(&mut self, s: &'s Statement<'a>, f: Ternary32, ty: Ty) -> Decoded<Op> {
        self.count(s, &[4])?;
        let d = self.d(s, 0, ty.bits())?;
        let sources = [self.s(s, 1, ty)?, self.s(s, 2, ty)?, self.s(s, 3, ty)?];
        Ok(Op::Ternary32(f, d, sources))
    }

    fn unary64(&mut self, s: &'s Statement<'a>, f: Unary64, ty: Ty) -> Decoded<Op> {
        self.count(s, &[2])?;
        Ok(Op::Unary64(f, self.d(s, 0, 64)?, self.s(s, 1, ty)?))
    }

    fn binary64(&mut self, s: &'s Statement<'a>, f: Binary64, ty: Ty) -> Decoded<Op> {
        self.count(s, &[3])?;
        let d = self.d(s, 0, 64)?;
        Ok(Op::Binary64(f, d, [self.s(s, 1, ty)?, self.s(s, 2, ty)?]))
    }

    fn ternary64(&mut self, s: &'s Statement<'a>, f: Ternary64, ty: Ty) -> Decoded<Op> {
        self.count(s, &[4])?;
        let d = self.d(s, 0, 64)?;
        let sources = [self.s(s, 1, ty)?, self.s(s, 2, ty)?, self.s(s, 3, ty)?];
        Ok(Op::Ternary64(f, d, sources))
    }

    /// A function of lanes whose operands have the types; the destination is `d`.
    fn lanes(&mut self, s: &'s Statement<'a>, f: Any, d: Ty, types: &[Ty]) -> Decoded<Op> {
        self.count(s, &[types.len() + 1])?;
        let mut sources = [None; 4];
        for (at, ty) in types.iter().enumerate() {
            let operand = self.operand(s, at + 1)?;
            sources[at] = Some(self.source(s, operand, *ty)?);
        }
        Ok(Op::Any(f, self.destination(s, 0, d.bits())?, sources))
    }

    fn operation(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
    ) -> Decoded<(Class, Op)> {
        match base {
            "mov" => self.mov(s, m).map(|op| (Class::Move, op)),
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "abs"
            | "neg" => self.arithmetic(s, base, m),
            "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => {
                self.function(s, base, m)
            }
            "and" | "or" | "xor" | "not" | "shl" | "shr" | "lop3" | "bfe" | "bfi" | "prmt"
            | "popc" | "clz" | "brev" | "bfind" | "shf" | "sad" | "cnot" => {
                self.bitwise(s, base, m)
            }
            "copysign" | "testp" => self.sign_and_class(s, base, m),
            "setp" => self.setp(s, m).map(|op| (Class::Predicate, op)),
            "set" => self.set(s, m).map(|op| (Class::Predicate, op)),
            "selp" | "slct" => self.select(s, base, m).map(|op| (Class::Predicate, op)),
            "cvt" => self.cvt(s, m).map(|op| (Class::Convert, op)),
            "cvta" => self.cvta(s, m).map(|op| (Class::Integer, op)),
            "ld" | "ldu" | "st" => self.access(s, base, m),
            "atom" | "red" => self.atomic(s, base, m).map(|op| (Class::Atomic, op)),
            "bar" | "barrier" => self.barrier(s, m).map(|op| (Class::Synchronise, op)),
            "membar" | "fence" => {
                // Memory is sequentially consistent here.
                m.0.clear();
                self.count(s, &[0])?;
                Ok((Class::Synchronise, Op::Nothing))
            }
            "nanosleep" => {
                m.take("u32");
                self.s(s, 0, Ty::U(32))?;
                Ok((Class::Nothing, Op::Nothing))
            }
            "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                m.0.clear();
                Ok((Class::Nothing, Op::Nothing))
            }
            "griddepcontrol" => {
                m.any(&["wait", "launch_dependents"]);
                Ok((Class::Nothing, Op::Nothing))
            }
            "createpolicy" => {
                m.0.clear();
                let zero = self.bits(64, 0).index;
                let copy = g1!(u64_of);
                Ok((Class::Nothing, Op::Unary64(copy, self.d(s, 0, 64)?, zero)))
            }
            "shfl" | "vote" | "activemask" | "match" | "redux" | "elect" => {
                let op = self.exchange(s, base, m)?;
                Ok((Class::Exchange, op))
            }
            "cp" => self.copy(s, m),
            "ldmatrix" | "stmatrix" => {
                let op = self.matrices(s, base == "stmatrix", m)?;
                Ok((Class::Matrices, op))
            }
            "mma" => self.mma(s, m).map(|op| (Class::Mma, op)),
            "bra" => {
                m.take("uni");
                self.count(s, &[1])?;
                let Operand::Name(label) = self.operand(s, 0)? else {
                    return Err("expected a label".into());
                };
                Ok((Class::Control, Op::Branch(self.label(s, label)?)))
            }
            "brx" => self.branch_indexed(s, m).map(|op| (Class::Control, op)),
            "ret" | "exit" => {
                m.take("uni");
                self.count(s, &[0])?;
                Ok((Class::Control, Op::Exit))
            }
            IMPLICIT_DEF => {
                let Operand::Name(name) = self.operand(s, 0)? else {
                    return Err("expected a register".into());
                };
                let register = self
                    .register_named(s, name)
                    .ok_or_else(|| Problem(format!("`{name}` is not a register")))?;
                Ok((Class::Nothing, Op::Define(register)))
            }
            "trap" | "brkpt" => Ok((Class::Control, Op::Trap)),
            _ => Err(format!("`{base}` is not implemented").into()),
        }
    }

    fn label(&self, s: &Statement<'a>, label: &str) -> Decoded<u32> {
        self.entry
            .find(s.scope, |scope| scope.labels.get(label).copied())
            .map(|target| target as u32)
            .ok_or_else(|| format!("the label `{label}` does not exist").into())
    }

    fn branch_indexed(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        m.any(&["idx", "uni"]);
        self.count(s, &[2])?;
        let Operand::Name(list) = self.operand(s, 1)? else {
            return Err("expected a list of targets".into());
        };
        let targets = self
            .entry
            .find(s.scope, |scope| scope.targets.get(list).cloned())
            .ok_or_else(|| Problem(format!("the list `{list}` does not exist")))?;
        let targets: Vec<u32> = targets
            .iter()
            .map(|label| self.label(s, label))
            .collect::<Decoded<_>>()?;
        Ok(Op::BranchIndexed(
            self.s(s, 0, Ty::U(32))?,
            targets.into_boxed_slice(),
        ))
    }

    fn mov(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let ty = m.ty()?;
        self.count(s, &[2])?;
        let bits = ty.bits();
        match (self.operand(s, 0)?, self.operand(s, 1)?) {
            (_, Operand::Vector(parts)) => {
                let part = self.part_bits(bits, parts.len())?;
                let mut sources = [None; 4];
                for (source, operand) in sources.iter_mut().zip(parts) {
                    *source = Some(self.source(s, operand, Ty::B(part))?);
                }
                let f: Any = match part {
                    32 => |v| v[0] | v[1] << 32,
                    _ => |v| v[0] | v[1] << 16 | v[2] << 32 | v[3] << 48,
                };
                Ok(Op::Any(f, self.destination(s, 0, bits)?, sources))
            }
            (Operand::Vector(parts), from) => {
                let part = self.part_bits(bits, parts.len())?;
                let mut to = [None; 4];
                for (to, operand) in to.iter_mut().zip(parts) {
                    *to = self.destination_or_sink(s, operand, part)?;
                }
                Ok(Op::Unpack(part, to, self.source(s, from, ty)?))
            }
            (_, Operand::Name("%clock" | "%clock_hi" | "%clock64" | "%globaltimer")) => {
                Ok(Op::Clock(self.destination(s, 0, bits)?))
            }
            _ if ty == Ty::Pred => {
                let p = self.predicate(s, 1)?;
                Ok(Op::Predicates(0b1010, self.d(s, 0, 1)?, [p, p]))
            }
            _ if bits == 64 => self.unary64(s, g1!(u64_of), ty),
            _ => self.unary32(s, f1!(u32_of), ty),
        }
    }

    fn part_bits(&self, bits: u32, parts: usize) -> Decoded<u32> {
        match (bits, parts) {
            (64, 2) => Ok(32),
            (64, 4) | (32, 2) => Ok(16),
            _ => Err(format!("{parts} parts of {bits} bits are not implemented").into()),
        }
    }

    fn arithmetic(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
    ) -> Decoded<(Class, Op)> {
        let ty = m.ty()?;
        match ty {
            Ty::F32 => self.single(s, base, m),
            Ty::F64 => self.double(s, base, m).map(|op| (Class::Double, op)),
            Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2 => {
                self.half(s, base, m, ty).map(|op| (Class::Half, op))
            }
            Ty::U(_) | Ty::S(_) => self.integer(s, base, m, ty).map(|op| (Class::Integer, op)),
            _ => Err("the type is not implemented here".into()),
        }
    }

    fn integer(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
        ty: Ty,
    ) -> Decoded<Op> {
        use Ty::{S, U};
        if matches!(base, "mul" | "mad") {
            return self.product(s, base, m, ty);
        }
        if m.take("sat") {
            let f: Binary32 = match (base, ty) {
                ("add", S(32)) => f2!(|a, b| s32(a).saturating_add(s32(b)) as u32),
                ("sub", S(32)) => f2!(|a, b| s32(a).saturating_sub(s32(b)) as u32),
                _ => return Err("`.sat` is not implemented here".into()),
            };
            return self.binary32(s, f, ty);
        }
        if ty.bits() == 64 {
            let f: Binary64 = match (base, ty) {
                ("add", _) => g2!(u64::wrapping_add),
                ("sub", _) => g2!(u64::wrapping_sub),
                ("div", U(_)) => g2!(|a: u64, b| divided(a.checked_div(b), u64::MAX)),
                ("div", _) => g2!(quotient64),
                ("rem", U(_)) => g2!(|a: u64, b| divided(a.checked_rem(b), a)),
                ("rem", _) => g2!(rest64),
                ("min", U(_)) => g2!(u64::min),
                ("min", _) => g2!(|a, b| s64(a).min(s64(b)) as u64),
                ("max", U(_)) => g2!(u64::max),
                ("max", _) => g2!(|a, b| s64(a).max(s64(b)) as u64),
                ("abs", S(_)) => {
                    return self.unary64(s, g1!(|a| s64(a).wrapping_abs() as u64), ty);
                }
                ("neg", S(_)) => return self.unary64(s, g1!(u64::wrapping_neg), ty),
                _ => return Err("the type is not implemented here".into()),
            };
            return self.binary64(s, f, ty);
        }
        let f: Binary32 = match (base, ty) {
            ("add", U(32) | S(32)) => f2!(u32::wrapping_add),
            ("sub", U(32) | S(32)) => f2!(u32::wrapping_sub),
            ("add", U(16) | S(16)) => f2!(|a: u32, b| a.wrapping_add(b) & 0xffff),
            ("sub", U(16) | S(16)) => f2!(|a: u32, b| a.wrapping_sub(b) & 0xffff),
            ("div", U(32)) => f2!(|a: u32, b| divided(a.checked_div(b), u32::MAX)),
            ("div", U(16)) => f2!(|a: u32, b| divided(a.checked_div(b), 0xffff)),
            ("div", S(32)) => f2!(quotient32),
            ("div", S(16)) => f2!(quotient16),
            ("rem", U(32) | U(16)) => f2!(|a: u32, b| divided(a.checked_rem(b), a)),
            ("rem", S(32)) => f2!(rest32),
            ("rem", S(16)) => f2!(rest16),
            ("min", U(32) | U(16)) => f2!(u32::min),
            ("max", U(32) | U(16)) => f2!(u32::max),
            ("min", S(32)) => f2!(|a, b| s32(a).min(s32(b)) as u32),
            ("max", S(32)) => f2!(|a, b| s32(a).max(s32(b)) as u32),
            ("min", S(16)) => f2!(|a, b| (s16(a).min(s16(b)) & 0xffff) as u32),
            ("max", S(16)) => f2!(|a, b| (s16(a).max(s16(b)) & 0xffff) as u32),
            ("abs", S(32)) => return self.unary32(s, f1!(|a| s32(a).unsigned_abs()), ty),
            ("neg", S(32)) => return self.unary32(s, f1!(u32::wrapping_neg), ty),
            ("abs", S(16)) => {
                return self.unary32(s, f1!(|a| s16(a).unsigned_abs() & 0xffff), ty);
            }
            ("neg", S(16)) => {
                return self.unary32(s, f1!(|a: u32| a.wrapping_neg() & 0xffff), ty);
            }
            _ => return Err("the type is not implemented here".into()),
        };
        self.binary32(s, f, ty)
    }

    fn product(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
        ty: Ty,
    ) -> Decoded<Op> {
        use Ty::{S, U};
        let part = m
            .choose(&[("lo", 0), ("hi", 1), ("wide", 2)])
            .ok_or(Problem::from("`.lo`, `.hi` or `.wide` is missing"))?;
        let add = base == "mad";
        match (part, ty) {
            (0, U(32) | S(32)) if add => {
                self.ternary32(s, f3!(|a: u32, b, c| a.wrapping_mul(b).wrapping_add(c)), ty)
            }
            (0, U(32) | S(32)) => self.binary32(s, f2!(u32::wrapping_mul), ty),
            (0, U(16) | S(16)) if add => {
                let f = f3!(|a: u32, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff);
                self.ternary32(s, f, ty)
            }
            (0, U(16) | S(16)) => self.binary32(s, f2!(|a: u32, b| a.wrapping_mul(b) & 0xffff), ty),
            (0, U(64) | S(64)) if add => {
                self.ternary64(s, g3!(|a: u64, b, c| a.wrapping_mul(b).wrapping_add(c)), ty)
            }
            (0, U(64) | S(64)) => self.binary64(s, g2!(u64::wrapping_mul), ty),
            (1, U(32)) if add => {
                let f = f3!(|a, b, c| high_u32(a, b).wrapping_add(c));
                self.ternary32(s, f, ty)
            }
            (1, S(32)) if add => {
                let f = f3!(|a, b, c| high_s32(a, b).wrapping_add(c));
                self.ternary32(s, f, ty)
            }
            (1, U(32)) => self.binary32(s, f2!(high_u32), ty),
            (1, S(32)) => self.binary32(s, f2!(high_s32), ty),
            (1, U(64)) if !add => self.binary64(s, g2!(high_u64), ty),
            (1, S(64)) if !add => self.binary64(s, g2!(high_s64), ty),
            (1, U(16)) if !add => self.binary32(s, f2!(|a: u32, b: u32| (a * b) >> 16), ty),
            (1, S(16)) if !add => {
                let f = f2!(|a, b| ((s16(a) * s16(b)) >> 16 & 0xffff) as u32);
                self.binary32(s, f, ty)
            }
            (2, U(32) | S(32)) => {
                self.count(s, &[if add { 4 } else { 3 }])?;
                let d = self.d(s, 0, 64)?;
                let factors = [self.s(s, 1, ty)?, self.s(s, 2, ty)?];
                let unsigned = ty == U(32);
                if !add {
                    let f = match unsigned {
                        true => wide!(|a: u32, b: u32| u64::from(a) * u64::from(b)),
                        false => wide!(|a, b| (i64::from(s32(a)) * i64::from(s32(b))) as u64),
                    };
                    return Ok(Op::Wide(f, d, factors));
                }
                let f = match unsigned {
                    true => wide_add!(|a: u32, b: u32| u64::from(a) * u64::from(b)),
                    false => wide_add!(|a, b| (i64::from(s32(a)) * i64::from(s32(b))) as u64),
                };
                Ok(Op::WideAdd(f, d, factors, self.s(s, 3, Ty::B(64))?))
            }
            (2, U(16) | S(16)) => {
                let f: Any = match (ty, add) {
                    (U(_), false) => |v| v[0] * v[1],
                    (U(_), true) => |v| (v[0] * v[1] + v[2]) & 0xffff_ffff,
                    (_, false) => |v| (s16(v[0] as u32) * s16(v[1] as u32)) as u32 as u64,
                    (_, true) => |v| {
                        let product = s16(v[0] as u32) * s16(v[1] as u32);
                        u64::from((product as u32).wrapping_add(v[2] as u32))
                    },
                };
                let types = [ty, ty, Ty::B(32)];
                self.lanes(s, f, Ty::B(32), if add { &types } else { &types[..2] })
            }
            _ => Err("the product is not implemented".into()),
        }
    }

    fn single(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
    ) -> Decoded<(Class, Op)> {
        let ty = Ty::F32;
        let approximate = m.any(&["approx", "full"]);
        let nan = m.take("NaN");
        let mode = m.mode();
        let class = if approximate {
            Class::Approximate
        } else {
            Class::Single
        };
        if (approximate && base != "div") || (nan && base != "min" && base != "max") {
            return Err("the modifier is not implemented here".into());
        }
        let op = match base {
            "add" => self.binary32(s, by_mode!(mode, M, f2!(float::add::<M>)), ty),
            "sub" => self.binary32(s, by_mode!(mode, M, f2!(float::sub::<M>)), ty),
            "mul" => self.binary32(s, by_mode!(mode, M, f2!(float::mul::<M>)), ty),
            "div" => self.binary32(s, by_mode!(mode, M, f2!(float::div::<M>)), ty),
            "fma" | "mad" => {
                let f = by_mode!(mode, M, float::fma_lanes::<M> as Ternary32);
                self.ternary32(s, f, ty)
            }
            "min" if nan => {
                let f = by_flush!(mode, M, f2!(float::min::<M, true>));
                self.binary32(s, f, ty)
            }
            "max" if nan => {
                let f = by_flush!(mode, M, f2!(float::max::<M, true>));
                self.binary32(s, f, ty)
            }
            "min" => {
                let f = by_flush!(mode, M, f2!(float::min::<M, false>));
                self.binary32(s, f, ty)
            }
            "max" => {
                let f = by_flush!(mode, M, f2!(float::max::<M, false>));
                self.binary32(s, f, ty)
            }
            "neg" => self.unary32(s, by_flush!(mode, M, f1!(float::neg::<M>)), ty),
            "abs" => self.unary32(s, by_flush!(mode, M, f1!(float::abs::<M>)), ty),
            _ => Err("the type is not implemented here".into()),
        }?;
        Ok((class, op))
    }

    fn double(&mut self, s: &'s Statement<'a>, base: &str, m: &mut Modifiers<'a>) -> Decoded<Op> {
        m.take("rn");
        let ty = Ty::F64;
        macro_rules! d2 {
            ($f:expr) => {
                g2!(|a, b| float::canonical64($f(f64_of(a), f64_of(b))))
            };
        }
        match base {
            "add" => self.binary64(s, d2!(|a: f64, b: f64| a + b), ty),
            "sub" => self.binary64(s, d2!(|a: f64, b: f64| a - b), ty),
            "mul" => self.binary64(s, d2!(|a: f64, b: f64| a * b), ty),
            "div" => self.binary64(s, d2!(|a: f64, b: f64| a / b), ty),
            "min" => self.binary64(s, g2!(float::min64), ty),
            "max" => self.binary64(s, g2!(float::max64), ty),
            "fma" | "mad" => {
                let f = g3!(|a, b, c| float::canonical64(f64_of(a).mul_add(f64_of(b), f64_of(c))));
                self.ternary64(s, f, ty)
            }
            "neg" => self.unary64(s, g1!(|a| a ^ 1 << 63), ty),
            "abs" => self.unary64(s, g1!(|a| a & !(1 << 63)), ty),
            _ => Err("the type is not implemented here".into()),
        }
    }

    fn half(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
        ty: Ty,
    ) -> Decoded<Op> {
        let mode = m.mode();
        let brain = matches!(ty, Ty::Bf16 | Ty::Bf16x2);
        let pair = matches!(ty, Ty::F16x2 | Ty::Bf16x2);
        macro_rules! h2 {
            ($f:ident) => {
                match (brain, pair) {
                    (false, false) => by_flush!(mode, M, f2!(small::$f::<M, false>)),
                    (true, false) => by_flush!(mode, M, f2!(small::$f::<M, true>)),
                    (false, true) => {
                        by_flush!(mode, M, f2!(|a, b| halves2(a, b, small::$f::<M, false>)))
                    }
                    (true, true) => {
                        by_flush!(mode, M, f2!(|a, b| halves2(a, b, small::$f::<M, true>)))
                    }
                }
            };
        }
        macro_rules! h1 {
            ($f:ident) => {
                match (brain, pair) {
                    (false, false) => by_flush!(mode, M, f1!(small::$f::<M, false>)),
                    (true, false) => by_flush!(mode, M, f1!(small::$f::<M, true>)),
                    (false, true) => by_flush!(
                        mode,
                        M,
                        f1!(|a: u32| small::$f::<M, false>(a & 0xffff)
                            | small::$f::<M, false>(a >> 16) << 16)
                    ),
                    (true, true) => by_flush!(
                        mode,
                        M,
                        f1!(|a: u32| small::$f::<M, true>(a & 0xffff)
                            | small::$f::<M, true>(a >> 16) << 16)
                    ),
                }
            };
        }
        macro_rules! fma_pair {
            ($brain:literal) => {
                by_flush!(
                    mode,
                    M,
                    f3!(|a: u32, b: u32, c: u32| {
                        small::fma::<M, $brain>(a & 0xffff, b & 0xffff, c & 0xffff)
                            | small::fma::<M, $brain>(a >> 16, b >> 16, c >> 16) << 16
                    })
                )
            };
        }
        match base {
            "add" => self.binary32(s, h2!(add), ty),
            "sub" => self.binary32(s, h2!(sub), ty),
            "mul" => self.binary32(s, h2!(mul), ty),
            "min" => self.binary32(s, h2!(min), ty),
            "max" => self.binary32(s, h2!(max), ty),
            "neg" => self.unary32(s, h1!(neg), ty),
            "abs" => self.unary32(s, h1!(abs), ty),
            "fma" => {
                let f = match (brain, pair) {
                    (false, false) => by_flush!(mode, M, f3!(small::fma::<M, false>)),
                    (true, false) => by_flush!(mode, M, f3!(small::fma::<M, true>)),
                    (false, true) => fma_pair!(false),
                    (true, true) => fma_pair!(true),
                };
                self.ternary32(s, f, ty)
            }
            _ => Err("the type is not implemented here".into()),
        }
    }

    /// Functions of one number.
    fn function(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
    ) -> Decoded<(Class, Op)> {
        let ty = m.ty()?;
        let approximate = m.take("approx");
        let mode = m.mode();
        if ty == Ty::F64 {
            let f = match base {
                // Defined on the upper halves of the source and the result.
                "rcp" if approximate => {
                    g1!(|a| float::canonical64(1.0 / f64_of(a & !0xffff_ffff)) & !0xffff_ffff)
                }
                "rcp" => g1!(|a| float::canonical64(1.0 / f64_of(a))),
                "sqrt" => g1!(|a| float::canonical64(f64_of(a).sqrt())),
                "rsqrt" => g1!(|a| float::canonical64(1.0 / f64_of(a).sqrt())),
                _ => return Err("the type is not implemented here".into()),
            };
            if mode.round != Round::Nearest {
                return Err("f64 is only rounded to nearest".into());
            }
            return Ok((Class::Double, self.unary64(s, f, ty)?));
        }
        if ty != Ty::F32 {
            return Err("the type is not implemented here".into());
        }
        let f = match base {
            "rcp" => by_mode!(mode, M, f1!(float::rcp::<M>)),
            "sqrt" => by_mode!(mode, M, f1!(float::sqrt::<M>)),
            "rsqrt" => by_flush!(mode, M, f1!(approximate::rsqrt::<M>)),
            "ex2" => by_flush!(mode, M, f1!(approximate::ex2::<M>)),
            "lg2" => by_flush!(mode, M, f1!(approximate::lg2::<M>)),
            "sin" => by_flush!(mode, M, f1!(approximate::sin::<M>)),
            "cos" => by_flush!(mode, M, f1!(approximate::cos::<M>)),
            _ => by_flush!(mode, M, f1!(approximate::tanh::<M>)),
        };
        let class = if approximate {
            Class::Approximate
        } else {
            Class::Single
        };
        Ok((class, self.unary32(s, f, ty)?))
    }

    fn bitwise(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
    ) -> Decoded<(Class, Op)> {
        if base == "prmt" {
            m.ty()?;
            let op = self.ternary32(s, f3!(permute), Ty::B(32))?;
            return Ok((Class::Integer, op));
        }
        let ty = m.ty()?;
        if ty == Ty::Pred {
            let op = self.predicate_logic(s, base)?;
            return Ok((Class::Predicate, op));
        }
        let is64 = ty.bits() == 64;
        let (u, b32) = (Ty::U(32), Ty::B(32));
        let op = match base {
            "and" if is64 => self.binary64(s, g2!(|a, b| a & b), ty),
            "or" if is64 => self.binary64(s, g2!(|a, b| a | b), ty),
            "xor" if is64 => self.binary64(s, g2!(|a, b| a ^ b), ty),
            "not" if is64 => self.unary64(s, g1!(|a: u64| !a), ty),
            "and" => self.binary32(s, f2!(|a, b| a & b), ty),
            "or" => self.binary32(s, f2!(|a, b| a | b), ty),
            "xor" => self.binary32(s, f2!(|a, b| a ^ b), ty),
            "not" if ty.bits() == 16 => self.unary32(s, f1!(|a: u32| !a & 0xffff), ty),
            "not" => self.unary32(s, f1!(|a: u32| !a), ty),
            "cnot" if is64 => self.unary64(s, g1!(|a| u64::from(a == 0)), ty),
            "cnot" => self.unary32(s, f1!(|a| u32::from(a == 0)), ty),
            "shl" | "shr" => self.shift(s, base, ty),
            "lop3" => {
                let types = [b32, b32, b32, b32];
                self.lanes(s, |v| lop3(v[0], v[1], v[2], v[3]), b32, &types)
            }
            "bfe" => {
                let f: Any = match ty {
                    Ty::U(32) => |v| extract_u(v[0], v[1], v[2], 32),
                    Ty::U(_) => |v| extract_u(v[0], v[1], v[2], 64),
                    Ty::S(32) => |v| extract_s(v[0], v[1], v[2], 32),
                    _ => |v| extract_s(v[0], v[1], v[2], 64),
                };
                self.lanes(s, f, ty, &[ty, u, u])
            }
            "bfi" => {
                let f: Any = match is64 {
                    true => |v| insert(v[0], v[1], v[2], v[3], 64),
                    false => |v| insert(v[0], v[1], v[2], v[3], 32),
                };
                self.lanes(s, f, ty, &[ty, ty, u, u])
            }
            "popc" => self.lanes(s, |v| u64::from(v[0].count_ones()), u, &[ty]),
            "clz" if is64 => self.lanes(s, |v| u64::from(v[0].leading_zeros()), u, &[ty]),
            "clz" => self.lanes(s, |v| u64::from((v[0] as u32).leading_zeros()), u, &[ty]),
            "brev" if is64 => self.unary64(s, g1!(u64::reverse_bits), ty),
            "brev" => self.unary32(s, f1!(u32::reverse_bits), ty),
            "bfind" => {
                let f: Any = match (ty, m.take("shiftamt")) {
                    (Ty::U(32), false) => |v| highest(v[0], 32, false, false),
                    (Ty::U(32), true) => |v| highest(v[0], 32, false, true),
                    (Ty::S(32), false) => |v| highest(v[0], 32, true, false),
                    (Ty::S(32), true) => |v| highest(v[0], 32, true, true),
                    (Ty::U(_), false) => |v| highest(v[0], 64, false, false),
                    (Ty::U(_), true) => |v| highest(v[0], 64, false, true),
                    (_, false) => |v| highest(v[0], 64, true, false),
                    (_, true) => |v| highest(v[0], 64, true, true),
                };
                self.lanes(s, f, u, &[ty])
            }
            "shf" => {
                let (left, wrap) = (m.take("l"), m.take("wrap"));
                m.any(&["r", "clamp"]);
                let f: Ternary32 = match (left, wrap) {
                    (true, true) => f3!(|a: u32, b: u32, c: u32| funnel_left(a, b, c & 31)),
                    (true, false) => f3!(|a: u32, b: u32, c: u32| funnel_left(a, b, c.min(32))),
                    (false, true) => f3!(|a: u32, b: u32, c: u32| funnel_right(a, b, c & 31)),
                    (false, false) => f3!(|a: u32, b: u32, c: u32| funnel_right(a, b, c.min(32))),
                };
                self.ternary32(s, f, ty)
            }
            "sad" => {
                let f = match ty {
                    Ty::U(32) => f3!(|a: u32, b: u32, c: u32| a.abs_diff(b).wrapping_add(c)),
                    Ty::S(32) => f3!(|a, b, c| s32(a).abs_diff(s32(b)).wrapping_add(c)),
                    _ => return Err("the type is not implemented here".into()),
                };
                self.ternary32(s, f, ty)
            }
            _ => Err("the type is not implemented here".into()),
        }?;
        Ok((Class::Integer, op))
    }

    fn shift(&mut self, s: &'s Statement<'a>, base: &str, ty: Ty) -> Decoded<Op> {
        self.count(s, &[3])?;
        let by = self.s(s, 2, Ty::U(32))?;
        if ty.bits() == 64 {
            let f: Shift64 = match (base, ty) {
                ("shl", _) => shift64!(|a: u64, by: u32| a.checked_shl(by).unwrap_or(0)),
                ("shr", Ty::S(_)) => shift64!(shr_s64),
                _ => shift64!(|a: u64, by: u32| a.checked_shr(by).unwrap_or(0)),
            };
            return Ok(Op::Shift64(f, self.d(s, 0, 64)?, self.s(s, 1, ty)?, by));
        }
        let f: Binary32 = match (base, ty) {
            ("shl", _) if ty.bits() == 16 => {
                f2!(|a: u32, by: u32| a.checked_shl(by).unwrap_or(0) & 0xffff)
            }
            ("shl", _) => f2!(|a: u32, by: u32| a.checked_shl(by).unwrap_or(0)),
            ("shr", Ty::S(16)) => f2!(|a: u32, by: u32| (s16(a) >> by.min(31) & 0xffff) as u32),
            ("shr", Ty::S(_)) => f2!(shr_s32),
            _ => f2!(|a: u32, by: u32| a.checked_shr(by).unwrap_or(0)),
        };
        let d = self.d(s, 0, ty.bits())?;
        Ok(Op::Binary32(f, d, [self.s(s, 1, ty)?, by]))
    }

    fn predicate_logic(&mut self, s: &'s Statement<'a>, base: &str) -> Decoded<Op> {
        let d = self.d(s, 0, 1)?;
        let a = self.predicate(s, 1)?;
        if base == "not" {
            self.count(s, &[2])?;
            return Ok(Op::Predicates(0b0101, d, [a, a]));
        }
        self.count(s, &[3])?;
        let table = match base {
            "and" => 0b1000,
            "or" => 0b1110,
            "xor" => 0b0110,
            _ => return Err("the type is not implemented here".into()),
        };
        Ok(Op::Predicates(table, d, [a, self.predicate(s, 2)?]))
    }

    fn sign_and_class(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
    ) -> Decoded<(Class, Op)> {
        let ty = m.ty()?;
        if base == "copysign" {
            let op = match ty {
                Ty::F32 => {
                    let f = f2!(|a, b| a & 0x8000_0000 | b & 0x7fff_ffff);
                    self.binary32(s, f, ty)?
                }
                _ => self.binary64(s, g2!(|a, b| a & 1 << 63 | b & !(1 << 63)), ty)?,
            };
            return Ok((Class::Single, op));
        }
        macro_rules! test {
            ($lanes:ident, $of:expr) => {
                match m.first()? {
                    "finite" => $lanes!(|a, _| $of(a).is_finite()),
                    "infinite" => $lanes!(|a, _| $of(a).is_infinite()),
                    "number" => $lanes!(|a, _| !$of(a).is_nan()),
                    "notanumber" => $lanes!(|a, _| $of(a).is_nan()),
                    "normal" => $lanes!(|a, _| $of(a).is_normal()),
                    "subnormal" => $lanes!(|a, _| $of(a).is_subnormal()),
                    _ => return Err("the test is not implemented".into()),
                }
            };
        }
        self.count(s, &[2])?;
        let compare = match ty {
            Ty::F32 => {
                let a = self.s(s, 1, ty)?;
                Comparison::B32(test!(compare32, f32_of), [a, a])
            }
            _ => {
                let a = self.s(s, 1, ty)?;
                Comparison::B64(test!(compare64, f64_of), [a, a])
            }
        };
        let op = Op::Compare {
            compare,
            d: Some(self.d(s, 0, 1)?),
            q: None,
            combine: None,
        };
        Ok((Class::Predicate, op))
    }

    fn comparison(
        &mut self,
        s: &'s Statement<'a>,
        name: &str,
        ftz: bool,
        ty: Ty,
    ) -> Decoded<Comparison> {
        if ty.bits() == 64 {
            let f: Compare64 = match ty {
                Ty::S(_) => compare_integers!(name, compare64, s64),
                Ty::F64 => compare_floats!(name, compare64, f64_of),
                _ => compare_integers!(name, compare64, u64_of),
            };
            return Ok(Comparison::B64(f, [self.s(s, 1, ty)?, self.s(s, 2, ty)?]));
        }
        let f: Compare32 = match ty {
            Ty::S(16) => compare_integers!(name, compare32, s16),
            Ty::S(32) => compare_integers!(name, compare32, s32),
            Ty::U(16) | Ty::B(16) | Ty::U(32) | Ty::B(32) => {
                compare_integers!(name, compare32, u32_of)
            }
            Ty::F32 if ftz => compare_floats!(name, compare32, f32_flushed),
            Ty::F32 => compare_floats!(name, compare32, f32_of),
            Ty::F16 if !ftz => compare_floats!(name, compare32, f16_of),
            Ty::Bf16 if !ftz => compare_floats!(name, compare32, bf16_of),
            _ => return Err("the comparison of this type is not implemented".into()),
        };
        Ok(Comparison::B32(f, [self.s(s, 1, ty)?, self.s(s, 2, ty)?]))
    }

    fn setp(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let ty = m.ty()?;
        let name = m.first()?;
        let ftz = m.take("ftz");
        let logic = m.choose(&[("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)]);
        self.count(s, &[if logic.is_some() { 4 } else { 3 }])?;
        let compare = self.comparison(s, name, ftz, ty)?;
        let (d, q) = self.pair_of_destinations(s, 1)?;
        let combine = match logic {
            Some(logic) => Some((logic, self.predicate(s, 3)?)),
            None => None,
        };
        Ok(Op::Compare {
            compare,
            d: d.map(|d| d.index),
            q,
            combine,
        })
    }

    /// `d` or `d|p`, where p is a predicate and each may be the sink.
    fn pair_of_destinations(
        &mut self,
        s: &'s Statement<'a>,
        bits: u32,
    ) -> Decoded<(Option<Register>, Option<Index>)> {
        let Operand::Pair(first, second) = self.operand(s, 0)? else {
            return Ok((
                self.destination_or_sink(s, self.operand(s, 0)?, bits)?,
                None,
            ));
        };
        let first = self.destination_or_sink(s, &Operand::Name(first), bits)?;
        let second = self.destination_or_sink(s, &Operand::Name(second), 1)?;
        Ok((first, second.map(|p| p.index)))
    }

    fn set(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let ty = m.ty()?;
        let to = m.ty()?;
        let name = m.first()?;
        let ftz = m.take("ftz");
        self.count(s, &[3])?;
        let values = match to {
            Ty::U(32) | Ty::S(32) => [u32::MAX, 0],
            Ty::F32 => [1f32.to_bits(), 0],
            _ => return Err("the type is not implemented here".into()),
        };
        let compare = self.comparison(s, name, ftz, ty)?;
        Ok(Op::Set(compare, self.d(s, 0, 32)?, values))
    }

    fn select(&mut self, s: &'s Statement<'a>, base: &str, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let ty = m.ty()?;
        self.count(s, &[4])?;
        if base == "slct" {
            let ty = m.0.pop().and_then(Ty::parse).unwrap_or(ty);
            let f: Any = |v| {
                if (v[2] as u32 as i32) >= 0 {
                    v[0]
                } else {
                    v[1]
                }
            };
            return self.lanes(s, f, ty, &[ty, ty, Ty::S(32)]);
        }
        let p = self.predicate(s, 3)?;
        let sources = [self.s(s, 1, ty)?, self.s(s, 2, ty)?];
        let d = self.d(s, 0, ty.bits())?;
        Ok(match ty.bits() {
            64 => Op::Select64(d, sources, p),
            _ => Op::Select32(d, sources, p),
        })
    }

    fn cvt(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let from = m.ty()?;
        let to = m.ty()?;
        let to_integer = m.choose(&TO_INTEGER);
        let relu = m.take("relu");
        let mode = m.mode();
        let make = |from: Type, to: Type, width: u32| Convert {
            to,
            from,
            round: mode.round,
            to_integer,
            ftz: mode.ftz,
            sat: mode.sat,
            relu,
            width,
        };
        if let Ty::F16x2 | Ty::Bf16x2 = to {
            // The first source is the upper half.
            self.count(s, &[3])?;
            if from != Ty::F32 || mode != Mode::NEAREST || to_integer.is_some() {
                return Err("the conversion is not implemented".into());
            }
            let f: Binary32 = match (to, relu) {
                (Ty::F16x2, false) => f2!(|a, b| halves_of(a, b, nearest_f16)),
                (Ty::F16x2, true) => f2!(|a, b| halves_of(relu_of(a), relu_of(b), nearest_f16)),
                (_, false) => f2!(|a, b| halves_of(a, b, float::nearest_bf16)),
                (_, true) => f2!(|a, b| halves_of(relu_of(a), relu_of(b), float::nearest_bf16)),
            };
            let d = self.d(s, 0, 32)?;
            return Ok(Op::Binary32(
                f,
                d,
                [self.s(s, 1, from)?, self.s(s, 2, from)?],
            ));
        }
        self.count(s, &[2])?;
        let (Some(from_type), Some(to_type)) = (convertible(from), convertible(to)) else {
            return Err("the conversion is not implemented".into());
        };
        // Registers may be wider than the types.
        let (Operand::Name(d), source) = (self.operand(s, 0)?, self.operand(s, 1)?) else {
            return Err("a destination must be a register".into());
        };
        let d = match self.register_named(s, d) {
            Some(register) => self.at_least(register, d, to.bits())?,
            None => return Err(format!("`{d}` is not a register").into()),
        };
        let source = match source {
            Operand::Name(name) => match self.register_named(s, name) {
                Some(register) => {
                    let register = self.at_least(register, name, from.bits())?;
                    self.read(register)
                }
                None => self.source(s, &Operand::Name(name), from)?,
            },
            other => self.source(s, other, from)?,
        };
        let convert = make(from_type, to_type, d.bits);
        let plain = mode.round == Round::Nearest && !mode.ftz && !mode.sat && !relu;
        let (di, si) = (d.index, source.index);
        // The usual ones at full speed.
        let f: Unary32 = match (from, to) {
            (Ty::U(32 | 64) | Ty::S(32 | 64), Ty::U(32 | 64) | Ty::S(32 | 64)) if plain => {
                return Ok(match (from, source.bits, d.bits, to.bits()) {
                    (_, 64, 32, _) => Op::Narrow(narrow!(|a| a as u32), di, si),
                    (Ty::S(32), 32, 64, 64) => Op::Widen(widen!(|a| s32(a) as i64 as u64), di, si),
                    (Ty::U(32), 32, 64, 64) => Op::Widen(widen!(u64::from), di, si),
                    (_, 32, 32, _) => Op::Unary32(f1!(u32_of), di, si),
                    _ => Op::Convert(convert, d, source),
                });
            }
            (Ty::S(32), Ty::F32) if plain => f1!(|a| (s32(a) as f32).to_bits()),
            (Ty::U(32), Ty::F32) if plain => f1!(|a: u32| (a as f32).to_bits()),
            (Ty::F32, Ty::Bf16) if plain => f1!(float::nearest_bf16),
            (Ty::Bf16, Ty::F32) if plain => f1!(float::bf16_to_f32),
            _ => return Ok(Op::Convert(convert, d, source)),
        };
        if (d.bits, source.bits) != (to.bits(), from.bits()) {
            return Ok(Op::Convert(convert, d, source));
        }
        Ok(Op::Unary32(f, di, si))
    }

    fn cvta(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let ty = m.ty()?;
        if ty.bits() != 64 {
            return Err("addresses must have 64 bits".into());
        }
        let to = m.take("to");
        let space = m
            .choose(&SPACES)
            .ok_or(Problem::from("the state space is missing"))?;
        self.count(s, &[2])?;
        let window = match space {
            Space::Generic | Space::Global => 0,
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Param => PARAMETER_WINDOW,
        };
        let window = self.bits(64, window).index;
        let (d, a) = (self.d(s, 0, 64)?, self.s(s, 1, ty)?);
        let f = match to {
            true => g2!(u64::wrapping_sub),
            false => g2!(u64::wrapping_add),
        };
        Ok(Op::Binary64(f, d, [a, window]))
    }

    fn access(
        &mut self,
        s: &'s Statement<'a>,
        base: &str,
        m: &mut Modifiers<'a>,
    ) -> Decoded<(Class, Op)> {
        let ty = m.ty()?;
        let space = m.choose(&SPACES).unwrap_or(Space::Generic);
        let strong = STRENGTHS.iter().any(|name| m.0.contains(name));
        let hint = m.0.contains(&"L2::cache_hint");
        m.any(&HINTS);
        let vector = m.choose(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
        self.count(s, if hint { &[3] } else { &[2] })?;
        let store = base == "st";
        let (at, values) = if store { (0, 1) } else { (1, 0) };
        let elements = self.elements(s, values)?;
        if elements.len() != vector || ty == Ty::Pred {
            return Err(format!("the access must have {vector} elements").into());
        }
        if vector as u32 * ty.bits() > 128 {
            return Err("accesses of more than 16 bytes are not implemented".into());
        }
        let mut registers = [None; 4];
        for (register, operand) in registers.iter_mut().zip(elements) {
            *register = match operand {
                Operand::Name("_") if !store => None,
                Operand::Name(name) => match self.register_named(s, name) {
                    Some(found) => {
                        let found = self.at_least(found, name, ty.bits())?;
                        Some(if store { self.read(found) } else { found })
                    }
                    None if store => Some(self.source(s, operand, ty)?),
                    None => return Err(format!("`{name}` is not a register").into()),
                },
                _ if store => {
                    let wide = if ty.bits() == 8 { Ty::B(16) } else { ty };
                    Some(self.source(s, operand, wide)?)
                }
                _ => return Err("a destination must be a register".into()),
            };
        }
        let access = Access {
            space,
            address: self.address(s, at)?,
            size: (ty.bits() / 8) as u8,
            elements: vector as u8,
            signed: matches!(ty, Ty::S(_)),
            strong,
            registers,
        };
        let bytes = u64::from(access.size) * vector as u64;
        self.shared_access(space, bytes);
        let class = match space {
            Space::Generic | Space::Global => Class::GlobalMemory,
            Space::Shared => Class::SharedMemory,
            Space::Local => Class::LocalMemory,
            Space::Param => Class::Parameter,
        };
        if store && space == Space::Param {
            return Err("parameters cannot be stored".into());
        }
        Ok((
            class,
            if store {
                Op::Store(access)
            } else {
                Op::Load(access)
            },
        ))
    }

    fn shared_access(&mut self, space: Space, bytes: u64) {
        if matches!(space, Space::Shared | Space::Generic) {
            self.code.granule = self.code.granule.min(bytes);
        }
    }

    fn atomic(&mut self, s: &'s Statement<'a>, base: &str, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let ty = m.ty()?;
        let space = m.choose(&SPACES).unwrap_or(Space::Generic);
        m.any(&HINTS);
        let name = m.first()?;
        let op = match (name, ty) {
            ("add", Ty::F32) => AtomicOp::AddF32,
            ("add", Ty::F64) => AtomicOp::AddF64,
            ("add", Ty::F16x2) => AtomicOp::AddF16x2,
            ("add", Ty::Bf16x2) => AtomicOp::AddBf16x2,
            ("add", Ty::U(_) | Ty::S(_)) => AtomicOp::AddInteger,
            ("min", Ty::U(_)) => AtomicOp::MinUnsigned,
            ("min", Ty::S(_)) => AtomicOp::MinSigned,
            ("max", Ty::U(_)) => AtomicOp::MaxUnsigned,
            ("max", Ty::S(_)) => AtomicOp::MaxSigned,
            ("and", Ty::B(_)) => AtomicOp::And,
            ("or", Ty::B(_)) => AtomicOp::Or,
            ("xor", Ty::B(_)) => AtomicOp::Xor,
            ("exch", Ty::B(_)) => AtomicOp::Exchange,
            ("cas", Ty::B(_)) => AtomicOp::CompareAndSwap,
            ("inc", Ty::U(32)) => AtomicOp::Increment,
            ("dec", Ty::U(32)) => AtomicOp::Decrement,
            _ => return Err(format!("the operation `.{name}` is not implemented here").into()),
        };
        if ty.bits() < 32 {
            return Err("the type is not implemented here".into());
        }
        let returns = usize::from(base == "atom");
        let swap = usize::from(op == AtomicOp::CompareAndSwap);
        self.count(s, &[2 + returns + swap])?;
        let destination = if base == "atom" {
            self.destination_or_sink(s, self.operand(s, 0)?, ty.bits())?
        } else {
            None
        };
        let a = self.operand(s, 1 + returns)?;
        let a = self.source(s, a, ty)?;
        let b = if swap == 1 {
            let operand = self.operand(s, 2 + returns)?;
            Some(self.source(s, operand, ty)?)
        } else {
            None
        };
        let size = (ty.bits() / 8) as u8;
        self.shared_access(space, u64::from(size));
        Ok(Op::Atomic(Atomic {
            space,
            address: self.address(s, returns)?,
            op,
            size,
            destination,
            a,
            b,
        }))
    }

    fn barrier(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        if m.take("warp") {
            m.take("sync");
            self.count(s, &[1])?;
            return Ok(Op::WarpBarrier(self.s(s, 0, Ty::B(32))?));
        }
        m.any(&["cta", "aligned"]);
        let u = Ty::U(32);
        if m.take("red") {
            let ty = m.ty()?;
            let kind = m
                .choose(&[
                    ("and", BarrierKind::And),
                    ("or", BarrierKind::Or),
                    ("popc", BarrierKind::Count),
                ])
                .ok_or(Problem::from("the reduction is not implemented"))?;
            let bits = if kind == BarrierKind::Count { 32 } else { 1 };
            if ty.bits() != bits {
                return Err("the type is not implemented here".into());
            }
            self.count(s, &[3, 4])?;
            let last = s.operands.len() - 1;
            return Ok(Op::Barrier(Barrier {
                kind,
                id: self.s(s, 1, u)?,
                threads: if last == 3 {
                    Some(self.s(s, 2, u)?)
                } else {
                    None
                },
                source: Some(self.predicate(s, last)?),
                destination: Some(self.destination(s, 0, bits)?),
            }));
        }
        let kind = m
            .choose(&[("sync", BarrierKind::Sync), ("arrive", BarrierKind::Arrive)])
            .ok_or(Problem::from("the barrier is not implemented"))?;
        self.count(
            s,
            if kind == BarrierKind::Arrive {
                &[2]
            } else {
                &[1, 2]
            },
        )?;
        Ok(Op::Barrier(Barrier {
            kind,
            id: self.s(s, 0, u)?,
            threads: if s.operands.len() == 2 {
                Some(self.s(s, 1, u)?)
            } else {
                None
            },
            source: None,
            destination: None,
        }))
    }

    fn exchange(&mut self, s: &'s Statement<'a>, base: &str, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let b32 = Ty::B(32);
        if base == "activemask" {
            m.ty()?;
            self.count(s, &[1])?;
            return Ok(Op::ActiveMask(self.d(s, 0, 32)?));
        }
        if !m.take("sync") {
            return Err("only the `.sync` form is implemented".into());
        }
        match base {
            "shfl" => {
                m.ty()?;
                let mode = m
                    .choose(&[
                        ("up", ShuffleMode::Up),
                        ("down", ShuffleMode::Down),
                        ("bfly", ShuffleMode::Butterfly),
                        ("idx", ShuffleMode::Indexed),
                    ])
                    .ok_or(Problem::from("the mode is missing"))?;
                self.count(s, &[5])?;
                let (d, in_range) = self.pair_of_destinations(s, 32)?;
                let d = d.ok_or(Problem::from("the sink `_` is not implemented here"))?;
                Ok(Op::Shuffle(Shuffle {
                    mode,
                    d: d.index,
                    in_range,
                    a: self.s(s, 1, b32)?,
                    b: self.s(s, 2, b32)?,
                    c: self.s(s, 3, b32)?,
                    mask: self.s(s, 4, b32)?,
                }))
            }
            "vote" => {
                let ty = m.ty()?;
                let kind = m
                    .choose(&[
                        ("all", VoteKind::All),
                        ("any", VoteKind::Any),
                        ("uni", VoteKind::Uniform),
                        ("ballot", VoteKind::Ballot),
                    ])
                    .ok_or(Problem::from("the mode is missing"))?;
                let bits = if kind == VoteKind::Ballot { 32 } else { 1 };
                if ty.bits() != bits {
                    return Err("the type is not implemented here".into());
                }
                self.count(s, &[3])?;
                let d = self.destination(s, 0, bits)?;
                let p = self.predicate(s, 1)?;
                Ok(Op::Vote(kind, d, p, self.s(s, 2, b32)?))
            }
            "match" => {
                let ty = m.ty()?;
                let all = m.take("all");
                m.take("any");
                self.count(s, &[3])?;
                let (d, p) = self.pair_of_destinations(s, 32)?;
                let d = d.ok_or(Problem::from("the sink `_` is not implemented here"))?;
                let operand = self.operand(s, 1)?;
                let a = self.source(s, operand, ty)?;
                Ok(Op::Match(all, d.index, p, a, self.s(s, 2, b32)?))
            }
            "redux" => {
                let ty = m.ty()?;
                let name = m.first()?;
                let op = match (name, ty) {
                    ("add", Ty::U(32) | Ty::S(32)) => ReduceOp::Add,
                    ("min", Ty::U(32)) => ReduceOp::MinUnsigned,
                    ("min", Ty::S(32)) => ReduceOp::MinSigned,
                    ("max", Ty::U(32)) => ReduceOp::MaxUnsigned,
                    ("max", Ty::S(32)) => ReduceOp::MaxSigned,
                    ("and", Ty::B(32)) => ReduceOp::And,
                    ("or", Ty::B(32)) => ReduceOp::Or,
                    ("xor", Ty::B(32)) => ReduceOp::Xor,
                    _ => return Err("the reduction is not implemented".into()),
                };
                self.count(s, &[3])?;
                let d = self.d(s, 0, 32)?;
                Ok(Op::Reduce(op, d, self.s(s, 1, ty)?, self.s(s, 2, b32)?))
            }
            _ => {
                self.count(s, &[2])?;
                let (d, p) = self.pair_of_destinations(s, 32)?;
                let p = p.ok_or(Problem::from("the predicate is missing"))?;
                Ok(Op::Elect(d.map(|d| d.index), p, self.s(s, 1, b32)?))
            }
        }
    }

    fn copy(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<(Class, Op)> {
        if !m.take("async") || m.take("bulk") || m.take("mbarrier") {
            return Err("only `cp.async` without `.bulk` and `.mbarrier` is implemented".into());
        }
        if m.take("commit_group") {
            self.count(s, &[0])?;
            return Ok((Class::Synchronise, Op::CopyCommit));
        }
        if m.take("wait_all") {
            self.count(s, &[0])?;
            return Ok((Class::Synchronise, Op::CopyWait(None)));
        }
        if m.take("wait_group") {
            self.count(s, &[1])?;
            let Operand::Number(Number::Integer(groups), false) = self.operand(s, 0)? else {
                return Err("the number of groups must be a constant".into());
            };
            let groups = u32::try_from(*groups).unwrap_or(u32::MAX);
            return Ok((Class::Synchronise, Op::CopyWait(Some(groups))));
        }
        let hint = m.take("L2::cache_hint");
        let whole = m.take("cg");
        m.any(&["ca", "shared", "shared::cta", "global"]);
        m.any(&["L2::64B", "L2::128B", "L2::256B"]);
        let operands = s.operands.len() - usize::from(hint).min(s.operands.len());
        if operands != 3 && operands != 4 {
            return Err(format!("the form with {operands} operands is not implemented").into());
        }
        let bytes = match self.operand(s, 2)? {
            Operand::Number(Number::Integer(bytes @ (4 | 8 | 16)), false) => *bytes as u8,
            _ => return Err("a copy must have 4, 8 or 16 bytes".into()),
        };
        if whole && bytes != 16 {
            return Err("`.cg` copies 16 bytes".into());
        }
        let source_bytes = if operands == 4 {
            if let Operand::Name(name) | Operand::Not(name) = self.operand(s, 3)?
                && self.register_named(s, name).is_some_and(|r| r.bits == 1)
            {
                return Err("the form that ignores the source is not implemented".into());
            }
            Some(self.s(s, 3, Ty::U(32))?)
        } else {
            None
        };
        self.shared_access(Space::Shared, u64::from(bytes));
        let op = Op::Copy(AsyncCopy {
            to: self.address(s, 0)?,
            from: self.address(s, 1)?,
            bytes,
            source_bytes,
        });
        Ok((Class::Copy, op))
    }

    fn matrices(
        &mut self,
        s: &'s Statement<'a>,
        store: bool,
        m: &mut Modifiers<'a>,
    ) -> Decoded<Op> {
        if !(m.take("sync") && m.take("aligned") && m.take("m8n8") && m.take("b16")) {
            return Err("only `.sync.aligned.m8n8` with `.b16` is implemented".into());
        }
        let count = m
            .choose(&[("x1", 1), ("x2", 2), ("x4", 4)])
            .ok_or(Problem::from("the number of matrices is missing"))?;
        let transposed = m.take("trans");
        m.any(&["shared", "shared::cta"]);
        self.count(s, &[2])?;
        let (at, values) = if store { (0, 1) } else { (1, 0) };
        let mut registers = [0; 4];
        match count {
            1 => registers[..1].copy_from_slice(&self.indices::<1>(s, values, !store)?),
            2 => registers[..2].copy_from_slice(&self.indices::<2>(s, values, !store)?),
            _ => registers = self.indices::<4>(s, values, !store)?,
        }
        // `stmatrix` writes elements of 4 bytes, or of 2 when it transposes.
        let bytes = match (store, transposed) {
            (true, true) => 2,
            (true, false) => 4,
            _ => 16,
        };
        self.shared_access(Space::Shared, bytes);
        Ok(Op::Matrices(Matrices {
            store,
            count,
            transposed,
            address: self.address(s, at)?,
            registers,
        }))
    }

    fn mma(&mut self, s: &'s Statement<'a>, m: &mut Modifiers<'a>) -> Decoded<Op> {
        let form: Vec<&str> = std::mem::take(&mut m.0);
        let ["sync", "aligned", shape, "row", "col", "f32", a, b, "f32"] = form[..] else {
            return Err("the form of `mma` is not implemented".into());
        };
        let (element, k) = match (shape, a) {
            ("m16n8k16", "bf16") => (Element::Bf16, 16),
            ("m16n8k16", "f16") => (Element::F16, 16),
            ("m16n8k8", "bf16") => (Element::Bf16, 8),
            ("m16n8k8", "f16") => (Element::F16, 8),
            ("m16n8k8", "tf32") => (Element::Tf32, 8),
            ("m16n8k4", "tf32") => (Element::Tf32, 4),
            _ => return Err("the shape and type of `mma` are not implemented".into()),
        };
        if a != b {
            return Err("A and B must have one type".into());
        }
        self.count(s, &[4])?;
        let per_register = if element == Element::Tf32 { 1 } else { 2 };
        let (a, b) = match k / per_register {
            8 => (
                self.indices::<4>(s, 1, false)?,
                self.indices::<2>(s, 2, false)?,
            ),
            _ => {
                let [a0, a1] = self.indices::<2>(s, 1, false)?;
                let [b0] = self.indices::<1>(s, 2, false)?;
                ([a0, a1, a0, a0], [b0, b0])
            }
        };
        Ok(Op::Mma(Box::new(Mma {
            element,
            k,
            d: self.indices(s, 0, true)?,
            a,
            b,
            c: self.indices(s, 3, false)?,
        })))
    }
}

/// The name in the operand if it is the given one.
fn name_in<'a>(operand: &Operand<'a>, name: &str) -> Option<&'a str> {
    match operand {
        Operand::Name(found) => (*found == name).then_some(found),
        Operand::Address(base, _) => name_in(base, name),
        _ => None,
    }
}

fn funnel_left(low: u32, high: u32, by: u32) -> u32 {
    let both = u64::from(high) << 32 | u64::from(low);
    (both << by >> 32) as u32
}

fn funnel_right(low: u32, high: u32, by: u32) -> u32 {
    let both = u64::from(high) << 32 | u64::from(low);
    (both >> by) as u32
}

/// The first number becomes the upper half.
#[inline(always)]
fn halves_of(high: u32, low: u32, round: impl Fn(u32) -> u32) -> u32 {
    round(high) << 16 | round(low)
}

fn nearest_f16(bits: u32) -> u32 {
    float::round(f64::from(f32_of(bits)), float::F16, Round::Nearest)
}

/// Negative numbers become zero, NaN stays.
fn relu_of(bits: u32) -> u32 {
    if f32_of(bits) <= 0.0 { 0 } else { bits }
}

fn convertible(ty: Ty) -> Option<Type> {
    Some(match ty {
        Ty::S(bits) => Type::Signed(bits),
        Ty::U(bits) => Type::Unsigned(bits),
        Ty::F16 => Type::F16,
        Ty::Bf16 => Type::Bf16,
        Ty::F32 => Type::F32,
        Ty::F64 => Type::F64,
        _ => return None,
    })
}

/// The bits of a literal in a type.
fn literal(number: Number, negative: bool, ty: Ty) -> Decoded<u64> {
    let float = match number {
        Number::Integer(value) => {
            if matches!(ty, Ty::F32 | Ty::F64 | Ty::F16 | Ty::Bf16 | Ty::Pred) {
                return Err("the literal must be a floating-point number".into());
            }
            let value = if negative {
                value.wrapping_neg()
            } else {
                value
            };
            let bits = ty.bits();
            return Ok(value << (64 - bits) >> (64 - bits));
        }
        Number::F32(bits) if !negative && ty.bits() == 32 => return Ok(u64::from(bits)),
        Number::F64(bits) if !negative && ty.bits() == 64 => return Ok(bits),
        Number::F32(bits) => f64::from(f32::from_bits(bits)),
        Number::F64(bits) => f64::from_bits(bits),
        Number::Decimal(value) => value,
    };
    let float = if negative { -float } else { float };
    match ty {
        Ty::F32 => Ok(u64::from((float as f32).to_bits())),
        Ty::F64 => Ok(float.to_bits()),
        _ => Err("the literal must be an integer".into()),
    }
}

fn special(name: &str) -> Option<Special> {
    let axis = |name: &str| match name {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    Some(match name {
        "%laneid" => Special::LaneId,
        "%warpid" => Special::WarpId,
        "%nwarpid" => Special::NumberOfWarps,
        "%gridid" => Special::GridId,
        "%smid" => Special::SmId,
        "%nsmid" => Special::NumberOfSms,
        "%lanemask_eq" => Special::LaneMaskEqual,
        "%lanemask_lt" => Special::LaneMaskLess,
        "%lanemask_le" => Special::LaneMaskLessEqual,
        "%lanemask_gt" => Special::LaneMaskGreater,
        "%lanemask_ge" => Special::LaneMaskGreaterEqual,
        "%dynamic_smem_size" => Special::DynamicSharedBytes,
        "%total_smem_size" => Special::TotalSharedBytes,
        _ => match name.split_once('.')? {
            ("%tid", rest) => Special::Tid(axis(rest)?),
            ("%ntid", rest) => Special::Ntid(axis(rest)?),
            ("%ctaid", rest) => Special::Ctaid(axis(rest)?),
            ("%nctaid", rest) => Special::Nctaid(axis(rest)?),
            _ => return None,
        },
    })
}
