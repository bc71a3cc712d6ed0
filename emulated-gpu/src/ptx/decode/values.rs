//! Moves, comparisons, selections and conversions.

use super::*;

impl<'s, 'a> Decoder<'s, 'a> {
    pub(super) fn mov(&mut self) -> Decoded<Op> {
        let ty = self.m.ty()?;
        self.count(&[2])?;
        let bits = ty.bits();
        match (self.operand(0)?, self.operand(1)?) {
            (_, Operand::Vector(parts)) => {
                let part = self.part_bits(bits, parts.len())?;
                let mut sources = [None; 4];
                for (source, operand) in sources.iter_mut().zip(parts) {
                    *source = Some(self.source(operand, Ty::B(part))?);
                }
                let f: Any = match part {
                    32 => |v| v[0] | v[1] << 32,
                    _ => |v| v[0] | v[1] << 16 | v[2] << 32 | v[3] << 48,
                };
                Ok(Op::Any(f, self.destination(0, bits)?, sources))
            }
            (Operand::Vector(parts), from) => {
                let part = self.part_bits(bits, parts.len())?;
                let mut to = [None; 4];
                for (to, operand) in to.iter_mut().zip(parts) {
                    *to = self.destination_or_sink(operand, part)?;
                }
                Ok(Op::Unpack(part, to, self.source(from, ty)?))
            }
            (_, Operand::Name("%clock" | "%clock_hi" | "%clock64" | "%globaltimer")) => {
                Ok(Op::Clock(self.destination(0, bits)?))
            }
            _ if ty == Ty::Pred => {
                let p = self.predicate(1)?;
                Ok(Op::Predicates(0b1010, self.d(0, 1)?, [p, p]))
            }
            _ if bits == 64 => self.unary64(g1!(u64_of), ty),
            _ => Ok(Op::Move(self.d(0, bits)?, self.s(1, ty)?)),
        }
    }

    pub(super) fn part_bits(&self, bits: u32, parts: usize) -> Decoded<u32> {
        match (bits, parts) {
            (64, 2) => Ok(32),
            (64, 4) | (32, 2) => Ok(16),
            _ => Err(format!("{parts} parts of {bits} bits are not implemented").into()),
        }
    }

    pub(super) fn predicate_logic(&mut self, base: &str) -> Decoded<Op> {
        let d = self.d(0, 1)?;
        let a = self.predicate(1)?;
        if base == "not" {
            self.count(&[2])?;
            return Ok(Op::Predicates(0b0101, d, [a, a]));
        }
        self.count(&[3])?;
        let table = match base {
            "and" => 0b1000,
            "or" => 0b1110,
            "xor" => 0b0110,
            _ => return Err("the type is not implemented here".into()),
        };
        Ok(Op::Predicates(table, d, [a, self.predicate(2)?]))
    }

    pub(super) fn sign_and_class(&mut self, base: &str) -> Decoded<(Class, Op)> {
        let ty = self.m.ty()?;
        if base == "copysign" {
            let op = match ty {
                Ty::F32 => {
                    let f = f2!(|a, b| a & 0x8000_0000 | b & 0x7fff_ffff);
                    self.binary32(f, ty)?
                }
                _ => self.binary64(g2!(|a, b| a & 1 << 63 | b & !(1 << 63)), ty)?,
            };
            return Ok((Class::Single, op));
        }
        macro_rules! test {
            ($lanes:ident, $of:expr) => {
                match self.m.first()? {
                    "finite" => $lanes!(|a, _| $of(a).is_finite()),
                    "infinite" => $lanes!(|a, _| $of(a).is_infinite()),
                    "number" => $lanes!(|a, _| !$of(a).is_nan()),
                    "notanumber" => $lanes!(|a, _| $of(a).is_nan()),
                    "normal" => $lanes!(|a, _| $of(a).is_normal() || $of(a) == 0.0),
                    "subnormal" => $lanes!(|a, _| $of(a).is_subnormal()),
                    _ => return Err("the test is not implemented".into()),
                }
            };
        }
        self.count(&[2])?;
        let compare = match ty {
            Ty::F32 => {
                let a = self.s(1, ty)?;
                Comparison::B32(test!(compare32, f32_of), [a, a])
            }
            _ => {
                let a = self.s(1, ty)?;
                Comparison::B64(test!(compare64, f64_of), [a, a])
            }
        };
        let op = Op::Compare {
            compare,
            d: Some(self.d(0, 1)?),
            q: None,
            combine: None,
        };
        Ok((Class::Predicate, op))
    }

    pub(super) fn comparison(&mut self, name: &str, ftz: bool, ty: Ty) -> Decoded<Comparison> {
        if ty.bits() == 64 {
            let f: Compare64 = match ty {
                Ty::S(_) => compare_integers!(name, compare64, s64),
                Ty::F64 => compare_floats!(name, compare64, f64_of),
                _ => compare_integers!(name, compare64, u64_of),
            };
            return Ok(Comparison::B64(f, [self.s(1, ty)?, self.s(2, ty)?]));
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
        Ok(Comparison::B32(f, [self.s(1, ty)?, self.s(2, ty)?]))
    }

    pub(super) fn setp(&mut self) -> Decoded<Op> {
        let ty = self.m.ty()?;
        let name = self.m.first()?;
        let ftz = self.m.take("ftz");
        let logic = self
            .m
            .choose(&[("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)]);
        self.count(&[if logic.is_some() { 4 } else { 3 }])?;
        let compare = self.comparison(name, ftz, ty)?;
        let (d, q) = self.pair_of_destinations(1)?;
        let combine = match logic {
            Some(logic) => Some((logic, self.predicate(3)?)),
            None => None,
        };
        Ok(Op::Compare {
            compare,
            d: d.map(|d| d.index),
            q,
            combine,
        })
    }

    pub(super) fn set(&mut self) -> Decoded<Op> {
        let ty = self.m.ty()?;
        let to = self.m.ty()?;
        let name = self.m.first()?;
        let ftz = self.m.take("ftz");
        self.count(&[3])?;
        let values = match to {
            Ty::U(32) | Ty::S(32) => [u32::MAX, 0],
            Ty::F32 => [1f32.to_bits(), 0],
            _ => return Err("the type is not implemented here".into()),
        };
        let compare = self.comparison(name, ftz, ty)?;
        Ok(Op::Set(compare, self.d(0, 32)?, values))
    }

    pub(super) fn select(&mut self, base: &str) -> Decoded<Op> {
        let ty = self.m.ty()?;
        self.count(&[4])?;
        if base == "slct" {
            let ty = self.m.0.pop().and_then(Ty::parse).unwrap_or(ty);
            let f: Any = |v| {
                if (v[2] as u32 as i32) >= 0 {
                    v[0]
                } else {
                    v[1]
                }
            };
            return self.lanes(f, ty, &[ty, ty, Ty::S(32)]);
        }
        let p = self.predicate(3)?;
        let sources = [self.s(1, ty)?, self.s(2, ty)?];
        let d = self.d(0, ty.bits())?;
        Ok(match ty.bits() {
            64 => Op::Select64(d, sources, p),
            _ => Op::Select32(d, sources, p),
        })
    }

    pub(super) fn cvt(&mut self) -> Decoded<Op> {
        let from = self.m.ty()?;
        if self.m.take("tf32") {
            let f = match self.m.choose(&[("rna", true), ("rn", false)]) {
                Some(true) => f1!(|a| float::nearest_tf32(a, true)),
                _ => f1!(|a| float::nearest_tf32(a, false)),
            };
            return match from {
                Ty::F32 => self.unary32(f, Ty::B(32)),
                _ => Err("the conversion is not implemented".into()),
            };
        }
        let to = self.m.ty()?;
        let to_integer = self.m.choose(&TO_INTEGER);
        let relu = self.m.take("relu");
        let mode = self.m.mode();
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
            self.count(&[3])?;
            if from != Ty::F32 || mode != Mode::NEAREST || to_integer.is_some() {
                return Err("the conversion is not implemented".into());
            }
            let f: Binary32 = match (to, relu) {
                (Ty::F16x2, false) => f2!(|a, b| halves_of(a, b, nearest_f16)),
                (Ty::F16x2, true) => f2!(|a, b| halves_of(relu_of(a), relu_of(b), nearest_f16)),
                (_, false) => f2!(|a, b| halves_of(a, b, float::nearest_bf16)),
                (_, true) => f2!(|a, b| halves_of(relu_of(a), relu_of(b), float::nearest_bf16)),
            };
            let d = self.d(0, 32)?;
            return Ok(Op::Binary32(f, d, [self.s(1, from)?, self.s(2, from)?]));
        }
        self.count(&[2])?;
        let (Some(from_type), Some(to_type)) = (convertible(from), convertible(to)) else {
            return Err("the conversion is not implemented".into());
        };
        // Registers may be wider than the types.
        let (Operand::Name(d), source) = (self.operand(0)?, self.operand(1)?) else {
            return Err("a destination must be a register".into());
        };
        let d = match self.register_named(d) {
            Some(register) => self.at_least(register, d, to.bits())?,
            None => return Err(format!("`{d}` is not a register").into()),
        };
        let source = match source {
            Operand::Name(name) => match self.register_named(name) {
                Some(register) => {
                    let register = self.at_least(register, name, from.bits())?;
                    self.read(register)
                }
                None => self.source(&Operand::Name(name), from)?,
            },
            other => self.source(other, from)?,
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
}
