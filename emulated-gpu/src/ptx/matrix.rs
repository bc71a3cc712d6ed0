//! `ldmatrix`, `stmatrix` and `mma`: matrices spread over the lanes of a warp.

use super::float::F32;
use super::instruction::{Element, L32, LANES, Matrices, Mma};
use super::run::{LaneFault, Machine};
use super::warp::Warp;

/// Bytes of a row of eight 16-bit elements.
const ROW: usize = 16;

impl Warp {
    fn row_failed(
        machine: &Machine<'_>,
        lane: usize,
        conflict: super::shared::Conflict,
    ) -> LaneFault {
        LaneFault::new(lane, conflict.with(|other| machine.thread(other)))
    }

    /// Lane 8·i + r gives the address of row r of matrix i. Lane l receives elements 2·(l mod 4) and the next
    /// of row ⌊l / 4⌋; of the column, if transposed.
    pub fn load_matrices(
        &mut self,
        machine: &mut Machine<'_>,
        matrices: &Matrices,
    ) -> Result<(), LaneFault> {
        let addresses = self.addresses(matrices.address);
        for matrix in 0..usize::from(matrices.count) {
            let of_matrix = matrix * 8..matrix * 8 + 8;
            machine
                .counters
                .banks(&addresses[of_matrix.clone()], ROW as u64);
            let mut rows = [[0u8; ROW]; 8];
            for (row, lane) in rows.iter_mut().zip(of_matrix) {
                let address = addresses[lane];
                let checked = machine.shared.check(address, ROW as u64);
                checked.map_err(|fault| LaneFault::new(lane, fault))?;
                let read = machine.shared.read(self.thread(lane), address, row, false);
                read.map_err(|conflict| Self::row_failed(machine, lane, conflict))?;
            }
            let element = |row: usize, column: usize| {
                u32::from(rows[row][2 * column]) | u32::from(rows[row][2 * column + 1]) << 8
            };
            let mut out = [0; LANES];
            for (lane, out) in out.iter_mut().enumerate() {
                let (major, minor) = (lane / 4, 2 * (lane % 4));
                *out = if matrices.transposed {
                    element(minor, major) | element(minor + 1, major) << 16
                } else {
                    element(major, minor) | element(major, minor + 1) << 16
                };
            }
            self.put32(matrices.registers[matrix], u32::MAX, &out);
        }
        Ok(())
    }

    /// The reverse of `load_matrices`.
    pub fn store_matrices(
        &mut self,
        machine: &mut Machine<'_>,
        matrices: &Matrices,
    ) -> Result<(), LaneFault> {
        let addresses = self.addresses(matrices.address);
        for matrix in 0..usize::from(matrices.count) {
            let rows = &addresses[matrix * 8..matrix * 8 + 8];
            machine.counters.banks(rows, ROW as u64);
            for (row, &address) in rows.iter().enumerate() {
                let checked = machine.shared.check(address, ROW as u64);
                checked.map_err(|fault| LaneFault::new(matrix * 8 + row, fault))?;
            }
            for lane in 0..LANES {
                let bytes = self.r32[matrices.registers[matrix] as usize][lane].to_le_bytes();
                let (major, minor) = (lane / 4, 2 * (lane % 4));
                let parts = if matrices.transposed {
                    [(minor, major, 0..2), (minor + 1, major, 2..4)]
                } else {
                    [(major, minor, 0..4), (major, minor, 0..0)]
                };
                for (row, column, part) in parts {
                    if part.is_empty() {
                        continue;
                    }
                    let address = rows[row] + 2 * column as u64;
                    let thread = self.thread(lane);
                    let written =
                        machine
                            .shared
                            .write(thread, address, &bytes[part], false, &|_| false);
                    written.map_err(|conflict| Self::row_failed(machine, lane, conflict))?;
                }
            }
        }
        Ok(())
    }

    /// A and B. A register holds `PER` elements of rows g and columns from t on, where lane = 4·g + t.
    fn factors<const PER: usize>(
        &self,
        mma: &Mma,
        unpack: impl Fn(u32, usize) -> f32,
    ) -> ([[f32; 16]; 16], [[f32; 8]; 16]) {
        let (mut a, mut b) = ([[0f32; 16]; 16], [[0f32; 8]; 16]);
        let registers = |index: u32| &self.r32[index as usize];
        for half in 0..usize::from(mma.k) / (4 * PER) {
            let (low, high) = (registers(mma.a[2 * half]), registers(mma.a[2 * half + 1]));
            let of_b = registers(mma.b[half]);
            for lane in 0..LANES {
                let (g, t) = (lane / 4, lane % 4);
                for i in 0..PER {
                    let at = (half * 4 + t) * PER + i;
                    a[g][at] = unpack(low[lane], i);
                    a[g + 8][at] = unpack(high[lane], i);
                    b[at][g] = unpack(of_b[lane], i);
                }
            }
        }
        (a, b)
    }

    /// Adds the products in the order of k with one rounding to f32 each; hardware has another order and
    /// other roundings.
    pub fn mma(&mut self, mma: &Mma) {
        let registers = |index: u32| self.r32[index as usize];
        let k = usize::from(mma.k);
        let mut sums = [[0f32; 8]; 16];
        let bf16 = |bits: u32, i: usize| f32::from_bits(bits >> (16 * i) << 16);
        let f16 = |bits: u32, i: usize| half::f16::from_bits((bits >> (16 * i)) as u16).to_f32();
        let tf32 = |bits: u32, _| f32::from_bits(bits & !0x1fff);
        let (a, b) = match mma.element {
            Element::Bf16 => self.factors::<2>(mma, bf16),
            Element::F16 => self.factors::<2>(mma, f16),
            Element::Tf32 => self.factors::<1>(mma, tf32),
        };
        for i in 0..4 {
            let c = registers(mma.c[i]);
            for (lane, c) in c.into_iter().enumerate() {
                let (row, column) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
                sums[row][column] = f32::from_bits(c);
            }
        }
        multiply(&a, &b, k, &mut sums);
        for i in 0..4 {
            let mut out: L32 = [0; LANES];
            for (lane, out) in out.iter_mut().enumerate() {
                let (row, column) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
                let sum = sums[row][column];
                *out = if sum.is_nan() { F32.nan } else { sum.to_bits() };
            }
            self.put32(mma.d[i], u32::MAX, &out);
        }
    }
}

/// Adds the products of `k` columns of A and rows of B, in their order.
#[allow(
    clippy::needless_range_loop,
    reason = "iterators are not inlined into functions for newer processors"
)]
pub fn multiply(a: &[[f32; 16]; 16], b: &[[f32; 8]; 16], k: usize, sums: &mut [[f32; 8]; 16]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for i in 0..16 {
                let mut row = sums[i];
                for at in 0..k.min(16) {
                    let x = a[i][at];
                    for j in 0..8 {
                        row[j] = x.mul_add(b[at][j], row[j]);
                    }
                }
                sums[i] = row;
            }
        },
    );
}
