//! Types, modifiers and literals.

use super::*;

/// A type of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ty {
    /// Unsigned, signed and untyped integers, with their bits.
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
    pub fn parse(name: &str) -> Option<Self> {
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

    pub fn bits(self) -> u32 {
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
pub struct Modifiers<'a>(pub Vec<&'a str>);

impl<'a> Modifiers<'a> {
    pub fn take(&mut self, name: &str) -> bool {
        let found = self.0.iter().position(|&modifier| modifier == name);
        found.map(|at| self.0.remove(at)).is_some()
    }

    pub fn any(&mut self, names: &[&str]) -> bool {
        names.iter().fold(false, |any, name| self.take(name) | any)
    }

    pub fn choose<T: Copy>(&mut self, of: &[(&str, T)]) -> Option<T> {
        of.iter()
            .find_map(|&(name, value)| self.take(name).then_some(value))
    }

    pub fn first(&mut self) -> Decoded<&'a str> {
        if self.0.is_empty() {
            return Err("a modifier is missing".into());
        }
        Ok(self.0.remove(0))
    }

    /// Takes the type, which is last.
    pub fn ty(&mut self) -> Decoded<Ty> {
        let name = self.0.pop().ok_or(Problem::from("the type is missing"))?;
        Ty::parse(name).ok_or_else(|| format!("the type `.{name}` is not implemented").into())
    }

    pub fn mode(&mut self) -> Mode {
        let round = self.choose(&ROUNDINGS).unwrap_or(Round::Nearest);
        Mode {
            round,
            ftz: self.take("ftz"),
            sat: self.take("sat"),
        }
    }

    pub fn end(&self) -> Decoded<()> {
        match self.0.first() {
            None => Ok(()),
            Some(modifier) => Err(format!("`.{modifier}` is not implemented here").into()),
        }
    }
}

pub const ROUNDINGS: [(&str, Round); 4] = [
    ("rn", Round::Nearest),
    ("rz", Round::Zero),
    ("rm", Round::Down),
    ("rp", Round::Up),
];

pub const TO_INTEGER: [(&str, Round); 4] = [
    ("rni", Round::Nearest),
    ("rzi", Round::Zero),
    ("rmi", Round::Down),
    ("rpi", Round::Up),
];

pub const SPACES: [(&str, Space); 7] = [
    ("global", Space::Global),
    ("shared", Space::Shared),
    ("shared::cta", Space::Shared),
    ("local", Space::Local),
    ("param", Space::Param),
    // The caller places constants in global memory.
    ("const", Space::Global),
    ("param::entry", Space::Param),
];

pub const STRENGTHS: [&str; 4] = ["volatile", "relaxed", "acquire", "release"];

/// Hints and scopes, which change nothing here.
pub const HINTS: [&str; 31] = [
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

pub fn convertible(ty: Ty) -> Option<Type> {
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
pub fn literal(number: Number, negative: bool, ty: Ty) -> Decoded<u64> {
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

pub fn special(name: &str) -> Option<Special> {
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
