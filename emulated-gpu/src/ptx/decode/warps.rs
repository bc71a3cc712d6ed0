//! Barriers, exchanges and products of a warp.

use super::*;

impl<'s, 'a> Decoder<'s, 'a> {
    pub(super) fn barrier(&mut self) -> Decoded<Op> {
        if self.m.take("warp") {
            self.m.take("sync");
            self.count(&[1])?;
            return Ok(Op::WarpBarrier(self.s(0, Ty::B(32))?));
        }
        self.m.any(&["cta", "aligned"]);
        let u = Ty::U(32);
        if self.m.take("red") {
            let ty = self.m.ty()?;
            let kind = self
                .m
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
            self.count(&[3, 4])?;
            let last = self.statement.operands.len() - 1;
            return Ok(Op::Barrier(Barrier {
                kind,
                id: self.s(1, u)?,
                threads: if last == 3 { Some(self.s(2, u)?) } else { None },
                source: Some(self.predicate(last)?),
                destination: Some(self.destination(0, bits)?),
            }));
        }
        let kind = self
            .m
            .choose(&[("sync", BarrierKind::Sync), ("arrive", BarrierKind::Arrive)])
            .ok_or(Problem::from("the barrier is not implemented"))?;
        self.count(if kind == BarrierKind::Arrive {
            &[2]
        } else {
            &[1, 2]
        })?;
        Ok(Op::Barrier(Barrier {
            kind,
            id: self.s(0, u)?,
            threads: if self.statement.operands.len() == 2 {
                Some(self.s(1, u)?)
            } else {
                None
            },
            source: None,
            destination: None,
        }))
    }

    pub(super) fn exchange(&mut self, base: &str) -> Decoded<Op> {
        let b32 = Ty::B(32);
        if base == "activemask" {
            self.m.ty()?;
            self.count(&[1])?;
            return Ok(Op::ActiveMask(self.d(0, 32)?));
        }
        if !self.m.take("sync") {
            return Err("only the `.sync` form is implemented".into());
        }
        match base {
            "shfl" => {
                self.m.ty()?;
                let mode = self
                    .m
                    .choose(&[
                        ("up", ShuffleMode::Up),
                        ("down", ShuffleMode::Down),
                        ("bfly", ShuffleMode::Butterfly),
                        ("idx", ShuffleMode::Indexed),
                    ])
                    .ok_or(Problem::from("the mode is missing"))?;
                self.count(&[5])?;
                let (d, in_range) = self.pair_of_destinations(32)?;
                let d = d.ok_or(Problem::from("the sink `_` is not implemented here"))?;
                Ok(Op::Shuffle(Shuffle {
                    mode,
                    d: d.index,
                    in_range,
                    a: self.s(1, b32)?,
                    b: self.s(2, b32)?,
                    c: self.s(3, b32)?,
                    mask: self.s(4, b32)?,
                }))
            }
            "vote" => {
                let ty = self.m.ty()?;
                let kind = self
                    .m
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
                self.count(&[3])?;
                let d = self.destination(0, bits)?;
                let p = self.predicate(1)?;
                Ok(Op::Vote(kind, d, p, self.s(2, b32)?))
            }
            "match" => {
                let ty = self.m.ty()?;
                let all = self.m.take("all");
                self.m.take("any");
                self.count(&[3])?;
                let (d, p) = self.pair_of_destinations(32)?;
                let d = d.ok_or(Problem::from("the sink `_` is not implemented here"))?;
                let operand = self.operand(1)?;
                let a = self.source(operand, ty)?;
                Ok(Op::Match(all, d.index, p, a, self.s(2, b32)?))
            }
            "redux" => {
                let ty = self.m.ty()?;
                let name = self.m.first()?;
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
                self.count(&[3])?;
                let d = self.d(0, 32)?;
                Ok(Op::Reduce(op, d, self.s(1, ty)?, self.s(2, b32)?))
            }
            _ => {
                self.count(&[2])?;
                let (d, p) = self.pair_of_destinations(32)?;
                let p = p.ok_or(Problem::from("the predicate is missing"))?;
                Ok(Op::Elect(d.map(|d| d.index), p, self.s(1, b32)?))
            }
        }
    }

    pub(super) fn mma(&mut self) -> Decoded<Op> {
        let form: Vec<&str> = std::mem::take(&mut self.m.0);
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
        self.count(&[4])?;
        let per_register = if element == Element::Tf32 { 1 } else { 2 };
        let (a, b) = match k / per_register {
            8 => (self.indices::<4>(1, false)?, self.indices::<2>(2, false)?),
            _ => {
                let [a0, a1] = self.indices::<2>(1, false)?;
                let [b0] = self.indices::<1>(2, false)?;
                ([a0, a1, a0, a0], [b0, b0])
            }
        };
        Ok(Op::Mma(Box::new(Mma {
            element,
            k,
            d: self.indices(0, true)?,
            a,
            b,
            c: self.indices(3, false)?,
        })))
    }

    pub(super) fn wgmma(&mut self) -> Decoded<(Class, Op)> {
        self.code.has_wgmma = true;
        let form: Vec<&str> = std::mem::take(&mut self.m.0);
        match form[..] {
            ["fence", "sync", "aligned"] => {
                self.count(&[0])?;
                return Ok((Class::Synchronise, Op::WgmmaFence));
            }
            ["commit_group", "sync", "aligned"] => {
                self.count(&[0])?;
                return Ok((Class::Synchronise, Op::WgmmaCommit));
            }
            ["wait_group", "sync", "aligned"] => {
                self.count(&[1])?;
                let groups = self.constant_operand(0)?;
                return Ok((Class::Synchronise, Op::WgmmaWait(groups)));
            }
            _ => {}
        }
        let ["mma_async", "sync", "aligned", shape, "f32", "bf16", "bf16"] = form[..] else {
            return Err("the form of `wgmma` is not implemented".into());
        };
        let n = shape
            .strip_prefix("m64n")
            .and_then(|s| s.strip_suffix("k16"));
        let n: usize = n.and_then(|n| n.parse().ok()).unwrap_or(0);
        if !(8..=256).contains(&n) || !n.is_multiple_of(8) {
            return Err(format!("the shape `.{shape}` does not exist").into());
        }
        let elements = self.elements(0)?;
        if elements.len() != n / 2 {
            return Err(format!("operand 1 must have {} elements", n / 2).into());
        }
        let mut d = Vec::with_capacity(n / 2);
        for element in elements {
            let register = self.destination_or_sink(element, 32)?;
            let register = register.ok_or(Problem::from("the sink `_` is not implemented here"))?;
            if d.contains(&register.index) {
                return Err("the registers of D must differ".into());
            }
            d.push(register.index);
        }
        let of_registers = matches!(self.operand(1)?, Operand::Vector(_));
        self.count(if of_registers { &[7] } else { &[8] })?;
        let last = self.statement.operands.len() - 1;
        let a = if of_registers {
            Left::Registers(self.indices(1, false)?)
        } else {
            Left::Shared(Panel {
                descriptor: self.s(1, Ty::B(64))?,
                transposed: self.flag(6)?,
            })
        };
        let op = Op::Wgmma(Box::new(Wgmma {
            d,
            a,
            b: Panel {
                descriptor: self.s(2, Ty::B(64))?,
                transposed: self.flag(last)?,
            },
            accumulate: self.predicate(3)?,
            negated: self.is_minus_one(4)? != self.is_minus_one(5)?,
        }));
        Ok((Class::Mma, op))
    }

    fn flag(&self, at: usize) -> Decoded<bool> {
        match self.constant_operand(at)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(format!("operand {} must be 0 or 1", at + 1).into()),
        }
    }

    fn is_minus_one(&self, at: usize) -> Decoded<bool> {
        match self.operand(at)? {
            Operand::Number(Number::Integer(1), negative) => Ok(*negative),
            _ => Err(format!("operand {} must be 1 or -1", at + 1).into()),
        }
    }
}
