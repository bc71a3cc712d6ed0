//! Arithmetic and logic.

use super::*;

impl<'s, 'a> Decoder<'s, 'a> {
    pub(super) fn arithmetic(&mut self, base: &str) -> Decoded<(Class, Op)> {
        let ty = self.m.ty()?;
        match ty {
            Ty::F32 => self.single(base),
            Ty::F64 => self.double(base).map(|op| (Class::Double, op)),
            Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2 => {
                self.half(base, ty).map(|op| (Class::Half, op))
            }
            Ty::U(_) | Ty::S(_) => self.integer(base, ty).map(|op| (Class::Integer, op)),
            _ => Err("the type is not implemented here".into()),
        }
    }

    pub(super) fn integer(&mut self, base: &str, ty: Ty) -> Decoded<Op> {
        use Ty::{S, U};
        if matches!(base, "mul" | "mad") {
            return self.product(base, ty);
        }
        if self.m.take("sat") {
            let f: Binary32 = match (base, ty) {
                ("add", S(32)) => f2!(|a, b| s32(a).saturating_add(s32(b)) as u32),
                ("sub", S(32)) => f2!(|a, b| s32(a).saturating_sub(s32(b)) as u32),
                _ => return Err("`.sat` is not implemented here".into()),
            };
            return self.binary32(f, ty);
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
                    return self.unary64(g1!(|a| s64(a).wrapping_abs() as u64), ty);
                }
                ("neg", S(_)) => return self.unary64(g1!(u64::wrapping_neg), ty),
                _ => return Err("the type is not implemented here".into()),
            };
            return self.binary64(f, ty);
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
            ("abs", S(32)) => return self.unary32(f1!(|a| s32(a).unsigned_abs()), ty),
            ("neg", S(32)) => return self.unary32(f1!(u32::wrapping_neg), ty),
            ("abs", S(16)) => {
                return self.unary32(f1!(|a| s16(a).unsigned_abs() & 0xffff), ty);
            }
            ("neg", S(16)) => {
                return self.unary32(f1!(|a: u32| a.wrapping_neg() & 0xffff), ty);
            }
            _ => return Err("the type is not implemented here".into()),
        };
        self.binary32(f, ty)
    }

    pub(super) fn product(&mut self, base: &str, ty: Ty) -> Decoded<Op> {
        use Ty::{S, U};
        let part = self
            .m
            .choose(&[("lo", 0), ("hi", 1), ("wide", 2)])
            .ok_or(Problem::from("`.lo`, `.hi` or `.wide` is missing"))?;
        let add = base == "mad";
        match (part, ty) {
            (0, U(32) | S(32)) if add => {
                self.ternary32(f3!(|a: u32, b, c| a.wrapping_mul(b).wrapping_add(c)), ty)
            }
            (0, U(32) | S(32)) => self.binary32(f2!(u32::wrapping_mul), ty),
            (0, U(16) | S(16)) if add => {
                let f = f3!(|a: u32, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff);
                self.ternary32(f, ty)
            }
            (0, U(16) | S(16)) => self.binary32(f2!(|a: u32, b| a.wrapping_mul(b) & 0xffff), ty),
            (0, U(64) | S(64)) if add => {
                self.ternary64(g3!(|a: u64, b, c| a.wrapping_mul(b).wrapping_add(c)), ty)
            }
            (0, U(64) | S(64)) => self.binary64(g2!(u64::wrapping_mul), ty),
            (1, U(32)) if add => {
                let f = f3!(|a, b, c| high_u32(a, b).wrapping_add(c));
                self.ternary32(f, ty)
            }
            (1, S(32)) if add => {
                let f = f3!(|a, b, c| high_s32(a, b).wrapping_add(c));
                self.ternary32(f, ty)
            }
            (1, U(32)) => self.binary32(f2!(high_u32), ty),
            (1, S(32)) => self.binary32(f2!(high_s32), ty),
            (1, U(64)) if !add => self.binary64(g2!(high_u64), ty),
            (1, S(64)) if !add => self.binary64(g2!(high_s64), ty),
            (1, U(16)) if !add => self.binary32(f2!(|a: u32, b: u32| (a * b) >> 16), ty),
            (1, S(16)) if !add => {
                let f = f2!(|a, b| ((s16(a) * s16(b)) >> 16 & 0xffff) as u32);
                self.binary32(f, ty)
            }
            (2, U(32) | S(32)) => {
                self.count(&[if add { 4 } else { 3 }])?;
                let d = self.d(0, 64)?;
                let factors = [self.s(1, ty)?, self.s(2, ty)?];
                let unsigned = ty == U(32);
                if !add {
                    let f = if unsigned {
                        wide!(|a: u32, b: u32| u64::from(a) * u64::from(b))
                    } else {
                        wide!(|a, b| (i64::from(s32(a)) * i64::from(s32(b))) as u64)
                    };
                    return Ok(Op::Wide(f, d, factors));
                }
                let f = if unsigned {
                    wide_add!(|a: u32, b: u32| u64::from(a) * u64::from(b))
                } else {
                    wide_add!(|a, b| (i64::from(s32(a)) * i64::from(s32(b))) as u64)
                };
                Ok(Op::WideAdd(f, d, factors, self.s(3, Ty::B(64))?))
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
                self.lanes(f, Ty::B(32), if add { &types } else { &types[..2] })
            }
            _ => Err("the product is not implemented".into()),
        }
    }

    pub(super) fn single(&mut self, base: &str) -> Decoded<(Class, Op)> {
        let ty = Ty::F32;
        let approximate = self.m.any(&["approx", "full"]);
        let nan = self.m.take("NaN");
        let mode = self.m.mode();
        let class = if approximate {
            Class::Approximate
        } else {
            Class::Single
        };
        if (approximate && base != "div") || (nan && base != "min" && base != "max") {
            return Err("the modifier is not implemented here".into());
        }
        let op = match base {
            "add" => self.binary32(by_mode!(mode, M, f2!(float::add::<M>)), ty),
            "sub" => self.binary32(by_mode!(mode, M, f2!(float::sub::<M>)), ty),
            "mul" => self.binary32(by_mode!(mode, M, f2!(float::mul::<M>)), ty),
            "div" => self.binary32(by_mode!(mode, M, f2!(float::div::<M>)), ty),
            "fma" | "mad" => {
                let f = by_mode!(mode, M, float::fma_lanes::<M> as Ternary32);
                self.ternary32(f, ty)
            }
            "min" if nan => {
                let f = by_flush!(mode, M, f2!(float::min::<M, true>));
                self.binary32(f, ty)
            }
            "max" if nan => {
                let f = by_flush!(mode, M, f2!(float::max::<M, true>));
                self.binary32(f, ty)
            }
            "min" => {
                let f = by_flush!(mode, M, f2!(float::min::<M, false>));
                self.binary32(f, ty)
            }
            "max" => {
                let f = by_flush!(mode, M, f2!(float::max::<M, false>));
                self.binary32(f, ty)
            }
            "neg" => self.unary32(by_flush!(mode, M, f1!(float::neg::<M>)), ty),
            "abs" => self.unary32(by_flush!(mode, M, f1!(float::abs::<M>)), ty),
            _ => Err("the type is not implemented here".into()),
        }?;
        Ok((class, op))
    }

    pub(super) fn double(&mut self, base: &str) -> Decoded<Op> {
        self.m.take("rn");
        let ty = Ty::F64;
        macro_rules! d2 {
            ($f:expr) => {
                g2!(|a, b| float::canonical64($f(f64_of(a), f64_of(b))))
            };
        }
        match base {
            "add" => self.binary64(d2!(|a: f64, b: f64| a + b), ty),
            "sub" => self.binary64(d2!(|a: f64, b: f64| a - b), ty),
            "mul" => self.binary64(d2!(|a: f64, b: f64| a * b), ty),
            "div" => self.binary64(d2!(|a: f64, b: f64| a / b), ty),
            "min" => self.binary64(g2!(float::min64), ty),
            "max" => self.binary64(g2!(float::max64), ty),
            "fma" | "mad" => {
                let f = g3!(|a, b, c| float::canonical64(f64_of(a).mul_add(f64_of(b), f64_of(c))));
                self.ternary64(f, ty)
            }
            "neg" => self.unary64(g1!(|a| a ^ 1 << 63), ty),
            "abs" => self.unary64(g1!(|a| a & !(1 << 63)), ty),
            _ => Err("the type is not implemented here".into()),
        }
    }

    pub(super) fn half(&mut self, base: &str, ty: Ty) -> Decoded<Op> {
        let mode = self.m.mode();
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
            "add" => self.binary32(h2!(add), ty),
            "sub" => self.binary32(h2!(sub), ty),
            "mul" => self.binary32(h2!(mul), ty),
            "min" => self.binary32(h2!(min), ty),
            "max" => self.binary32(h2!(max), ty),
            "neg" => self.unary32(h1!(neg), ty),
            "abs" => self.unary32(h1!(abs), ty),
            "fma" => {
                let f = match (brain, pair) {
                    (false, false) => by_flush!(mode, M, f3!(small::fma::<M, false>)),
                    (true, false) => by_flush!(mode, M, f3!(small::fma::<M, true>)),
                    (false, true) => fma_pair!(false),
                    (true, true) => fma_pair!(true),
                };
                self.ternary32(f, ty)
            }
            _ => Err("the type is not implemented here".into()),
        }
    }

    /// Functions of one number.
    pub(super) fn function(&mut self, base: &str) -> Decoded<(Class, Op)> {
        let ty = self.m.ty()?;
        let approximate = self.m.take("approx");
        let mode = self.m.mode();
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
            return Ok((Class::Double, self.unary64(f, ty)?));
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
        Ok((class, self.unary32(f, ty)?))
    }

    pub(super) fn bitwise(&mut self, base: &str) -> Decoded<(Class, Op)> {
        if base == "prmt" {
            self.m.ty()?;
            let op = self.ternary32(f3!(permute), Ty::B(32))?;
            return Ok((Class::Integer, op));
        }
        let ty = self.m.ty()?;
        if ty == Ty::Pred {
            let op = self.predicate_logic(base)?;
            return Ok((Class::Predicate, op));
        }
        let is64 = ty.bits() == 64;
        let (u, b32) = (Ty::U(32), Ty::B(32));
        let op = match base {
            "and" if is64 => self.binary64(g2!(|a, b| a & b), ty),
            "or" if is64 => self.binary64(g2!(|a, b| a | b), ty),
            "xor" if is64 => self.binary64(g2!(|a, b| a ^ b), ty),
            "not" if is64 => self.unary64(g1!(|a: u64| !a), ty),
            "and" => self.binary32(f2!(|a, b| a & b), ty),
            "or" => self.binary32(f2!(|a, b| a | b), ty),
            "xor" => self.binary32(f2!(|a, b| a ^ b), ty),
            "not" if ty.bits() == 16 => self.unary32(f1!(|a: u32| !a & 0xffff), ty),
            "not" => self.unary32(f1!(|a: u32| !a), ty),
            "cnot" if is64 => self.unary64(g1!(|a| u64::from(a == 0)), ty),
            "cnot" => self.unary32(f1!(|a| u32::from(a == 0)), ty),
            "shl" | "shr" => self.shift(base, ty),
            "lop3" => {
                let types = [b32, b32, b32, b32];
                self.lanes(|v| lop3(v[0], v[1], v[2], v[3]), b32, &types)
            }
            "bfe" => {
                let f: Any = match ty {
                    Ty::U(_) => |v| extract_u(v[0], v[1], v[2]),
                    Ty::S(32) => |v| extract_s(v[0], v[1], v[2], 32),
                    _ => |v| extract_s(v[0], v[1], v[2], 64),
                };
                self.lanes(f, ty, &[ty, u, u])
            }
            "bfi" => {
                let f: Any = if is64 {
                    |v| insert(v[0], v[1], v[2], v[3], 64)
                } else {
                    |v| insert(v[0], v[1], v[2], v[3], 32)
                };
                self.lanes(f, ty, &[ty, ty, u, u])
            }
            "popc" => self.lanes(|v| u64::from(v[0].count_ones()), u, &[ty]),
            "clz" if is64 => self.lanes(|v| u64::from(v[0].leading_zeros()), u, &[ty]),
            "clz" => self.lanes(|v| u64::from((v[0] as u32).leading_zeros()), u, &[ty]),
            "brev" if is64 => self.unary64(g1!(u64::reverse_bits), ty),
            "brev" => self.unary32(f1!(u32::reverse_bits), ty),
            "bfind" => {
                let f: Any = match (ty, self.m.take("shiftamt")) {
                    (Ty::U(32), false) => |v| highest(v[0], 32, false, false),
                    (Ty::U(32), true) => |v| highest(v[0], 32, false, true),
                    (Ty::S(32), false) => |v| highest(v[0], 32, true, false),
                    (Ty::S(32), true) => |v| highest(v[0], 32, true, true),
                    (Ty::U(_), false) => |v| highest(v[0], 64, false, false),
                    (Ty::U(_), true) => |v| highest(v[0], 64, false, true),
                    (_, false) => |v| highest(v[0], 64, true, false),
                    (_, true) => |v| highest(v[0], 64, true, true),
                };
                self.lanes(f, u, &[ty])
            }
            "shf" => {
                let (left, wrap) = (self.m.take("l"), self.m.take("wrap"));
                self.m.any(&["r", "clamp"]);
                let f: Ternary32 = match (left, wrap) {
                    (true, true) => f3!(|a: u32, b: u32, c: u32| funnel_left(a, b, c & 31)),
                    (true, false) => f3!(|a: u32, b: u32, c: u32| funnel_left(a, b, c.min(32))),
                    (false, true) => f3!(|a: u32, b: u32, c: u32| funnel_right(a, b, c & 31)),
                    (false, false) => f3!(|a: u32, b: u32, c: u32| funnel_right(a, b, c.min(32))),
                };
                self.ternary32(f, ty)
            }
            "sad" => {
                let f = match ty {
                    Ty::U(32) => f3!(|a: u32, b: u32, c: u32| a.abs_diff(b).wrapping_add(c)),
                    Ty::S(32) => f3!(|a, b, c| s32(a).abs_diff(s32(b)).wrapping_add(c)),
                    _ => return Err("the type is not implemented here".into()),
                };
                self.ternary32(f, ty)
            }
            _ => Err("the type is not implemented here".into()),
        }?;
        Ok((Class::Integer, op))
    }

    pub(super) fn shift(&mut self, base: &str, ty: Ty) -> Decoded<Op> {
        self.count(&[3])?;
        let by = self.s(2, Ty::U(32))?;
        if ty.bits() == 64 {
            let f: Shift64 = match (base, ty) {
                ("shl", _) => shift64!(|a: u64, by: u32| a.checked_shl(by).unwrap_or(0)),
                ("shr", Ty::S(_)) => shift64!(shr_s64),
                _ => shift64!(|a: u64, by: u32| a.checked_shr(by).unwrap_or(0)),
            };
            return Ok(Op::Shift64(f, self.d(0, 64)?, self.s(1, ty)?, by));
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
        let d = self.d(0, ty.bits())?;
        Ok(Op::Binary32(f, d, [self.s(1, ty)?, by]))
    }
}
