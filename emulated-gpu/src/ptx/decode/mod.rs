//! Decodes a parsed kernel: checks every form and chooses the function that executes it.

#[macro_use]
mod lanes;

mod arithmetic;
mod form;
mod memory;
mod operands;
mod values;
mod warps;

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::HashMap;

use form::*;
use lanes::*;

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
    /// The kernel has `wgmma`, so registers and writes to shared memory are followed for it.
    pub has_wgmma: bool,
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

pub fn kernel(text: &str, source: &Source<'_>, entry: &Entry<'_>) -> Result<Kernel, LoadError> {
    let at = |line| move |problem: Problem| LoadError::new(text, line, problem.0);
    let begin = Statement {
        line: entry.line,
        scope: 0,
        guard: None,
        opcode: "",
        operands: Vec::new(),
    };
    let mut decoder = Decoder::new(source, entry, &begin).map_err(at(entry.line))?;
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

/// Meaning of a name that is no register.
#[derive(Clone, Copy)]
enum Symbol {
    Variable(usize),
    Shared(Room),
    /// An offset in its window.
    Local(u64),
    Parameter(u64),
}

struct Decoder<'s, 'a> {
    entry: &'s Entry<'a>,
    /// The instruction, and its modifiers that are not decoded yet.
    statement: &'s Statement<'a>,
    m: Modifiers<'a>,
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
    fn new(
        source: &Source<'a>,
        entry: &'s Entry<'a>,
        statement: &'s Statement<'a>,
    ) -> Decoded<Self> {
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
        for (index, name) in source.variable_names.iter().enumerate() {
            symbols.entry(*name).or_insert(Symbol::Variable(index));
        }
        let (parameters, _) = parameters(entry);
        for ((name, _), parameter) in entry.parameters.iter().zip(parameters) {
            symbols.insert(*name, Symbol::Parameter(parameter.offset));
        }
        Ok(Self {
            entry,
            statement,
            m: Modifiers(Vec::new()),
            symbols,
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

    fn instruction(&mut self, statement: &'s Statement<'a>) -> Decoded<Instruction> {
        let mut parts = statement.opcode.split('.');
        let base = parts.next().unwrap_or_default();
        (self.statement, self.m) = (statement, Modifiers(parts.collect()));
        self.reads.clear();
        let guard = match self.statement.guard {
            Some((name, negated)) => Some(self.predicate_named(name, negated)?),
            None => None,
        };
        let (class, op) = self.operation(base)?;
        self.m.end()?;
        let start = self.code.reads.len() as u32;
        self.reads.sort_unstable();
        self.reads.dedup();
        self.code.reads.extend(&self.reads);
        Ok(Instruction {
            op,
            guard,
            line: self.statement.line,
            class,
            reads: (start, self.code.reads.len() as u32),
        })
    }

    fn operation(&mut self, base: &str) -> Decoded<(Class, Op)> {
        match base {
            "mov" => self.mov().map(|op| (Class::Move, op)),
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "abs"
            | "neg" => self.arithmetic(base),
            "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => {
                self.function(base)
            }
            "and" | "or" | "xor" | "not" | "shl" | "shr" | "lop3" | "bfe" | "bfi" | "prmt"
            | "popc" | "clz" | "brev" | "bfind" | "shf" | "sad" | "cnot" => self.bitwise(base),
            "copysign" | "testp" => self.sign_and_class(base),
            "setp" => self.setp().map(|op| (Class::Predicate, op)),
            "set" => self.set().map(|op| (Class::Predicate, op)),
            "selp" | "slct" => self.select(base).map(|op| (Class::Predicate, op)),
            "cvt" => self.cvt().map(|op| (Class::Convert, op)),
            "cvta" => self.cvta().map(|op| (Class::Integer, op)),
            "ld" | "ldu" | "st" => self.access(base),
            "atom" | "red" => self.atomic(base).map(|op| (Class::Atomic, op)),
            "bar" | "barrier" => self.barrier().map(|op| (Class::Synchronise, op)),
            "membar" | "fence" => {
                let asynchronous = base == "fence" && self.m.take("proxy") && self.m.take("async");
                let elsewhere = self.m.take("global");
                // Memory is sequentially consistent here.
                self.m.0.clear();
                self.count(&[0])?;
                let op = if asynchronous && !elsewhere {
                    Op::ProxyFence
                } else {
                    Op::Nothing
                };
                Ok((Class::Synchronise, op))
            }
            "nanosleep" => {
                self.m.take("u32");
                self.s(0, Ty::U(32))?;
                Ok((Class::Nothing, Op::Nothing))
            }
            "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                self.m.0.clear();
                Ok((Class::Nothing, Op::Nothing))
            }
            "griddepcontrol" => {
                self.m.any(&["wait", "launch_dependents"]);
                Ok((Class::Nothing, Op::Nothing))
            }
            "createpolicy" => {
                self.m.0.clear();
                let zero = self.bits(64, 0).index;
                let copy = g1!(u64_of);
                Ok((Class::Nothing, Op::Unary64(copy, self.d(0, 64)?, zero)))
            }
            "shfl" | "vote" | "activemask" | "match" | "redux" | "elect" => {
                let op = self.exchange(base)?;
                Ok((Class::Exchange, op))
            }
            "cp" => self.copy(),
            "ldmatrix" | "stmatrix" => {
                let op = self.matrices(base == "stmatrix")?;
                Ok((Class::Matrices, op))
            }
            "mma" => self.mma().map(|op| (Class::Mma, op)),
            "wgmma" => self.wgmma(),
            "setmaxnreg" => {
                self.m.any(&["inc", "dec", "sync", "aligned", "u32"]);
                self.count(&[1])?;
                let registers = self.constant_operand(0)?;
                if !(24..=256).contains(&registers) || !registers.is_multiple_of(8) {
                    return Err(format!("{registers} registers are not 24, 32, …, 256").into());
                }
                Ok((Class::Synchronise, Op::SetRegisters))
            }
            "bra" => {
                self.m.take("uni");
                self.count(&[1])?;
                let Operand::Name(label) = self.operand(0)? else {
                    return Err("expected a label".into());
                };
                Ok((Class::Control, Op::Branch(self.label(label)?)))
            }
            "brx" => self.branch_indexed().map(|op| (Class::Control, op)),
            "ret" | "exit" => {
                self.m.take("uni");
                self.count(&[0])?;
                Ok((Class::Control, Op::Exit))
            }
            IMPLICIT_DEF => {
                let Operand::Name(name) = self.operand(0)? else {
                    return Err("expected a register".into());
                };
                let register = self
                    .register_named(name)
                    .ok_or_else(|| Problem(format!("`{name}` is not a register")))?;
                Ok((Class::Nothing, Op::Define(register)))
            }
            "trap" | "brkpt" => Ok((Class::Control, Op::Trap)),
            _ => Err(format!("`{base}` is not implemented").into()),
        }
    }

    fn label(&self, label: &str) -> Decoded<u32> {
        self.entry
            .find(self.statement.scope, |scope| {
                scope.labels.get(label).copied()
            })
            .map(|target| target as u32)
            .ok_or_else(|| format!("the label `{label}` does not exist").into())
    }

    fn branch_indexed(&mut self) -> Decoded<Op> {
        self.m.any(&["idx", "uni"]);
        self.count(&[2])?;
        let Operand::Name(list) = self.operand(1)? else {
            return Err("expected a list of targets".into());
        };
        let targets = self
            .entry
            .find(self.statement.scope, |scope| {
                scope.targets.get(list).cloned()
            })
            .ok_or_else(|| Problem(format!("the list `{list}` does not exist")))?;
        let targets: Vec<u32> = targets
            .iter()
            .map(|label| self.label(label))
            .collect::<Decoded<_>>()?;
        Ok(Op::BranchIndexed(
            self.s(0, Ty::U(32))?,
            targets.into_boxed_slice(),
        ))
    }
}
