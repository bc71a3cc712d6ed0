//! Accesses to memory.

use super::*;

impl<'s, 'a> Decoder<'s, 'a> {
    pub(super) fn cvta(&mut self) -> Decoded<Op> {
        let ty = self.m.ty()?;
        if ty.bits() != 64 {
            return Err("addresses must have 64 bits".into());
        }
        let to = self.m.take("to");
        let space = self
            .m
            .choose(&SPACES)
            .ok_or(Problem::from("the state space is missing"))?;
        self.count(&[2])?;
        let window = match space {
            Space::Generic | Space::Global => 0,
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Param => PARAMETER_WINDOW,
        };
        let window = self.bits(64, window).index;
        let (d, a) = (self.d(0, 64)?, self.s(1, ty)?);
        let f = if to {
            g2!(u64::wrapping_sub)
        } else {
            g2!(u64::wrapping_add)
        };
        Ok(Op::Binary64(f, d, [a, window]))
    }

    pub(super) fn access(&mut self, base: &str) -> Decoded<(Class, Op)> {
        let ty = self.m.ty()?;
        let space = self.m.choose(&SPACES).unwrap_or(Space::Generic);
        let strong = STRENGTHS.iter().any(|name| self.m.0.contains(name));
        let hint = self.m.0.contains(&"L2::cache_hint");
        self.m.any(&HINTS);
        let vector = self.m.choose(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
        self.count(if hint { &[3] } else { &[2] })?;
        let store = base == "st";
        let (at, values) = if store { (0, 1) } else { (1, 0) };
        let elements = self.elements(values)?;
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
                Operand::Name(name) => match self.register_named(name) {
                    Some(found) => {
                        let found = self.at_least(found, name, ty.bits())?;
                        Some(if store { self.read(found) } else { found })
                    }
                    None if store => Some(self.source(operand, ty)?),
                    None => return Err(format!("`{name}` is not a register").into()),
                },
                _ if store => {
                    let wide = if ty.bits() == 8 { Ty::B(16) } else { ty };
                    Some(self.source(operand, wide)?)
                }
                _ => return Err("a destination must be a register".into()),
            };
        }
        let access = Access {
            space,
            address: self.address(at)?,
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

    pub(super) fn shared_access(&mut self, space: Space, bytes: u64) {
        if matches!(space, Space::Shared | Space::Generic) {
            self.code.granule = self.code.granule.min(bytes);
        }
    }

    pub(super) fn atomic(&mut self, base: &str) -> Decoded<Op> {
        let ty = self.m.ty()?;
        let space = self.m.choose(&SPACES).unwrap_or(Space::Generic);
        self.m.any(&HINTS);
        let vector = self.m.choose(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
        let name = self.m.first()?;
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
        if vector > 1 && !(op == AtomicOp::AddF32 && space == Space::Global) {
            return Err("vectors are only implemented for `.global.add.f32`".into());
        }
        let returns = usize::from(base == "atom");
        let swap = usize::from(op == AtomicOp::CompareAndSwap);
        self.count(&[2 + returns + swap])?;
        let mut destinations = [None; 4];
        if base == "atom" {
            let elements = self.elements(0)?;
            self.count_elements(elements, vector)?;
            for (destination, element) in destinations.iter_mut().zip(elements) {
                *destination = self.destination_or_sink(element, ty.bits())?;
            }
        }
        let elements = self.elements(1 + returns)?;
        self.count_elements(elements, vector)?;
        let mut a = [self.source(&elements[0], ty)?; 4];
        for (a, element) in a.iter_mut().zip(elements).skip(1) {
            *a = self.source(element, ty)?;
        }
        let b = if swap == 1 {
            let operand = self.operand(2 + returns)?;
            Some(self.source(operand, ty)?)
        } else {
            None
        };
        let size = (ty.bits() / 8) as u8;
        self.shared_access(space, u64::from(size));
        Ok(Op::Atomic(Atomic {
            space,
            address: self.address(returns)?,
            op,
            size,
            elements: vector as u8,
            destinations,
            a,
            b,
        }))
    }

    fn count_elements(&self, elements: &[Operand<'a>], count: usize) -> Decoded<()> {
        if elements.len() == count {
            Ok(())
        } else {
            Err(format!("the access must have {count} elements").into())
        }
    }

    pub(super) fn copy(&mut self) -> Decoded<(Class, Op)> {
        if !self.m.take("async") || self.m.take("bulk") || self.m.take("mbarrier") {
            return Err("only `cp.async` without `.bulk` and `.mbarrier` is implemented".into());
        }
        if self.m.take("commit_group") {
            self.count(&[0])?;
            return Ok((Class::Synchronise, Op::CopyCommit));
        }
        if self.m.take("wait_all") {
            self.count(&[0])?;
            return Ok((Class::Synchronise, Op::CopyWait(None)));
        }
        if self.m.take("wait_group") {
            self.count(&[1])?;
            let groups = self.constant_operand(0)?;
            return Ok((Class::Synchronise, Op::CopyWait(Some(groups))));
        }
        let hint = self.m.take("L2::cache_hint");
        let whole = self.m.take("cg");
        self.m.any(&["ca", "shared", "shared::cta", "global"]);
        self.m.any(&["L2::64B", "L2::128B", "L2::256B"]);
        let operands =
            self.statement.operands.len() - usize::from(hint).min(self.statement.operands.len());
        if operands != 3 && operands != 4 {
            return Err(format!("the form with {operands} operands is not implemented").into());
        }
        let bytes = match self.operand(2)? {
            Operand::Number(Number::Integer(bytes @ (4 | 8 | 16)), false) => *bytes as u8,
            _ => return Err("a copy must have 4, 8 or 16 bytes".into()),
        };
        if whole && bytes != 16 {
            return Err("`.cg` copies 16 bytes".into());
        }
        let source_bytes = if operands == 4 {
            if let Operand::Name(name) | Operand::Not(name) = self.operand(3)?
                && self.register_named(name).is_some_and(|r| r.bits == 1)
            {
                return Err("the form that ignores the source is not implemented".into());
            }
            Some(self.s(3, Ty::U(32))?)
        } else {
            None
        };
        self.shared_access(Space::Shared, u64::from(bytes));
        let op = Op::Copy(AsyncCopy {
            to: self.address(0)?,
            from: self.address(1)?,
            bytes,
            source_bytes,
        });
        Ok((Class::Copy, op))
    }

    pub(super) fn matrices(&mut self, store: bool) -> Decoded<Op> {
        if !(self.m.take("sync")
            && self.m.take("aligned")
            && self.m.take("m8n8")
            && self.m.take("b16"))
        {
            return Err("only `.sync.aligned.m8n8` with `.b16` is implemented".into());
        }
        let count = self
            .m
            .choose(&[("x1", 1), ("x2", 2), ("x4", 4)])
            .ok_or(Problem::from("the number of matrices is missing"))?;
        let transposed = self.m.take("trans");
        self.m.any(&["shared", "shared::cta"]);
        self.count(&[2])?;
        let (at, values) = if store { (0, 1) } else { (1, 0) };
        let mut registers = [0; 4];
        match count {
            1 => registers[..1].copy_from_slice(&self.indices::<1>(values, !store)?),
            2 => registers[..2].copy_from_slice(&self.indices::<2>(values, !store)?),
            _ => registers = self.indices::<4>(values, !store)?,
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
            address: self.address(at)?,
            registers,
        }))
    }
}
