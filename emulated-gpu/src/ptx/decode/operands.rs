//! Operands.

use super::*;

impl<'s, 'a> Decoder<'s, 'a> {
    // Operands.

    pub(super) fn register_named(&self, name: &str) -> Option<Register> {
        self.entry.find(self.statement.scope, |scope| {
            scope.registers.get(name).copied()
        })
    }

    pub(super) fn predicate_named(&mut self, name: &str, negated: bool) -> Decoded<Predicate> {
        match self.register_named(name) {
            Some(Register { bits: 1, index }) => {
                self.reads.push(index << 2);
                Ok(Predicate { index, negated })
            }
            _ => Err(format!("`{name}` is not a predicate").into()),
        }
    }

    pub(super) fn operand(&self, at: usize) -> Decoded<&'s Operand<'a>> {
        self.statement
            .operands
            .get(at)
            .ok_or_else(|| format!("operand {} is missing", at + 1).into())
    }

    pub(super) fn count(&self, allowed: &[usize]) -> Decoded<()> {
        if allowed.contains(&self.statement.operands.len()) {
            return Ok(());
        }
        let count = self.statement.operands.len();
        Err(format!("the form with {count} operands is not implemented").into())
    }

    /// A destination register of this width in bits; `None` for the sink `_`.
    pub(super) fn destination_or_sink(
        &self,
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
            .register_named(name)
            .ok_or_else(|| Problem(format!("`{name}` is not a register")))?;
        if register.bits != bits {
            let has = register.bits;
            return Err(format!("`{name}` has {has} bits, the type {bits}").into());
        }
        Ok(Some(register))
    }

    pub(super) fn destination(&self, at: usize, bits: u32) -> Decoded<Register> {
        let operand = self.operand(at)?;
        self.destination_or_sink(operand, bits)?
            .ok_or_else(|| "the sink `_` is not implemented here".into())
    }

    pub(super) fn d(&self, at: usize, bits: u32) -> Decoded<Index> {
        self.destination(at, bits).map(|register| register.index)
    }

    /// A register of at least this width in bits, for loads, stores and conversions.
    pub(super) fn at_least(&self, register: Register, name: &str, bits: u32) -> Decoded<Register> {
        if register.bits < bits || register.bits == 1 {
            let has = register.bits;
            return Err(format!("`{name}` has {has} bits, the type {bits}").into());
        }
        Ok(register)
    }

    pub(super) fn read(&mut self, register: Register) -> Register {
        let file = if register.bits == 64 { 2 } else { 1 };
        let names = &self.code.names[file as usize];
        // Constants are always initialised.
        if (register.index as usize) < names.len() {
            self.reads.push(register.index << 2 | file);
        }
        register
    }

    pub(super) fn constant(&mut self, bits: u32, constant: Constant) -> Register {
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

    pub(super) fn bits(&mut self, bits: u32, value: u64) -> Register {
        self.constant(bits, Constant::Bits(value))
    }

    /// A source of the type.
    pub(super) fn source(&mut self, operand: &Operand<'a>, ty: Ty) -> Decoded<Register> {
        let bits = ty.bits();
        match operand {
            Operand::Number(number, negative) => {
                let value = literal(*number, *negative, ty)?;
                Ok(self.bits(bits, value))
            }
            Operand::Name(name) => match self.register_named(name) {
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
    pub(super) fn named(&mut self, name: &str, offset: i64, bits: u32) -> Decoded<Register> {
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

    pub(super) fn s(&mut self, at: usize, ty: Ty) -> Decoded<Index> {
        let operand = self.operand(at)?;
        self.source(operand, ty).map(|register| register.index)
    }

    pub(super) fn predicate(&mut self, at: usize) -> Decoded<Predicate> {
        match self.operand(at)? {
            Operand::Name(name) => self.predicate_named(name, false),
            Operand::Not(name) => self.predicate_named(name, true),
            // The predicate behind the registers is always false.
            Operand::Number(Number::Integer(value), _) => Ok(Predicate {
                index: self.code.names[0].len() as u32,
                negated: *value != 0,
            }),
            _ => Err("expected a predicate".into()),
        }
    }

    pub(super) fn constant_operand(&self, at: usize) -> Decoded<u32> {
        match self.operand(at)? {
            Operand::Number(Number::Integer(value), false) => {
                Ok(u32::try_from(*value).unwrap_or(u32::MAX))
            }
            _ => Err(format!("operand {} must be a constant", at + 1).into()),
        }
    }

    pub(super) fn address(&mut self, at: usize) -> Decoded<Address> {
        let Operand::Address(base, offset) = self.operand(at)? else {
            return Err(format!("operand {} must be an address", at + 1).into());
        };
        let offset = *offset;
        match &**base {
            Operand::Name(name) => match self.register_named(name) {
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
    pub(super) fn elements(&self, at: usize) -> Decoded<&'s [Operand<'a>]> {
        let operand = self.operand(at)?;
        Ok(match operand {
            Operand::Vector(elements) => elements,
            _ => std::slice::from_ref(operand),
        })
    }

    pub(super) fn indices<const N: usize>(
        &mut self,
        at: usize,
        destination: bool,
    ) -> Decoded<[Index; N]> {
        let elements = self.elements(at)?;
        if elements.len() != N {
            return Err(format!("operand {} must have {N} elements", at + 1).into());
        }
        let mut indices = [0; N];
        for (index, element) in indices.iter_mut().zip(elements) {
            *index = if destination {
                let register = self.destination_or_sink(element, 32)?;
                register.ok_or(Problem::from("the sink `_` is not implemented here"))?
            } else {
                self.source(element, Ty::B(32))?
            }
            .index;
        }
        Ok(indices)
    }

    /// `d` or `d|p`, where p is a predicate and each may be the sink.
    pub(super) fn pair_of_destinations(
        &mut self,
        bits: u32,
    ) -> Decoded<(Option<Register>, Option<Index>)> {
        let Operand::Pair(first, second) = self.operand(0)? else {
            return Ok((self.destination_or_sink(self.operand(0)?, bits)?, None));
        };
        let first = self.destination_or_sink(&Operand::Name(first), bits)?;
        let second = self.destination_or_sink(&Operand::Name(second), 1)?;
        Ok((first, second.map(|p| p.index)))
    }

    // Builders for the usual shapes.

    pub(super) fn unary32(&mut self, f: Unary32, ty: Ty) -> Decoded<Op> {
        self.count(&[2])?;
        Ok(Op::Unary32(f, self.d(0, ty.bits())?, self.s(1, ty)?))
    }

    pub(super) fn binary32(&mut self, f: Binary32, ty: Ty) -> Decoded<Op> {
        self.count(&[3])?;
        let d = self.d(0, ty.bits())?;
        Ok(Op::Binary32(f, d, [self.s(1, ty)?, self.s(2, ty)?]))
    }

    pub(super) fn ternary32(&mut self, f: Ternary32, ty: Ty) -> Decoded<Op> {
        self.count(&[4])?;
        let d = self.d(0, ty.bits())?;
        let sources = [self.s(1, ty)?, self.s(2, ty)?, self.s(3, ty)?];
        Ok(Op::Ternary32(f, d, sources))
    }

    pub(super) fn unary64(&mut self, f: Unary64, ty: Ty) -> Decoded<Op> {
        self.count(&[2])?;
        Ok(Op::Unary64(f, self.d(0, 64)?, self.s(1, ty)?))
    }

    pub(super) fn binary64(&mut self, f: Binary64, ty: Ty) -> Decoded<Op> {
        self.count(&[3])?;
        let d = self.d(0, 64)?;
        Ok(Op::Binary64(f, d, [self.s(1, ty)?, self.s(2, ty)?]))
    }

    pub(super) fn ternary64(&mut self, f: Ternary64, ty: Ty) -> Decoded<Op> {
        self.count(&[4])?;
        let d = self.d(0, 64)?;
        let sources = [self.s(1, ty)?, self.s(2, ty)?, self.s(3, ty)?];
        Ok(Op::Ternary64(f, d, sources))
    }

    /// A function of lanes whose operands have the types; the destination is `d`.
    pub(super) fn lanes(&mut self, f: Any, d: Ty, types: &[Ty]) -> Decoded<Op> {
        self.count(&[types.len() + 1])?;
        let mut sources = [None; 4];
        for (at, ty) in types.iter().enumerate() {
            let operand = self.operand(at + 1)?;
            sources[at] = Some(self.source(operand, *ty)?);
        }
        Ok(Op::Any(f, self.destination(0, d.bits())?, sources))
    }
}
