//! Parses tokens into variables, kernels and their statements.

use std::collections::HashMap;

use super::LoadError;
use super::lexer::{Number, Token, tokens};
use crate::launch::Dim;

#[derive(Debug, Default)]
pub struct Source<'a> {
    /// In `.global` and `.const` memory.
    pub variables: Vec<Variable>,
    pub variable_names: Vec<&'a str>,
    /// `.shared` variables of the module.
    pub shared: Vec<(&'a str, Room)>,
    pub entries: Vec<Entry<'a>>,
}

/// A module's variable in `.global` or `.const` memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    pub name: String,
    /// Bytes.
    pub align: u64,
    /// The initial value; its length is the variable's size in bytes. PTX zeroes what has no initialiser.
    pub initial: Vec<u8>,
}

/// The size and alignment of a variable, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub bytes: u64,
    pub align: u64,
    /// An array without a length, which the launch sizes.
    pub dynamic: bool,
}

/// A register. The index counts registers of 1, of up to 32 and of 64 bits separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register {
    /// 1, 16, 32 or 64.
    pub bits: u32,
    pub index: u32,
}

#[derive(Debug, Default)]
pub struct Entry<'a> {
    pub name: &'a str,
    pub line: u32,
    pub parameters: Vec<(&'a str, Room)>,
    /// `.maxntid`.
    pub max_threads: Option<Dim>,
    /// `.reqntid`.
    pub required_threads: Option<Dim>,
    /// `.maxnreg`.
    pub max_registers: Option<u32>,
    pub shared: Vec<(&'a str, Room)>,
    pub local: Vec<(&'a str, Room)>,
    pub statements: Vec<Statement<'a>>,
    /// Scope 0 is the body; each `{ }` in it is another.
    pub scopes: Vec<Scope<'a>>,
    /// Names of registers by file (1, up to 32, 64 bits) and index.
    pub register_names: [Vec<String>; 3],
}

/// Names declared between a pair of braces.
#[derive(Debug, Default)]
pub struct Scope<'a> {
    pub parent: Option<usize>,
    pub registers: HashMap<String, Register>,
    /// The index of the statement that follows the label.
    pub labels: HashMap<&'a str, usize>,
    /// `.branchtargets`.
    pub targets: HashMap<&'a str, Vec<&'a str>>,
}

#[derive(Debug)]
pub struct Statement<'a> {
    pub line: u32,
    pub scope: usize,
    /// The predicate's name and whether it is negated.
    pub guard: Option<(&'a str, bool)>,
    /// With its modifiers.
    pub opcode: &'a str,
    pub operands: Vec<Operand<'a>>,
}

/// An operand of an instruction.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand<'a> {
    Name(&'a str),
    /// A literal and whether a minus sign precedes it.
    Number(Number, bool),
    Vector(Vec<Operand<'a>>),
    /// `[base + offset]`.
    Address(Box<Operand<'a>>, i64),
    /// `p|q`.
    Pair(&'a str, &'a str),
    /// `!p`.
    Not(&'a str),
}

impl<'a> Entry<'a> {
    /// Looks a name up in a scope and those around it.
    pub fn find<T>(&self, scope: usize, mut of: impl FnMut(&Scope<'a>) -> Option<T>) -> Option<T> {
        let mut next = Some(scope);
        while let Some(scope) = next {
            if let Some(found) = of(&self.scopes[scope]) {
                return Some(found);
            }
            next = self.scopes[scope].parent;
        }
        None
    }
}

pub fn parse(text: &str) -> Result<Source<'_>, LoadError> {
    let mut parser = Parser {
        text,
        tokens: tokens(text)?,
        at: 0,
    };
    let mut source = Source::default();
    while parser.at < parser.tokens.len() {
        parser.module_item(&mut source)?;
    }
    Ok(source)
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(u32, Token<'a>)>,
    at: usize,
}

/// Linkage, which changes nothing in a module that is loaded on its own.
const LINKAGE: [&str; 4] = [".visible", ".extern", ".weak", ".common"];

impl<'a> Parser<'a> {
    fn line(&self) -> u32 {
        let at = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(at).map_or(1, |&(line, _)| line)
    }

    fn wrong(&self, problem: impl Into<String>) -> LoadError {
        LoadError::new(self.text, self.line(), problem)
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|&(_, token)| token)
    }

    fn next(&mut self) -> Result<Token<'a>, LoadError> {
        let token = self
            .peek()
            .ok_or_else(|| self.wrong("the module ends too early"))?;
        self.at += 1;
        Ok(token)
    }

    /// Takes the sign if it is next.
    fn take(&mut self, sign: char) -> bool {
        let found = self.peek() == Some(Token::Sign(sign));
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, sign: char) -> Result<(), LoadError> {
        if self.take(sign) {
            return Ok(());
        }
        Err(self.wrong(format!("expected `{sign}`")))
    }

    fn word(&mut self) -> Result<&'a str, LoadError> {
        match self.peek() {
            Some(Token::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            _ => Err(self.wrong("expected a name")),
        }
    }

    fn integer(&mut self) -> Result<u64, LoadError> {
        match self.next()? {
            Token::Number(Number::Integer(value)) => Ok(value),
            _ => {
                self.at -= 1;
                Err(self.wrong("expected an integer"))
            }
        }
    }

    fn small(&mut self) -> Result<u32, LoadError> {
        let value = self.integer()?;
        u32::try_from(value).map_err(|_| self.wrong("the integer exceeds 32 bits"))
    }

    fn skip_past(&mut self, sign: char) -> Result<(), LoadError> {
        while self.next()? != Token::Sign(sign) {}
        Ok(())
    }

    fn module_item(&mut self, source: &mut Source<'a>) -> Result<(), LoadError> {
        match self.word()? {
            ".version" => self.next().map(drop),
            ".target" => {
                self.word()?;
                while self.take(',') {
                    self.word()?;
                }
                Ok(())
            }
            ".address_size" => match self.integer()? {
                64 => Ok(()),
                _ => Err(self.wrong("addresses must have 64 bits")),
            },
            ".pragma" => self.skip_past(';'),
            ".section" => self.skip_past('}'),
            word if LINKAGE.contains(&word) => Ok(()),
            ".entry" => {
                let entry = self.entry()?;
                source.entries.push(entry);
                Ok(())
            }
            ".shared" => self.rooms(&mut source.shared),
            ".global" | ".const" => self.variable(source),
            ".func" => Err(self.wrong("device functions are not implemented; inline them")),
            word => {
                self.at -= 1;
                Err(self.wrong(format!("`{word}` is not implemented")))
            }
        }
    }

    /// `.align 4 .b8 name[16]`, after the state space; gives the name, the size and the element's bytes.
    fn declaration(&mut self) -> Result<(&'a str, Room, u64), LoadError> {
        let mut align = None;
        let element = loop {
            match self.word()? {
                ".align" => align = Some(self.integer()?),
                ".ptr" | ".global" | ".attribute" => {}
                word => break self.type_bytes(word)?,
            }
        };
        // `.param .u64 .ptr .global .align 16 name`: what the pointer points to.
        let mut name = self.word()?;
        while name.starts_with('.') {
            if name == ".align" {
                self.integer()?;
            }
            name = self.word()?;
        }
        let (mut bytes, mut dynamic) = (element, false);
        while self.take('[') {
            if self.take(']') {
                (bytes, dynamic) = (0, true);
            } else {
                let len = self.integer()?;
                bytes = bytes
                    .checked_mul(len)
                    .ok_or_else(|| self.wrong("the array is too long"))?;
                self.expect(']')?;
            }
        }
        let align = align.unwrap_or(element);
        if !align.is_power_of_two() {
            return Err(self.wrong("an alignment must be a power of two"));
        }
        if bytes > 1 << 32 {
            return Err(self.wrong("the array is too long"));
        }
        let room = Room {
            bytes,
            align,
            dynamic,
        };
        Ok((name, room, element))
    }

    fn type_bytes(&self, word: &str) -> Result<u64, LoadError> {
        match word {
            ".b8" | ".u8" | ".s8" => Ok(1),
            ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => Ok(2),
            ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => Ok(4),
            ".b64" | ".u64" | ".s64" | ".f64" => Ok(8),
            _ => Err(self.wrong(format!("the type `{word}` is not implemented"))),
        }
    }

    fn rooms(&mut self, into: &mut Vec<(&'a str, Room)>) -> Result<(), LoadError> {
        let (name, room, _) = self.declaration()?;
        into.push((name, room));
        self.expect(';')
    }

    fn variable(&mut self, source: &mut Source<'a>) -> Result<(), LoadError> {
        let (name, room, element) = self.declaration()?;
        let mut initial = Vec::new();
        let mut dynamic = room.dynamic;
        if self.take('=') {
            dynamic = false;
            let mut depth = 0;
            loop {
                if self.take('{') {
                    depth += 1;
                } else {
                    let negative = self.take('-');
                    let bits = match self.next()? {
                        Token::Number(Number::Integer(value)) if negative => value.wrapping_neg(),
                        Token::Number(Number::Integer(value)) => value,
                        Token::Number(Number::F32(bits)) => u64::from(bits),
                        Token::Number(Number::F64(bits)) => bits,
                        _ => {
                            self.at -= 1;
                            return Err(self.wrong("an initialiser must be a list of numbers"));
                        }
                    };
                    initial.extend(&bits.to_le_bytes()[..element as usize]);
                }
                while depth > 0 && self.take('}') {
                    depth -= 1;
                }
                if depth == 0 {
                    break;
                }
                self.take(',');
            }
        }
        self.expect(';')?;
        if dynamic {
            return Err(self.wrong(format!("`{name}` needs a size")));
        }
        if !room.dynamic {
            initial.resize(room.bytes as usize, 0);
        }
        source.variable_names.push(name);
        source.variables.push(Variable {
            name: name.to_owned(),
            align: room.align,
            initial,
        });
        Ok(())
    }

    fn dim(&mut self) -> Result<Dim, LoadError> {
        let x = self.small()?;
        let y = if self.take(',') { self.small()? } else { 1 };
        let z = if self.take(',') { self.small()? } else { 1 };
        Ok(Dim { x, y, z })
    }

    fn entry(&mut self) -> Result<Entry<'a>, LoadError> {
        let line = self.line();
        let mut entry = Entry {
            name: self.word()?,
            line,
            ..Entry::default()
        };
        if self.take('(') && !self.take(')') {
            loop {
                if self.word()? != ".param" {
                    self.at -= 1;
                    return Err(self.wrong("expected `.param`"));
                }
                let (name, room, _) = self.declaration()?;
                entry.parameters.push((name, room));
                if !self.take(',') {
                    break;
                }
            }
            self.expect(')')?;
        }
        loop {
            match self.next()? {
                Token::Sign('{') => break,
                Token::Word(".maxntid") => entry.max_threads = Some(self.dim()?),
                Token::Word(".reqntid") => entry.required_threads = Some(self.dim()?),
                Token::Word(".maxnreg") => entry.max_registers = Some(self.small()?),
                Token::Word(".minnctapersm") => drop(self.small()?),
                Token::Word(".pragma") => self.skip_past(';')?,
                _ => {
                    self.at -= 1;
                    return Err(self.wrong("the performance directive is not implemented"));
                }
            }
        }
        self.body(&mut entry)?;
        Ok(entry)
    }

    fn body(&mut self, entry: &mut Entry<'a>) -> Result<(), LoadError> {
        entry.scopes.push(Scope::default());
        let mut scope = 0;
        loop {
            match self.next()? {
                Token::Sign(';') => {}
                Token::Sign('{') => {
                    entry.scopes.push(Scope {
                        parent: Some(scope),
                        ..Scope::default()
                    });
                    scope = entry.scopes.len() - 1;
                }
                Token::Sign('}') => match entry.scopes[scope].parent {
                    Some(parent) => scope = parent,
                    None => return Ok(()),
                },
                Token::Word(".reg") => self.registers(entry, scope)?,
                Token::Word(".shared") => self.rooms(&mut entry.shared)?,
                Token::Word(".local") => self.rooms(&mut entry.local)?,
                Token::Word(".pragma") => self.skip_past(';')?,
                Token::Sign('@') => {
                    let negated = self.take('!');
                    let guard = (self.word()?, negated);
                    let opcode = self.word()?;
                    self.statement(entry, scope, Some(guard), opcode)?;
                }
                Token::Word(word) if self.take(':') => {
                    if self.peek() == Some(Token::Word(".branchtargets")) {
                        self.at += 1;
                        let mut targets = vec![self.word()?];
                        while self.take(',') {
                            targets.push(self.word()?);
                        }
                        self.expect(';')?;
                        entry.scopes[scope].targets.insert(word, targets);
                    } else {
                        let next = entry.statements.len();
                        entry.scopes[scope].labels.insert(word, next);
                    }
                }
                Token::Word(word) if word.starts_with('.') => {
                    self.at -= 1;
                    return Err(self.wrong(format!("`{word}` is not implemented")));
                }
                Token::Word(opcode) => self.statement(entry, scope, None, opcode)?,
                _ => {
                    self.at -= 1;
                    return Err(self.wrong("expected an instruction"));
                }
            }
        }
    }

    /// `.b32 %r<52>, x;`
    fn registers(&mut self, entry: &mut Entry<'a>, scope: usize) -> Result<(), LoadError> {
        let (file, bits) = match self.word()? {
            ".pred" => (0, 1),
            ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => (1, 16),
            ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => (1, 32),
            ".b64" | ".u64" | ".s64" | ".f64" => (2, 64),
            word => {
                return Err(self.wrong(format!("registers of type `{word}` are not implemented")));
            }
        };
        loop {
            let name = self.word()?;
            let names: Vec<String> = if self.take('<') {
                let count = self.small()?;
                self.expect('>')?;
                if count > 1 << 20 {
                    return Err(self.wrong("too many registers"));
                }
                (0..count).map(|i| format!("{name}{i}")).collect()
            } else {
                vec![name.to_owned()]
            };
            for name in names {
                let index = entry.register_names[file].len() as u32;
                entry.register_names[file].push(name.clone());
                let register = Register { bits, index };
                entry.scopes[scope].registers.insert(name, register);
            }
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn statement(
        &mut self,
        entry: &mut Entry<'a>,
        scope: usize,
        guard: Option<(&'a str, bool)>,
        opcode: &'a str,
    ) -> Result<(), LoadError> {
        let line = self.tokens[self.at - 1].0;
        let mut operands = Vec::new();
        if !self.take(';') {
            loop {
                operands.push(self.operand()?);
                if !self.take(',') {
                    break;
                }
            }
            self.expect(';')?;
        }
        entry.statements.push(Statement {
            line,
            scope,
            guard,
            opcode,
            operands,
        });
        Ok(())
    }

    fn operand(&mut self) -> Result<Operand<'a>, LoadError> {
        if self.take('{') {
            let mut of_vector = vec![self.operand()?];
            while self.take(',') {
                of_vector.push(self.operand()?);
            }
            self.expect('}')?;
            return Ok(Operand::Vector(of_vector));
        }
        if self.take('[') {
            let base = self.operand()?;
            let mut offset = 0i64;
            while !self.take(']') {
                let plus = self.take('+');
                let minus = self.take('-');
                if !plus && !minus {
                    return Err(self.wrong("the form of the address is not implemented"));
                }
                let step = self.integer()? as i64;
                offset = offset.wrapping_add(if minus { step.wrapping_neg() } else { step });
            }
            return Ok(Operand::Address(Box::new(base), offset));
        }
        if self.take('!') {
            return Ok(Operand::Not(self.word()?));
        }
        let negative = self.take('-');
        match self.next()? {
            Token::Number(number) => Ok(Operand::Number(number, negative)),
            Token::Word(name) if !negative => {
                if self.take('|') {
                    Ok(Operand::Pair(name, self.word()?))
                } else {
                    Ok(Operand::Name(name))
                }
            }
            _ => {
                self.at -= 1;
                Err(self.wrong("expected an operand"))
            }
        }
    }
}
