//! `ldmatrix`, `stmatrix`, `mma` and `cp.async` against their definitions.

mod support;

use half::{bf16, f16};
use support::{Memory, Random, f32s, fault_of, kernel, of_u32, run, u32s};

/// Runs one warp; `%rd1` and `%rd2` are the input and the output, `%r1` the lane, `%r2` its input's
/// shared address: 16 bytes per lane that hold the input.
fn outputs(body: &str, input: &[u8], output: usize) -> Vec<u8> {
    let mut memory = Memory::default();
    let from = memory.put(input);
    let to = memory.put(&vec![0; output]);
    let text = kernel(
        2,
        &format!(
            ".shared .align 16 .b8 s[1024];\nld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1];\n\
             mov.u32 %r1, %tid.x; mov.u32 %r3, s; mad.lo.u32 %r2, %r1, 16, %r3;\n{body}\nret;"
        ),
    );
    run(&text, &mut memory, (1, 32), &[from, to], 1).unwrap_or_else(|error| panic!("{error}"));
    memory.get(to).to_vec()
}

/// 256 elements of 16 bits: four matrices of 8 × 8, row by row.
fn elements() -> Vec<u16> {
    (0..256).map(|i| i as u16 * 7 + 1).collect()
}

fn of_u16(values: &[u16]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

const FILL: &str = "mad.wide.u32 %rd3, %r1, 16, %rd1; ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd3];\n\
    st.shared.v4.u32 [%r2], {%r4, %r5, %r6, %r7}; bar.warp.sync -1;";

#[test]
fn ldmatrix_gives_each_lane_two_elements_of_a_row_or_column() {
    let elements = elements();
    for count in [1, 2, 4] {
        for transposed in [false, true] {
            let list = ["%r10", "%r11", "%r12", "%r13"][..count].join(", ");
            let trans = if transposed { ".trans" } else { "" };
            let mut body = format!(
                "{FILL}\nldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{list}}}, [%r2];\n\
                 mad.wide.u32 %rd4, %r1, 16, %rd2;\n"
            );
            for i in 0..count {
                body += &format!("st.global.u32 [%rd4+{}], %r{};\n", 4 * i, 10 + i);
            }
            let got = u32s(&outputs(&body, &of_u16(&elements), 512));
            for lane in 0..32 {
                for matrix in 0..count {
                    let at = |row: usize, column: usize| {
                        u32::from(elements[64 * matrix + 8 * row + column])
                    };
                    let (g, t) = (lane / 4, lane % 4);
                    let expected = match transposed {
                        false => at(g, 2 * t) | at(g, 2 * t + 1) << 16,
                        true => at(2 * t, g) | at(2 * t + 1, g) << 16,
                    };
                    assert_eq!(
                        got[4 * lane + matrix],
                        expected,
                        "x{count}{trans} lane {lane}"
                    );
                }
            }
        }
    }
}

#[test]
fn stmatrix_is_the_reverse_of_ldmatrix() {
    let elements = elements();
    for trans in ["", ".trans"] {
        let body = format!(
            "{FILL}\nldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2];\n\
             .shared .align 16 .b8 t[512]; mov.u32 %r8, t; mad.lo.u32 %r9, %r1, 16, %r8; bar.warp.sync -1;\n\
             stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r9], {{%r10, %r11, %r12, %r13}};\n\
             bar.warp.sync -1; ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r9];\n\
             mad.wide.u32 %rd4, %r1, 16, %rd2; st.global.v4.u32 [%rd4], {{%r4, %r5, %r6, %r7}};"
        );
        assert_eq!(
            outputs(&body, &of_u16(&elements), 512),
            of_u16(&elements),
            "{trans}"
        );
    }
}

/// The place of an element in a fragment: lane, register, and position in the register.
struct Place(usize, usize, usize);

/// A is 16 × k; a register holds `per` neighbours of a row.
fn of_a(row: usize, column: usize, per: usize) -> Place {
    let group = column / (4 * per);
    Place(
        row % 8 * 4 + column % (4 * per) / per,
        2 * group + row / 8,
        column % per,
    )
}

/// B is k × 8; a register holds `per` neighbours of a column.
fn of_b(row: usize, column: usize, per: usize) -> Place {
    Place(
        column * 4 + row % (4 * per) / per,
        row / (4 * per),
        row % per,
    )
}

#[test]
#[allow(
    clippy::needless_range_loop,
    reason = "rows and columns are the definition's"
)]
fn mma_adds_exact_products_within_the_bound_of_f32_sums() {
    let forms = [
        ("m16n8k16", "bf16", 16, 2),
        ("m16n8k8", "bf16", 8, 2),
        ("m16n8k16", "f16", 16, 2),
        ("m16n8k8", "f16", 8, 2),
        ("m16n8k8", "tf32", 8, 1),
        ("m16n8k4", "tf32", 4, 1),
    ];
    let mut random = Random(1);
    for (shape, ty, k, per) in forms {
        let (of_a_registers, of_b_registers) = (k / (2 * per), k / (4 * per));
        let encode = |x: f32| -> (u32, f64) {
            match ty {
                "bf16" => (
                    bf16::from_f32(x).to_bits().into(),
                    bf16::from_f32(x).to_f64(),
                ),
                "f16" => (f16::from_f32(x).to_bits().into(), f16::from_f32(x).to_f64()),
                // The low 13 bits do not count; they are set here to show it.
                _ => (
                    x.to_bits() | 0x1fff,
                    f32::from_bits(x.to_bits() & !0x1fff).into(),
                ),
            }
        };
        // Per lane: four registers of A, two of B, four of C.
        let mut input = vec![0u32; 32 * 10];
        let (mut a, mut b, mut c) = ([[0.0; 16]; 16], [[0.0; 8]; 16], [[0.0; 8]; 16]);
        for row in 0..16 {
            for column in 0..k {
                let (bits, value) = encode(random.float(3.0));
                let Place(lane, register, part) = of_a(row, column, per);
                input[10 * lane + register] |= bits << (16 * part);
                a[row][column] = value;
            }
            for column in 0..8 {
                let value = random.float(10.0);
                let (lane, register) = (row % 8 * 4 + column / 2, row / 8 * 2 + column % 2);
                input[10 * lane + 6 + register] = value.to_bits();
                c[row][column] = f64::from(value);
            }
        }
        for row in 0..k {
            for column in 0..8 {
                let (bits, value) = encode(random.float(3.0));
                let Place(lane, register, part) = of_b(row, column, per);
                input[10 * lane + 4 + register] |= bits << (16 * part);
                b[row][column] = value;
            }
        }
        let list = |first: usize, count: usize| {
            let names: Vec<String> = (first..first + count).map(|i| format!("%r{i}")).collect();
            names.join(", ")
        };
        let mut body =
            String::from("mad.wide.u32 %rd3, %r1, 40, %rd1; mad.wide.u32 %rd4, %r1, 16, %rd2;\n");
        for i in 0..6 {
            body += &format!("ld.global.u32 %r{}, [%rd3+{}];\n", 10 + i, 4 * i);
        }
        for i in 0..4 {
            body += &format!("ld.global.f32 %f{i}, [%rd3+{}];\n", 24 + 4 * i);
        }
        body += &format!(
            "mma.sync.aligned.{shape}.row.col.f32.{ty}.{ty}.f32 {{%f4, %f5, %f6, %f7}}, {{{}}}, {{{}}}, \
             {{%f0, %f1, %f2, %f3}};\nst.global.v4.f32 [%rd4], {{%f4, %f5, %f6, %f7}};",
            list(10, of_a_registers),
            list(14, of_b_registers),
        );
        let got = f32s(&outputs(&body, &of_u32(&input), 512));
        for row in 0..16 {
            for column in 0..8 {
                let products = (0..k).map(|i| a[row][i] * b[i][column]);
                let (mut sum, mut size) = (c[row][column], c[row][column].abs());
                for product in products {
                    sum += product;
                    size += product.abs();
                }
                let got = f64::from(got[4 * (row % 8 * 4 + column / 2) + row / 8 * 2 + column % 2]);
                // One rounding per product. A GPU adds in another order and cuts aligned summands off.
                let allowed = if support::device::compares() {
                    size * (k + 1) as f64 * 2f64.powi(-22)
                } else {
                    size * k as f64 * 2f64.powi(-24)
                };
                assert!(
                    (got - sum).abs() <= allowed,
                    "{shape} {ty} [{row}][{column}]: {got}, not {sum}"
                );
            }
        }
    }
}

#[test]
fn cp_async_copies_and_fills_with_zeroes() {
    let input: Vec<u32> = (1..=128).collect();
    for (form, bytes, words) in [("ca", 4, 1), ("ca", 8, 2), ("ca", 16, 4), ("cg", 16, 4)] {
        for (source, copied) in [("", bytes), (", 0", 0), (", %r20", bytes / 2)] {
            let body = format!(
                "mov.u32 %r20, {}; mad.wide.u32 %rd3, %r1, 16, %rd1; mad.wide.u32 %rd4, %r1, 16, %rd2;\n\
                 cp.async.{form}.shared.global [%r2], [%rd3], {bytes}{source};\ncp.async.wait_all;\n\
                 ld.shared.v{}.u32 {{{}}}, [%r2]; st.global.v{}.u32 [%rd4], {{{}}};",
                bytes / 2,
                words.max(2),
                ["%r4", "%r5", "%r6", "%r7"][..words.max(2)].join(", "),
                words.max(2),
                ["%r4", "%r5", "%r6", "%r7"][..words.max(2)].join(", "),
            );
            let body = match words {
                1 => body
                    .replace(".v2.u32 {%r4, %r5}", ".u32 %r4")
                    .replace("{%r4, %r5}", "%r4")
                    .replace(".v2", ""),
                _ => body,
            };
            let bytes_in: Vec<u8> = of_u32(&input);
            let got = outputs(&body, &bytes_in, 512);
            for lane in 0..32 {
                let mut expected = bytes_in[16 * lane..16 * lane + bytes].to_vec();
                expected[copied..].fill(0);
                assert_eq!(
                    got[16 * lane..16 * lane + bytes],
                    expected,
                    "{form} {bytes}{source}"
                );
            }
        }
    }
}

#[test]
fn cp_async_is_visible_after_its_wait_and_not_before() {
    let copies = "mad.wide.u32 %rd3, %r1, 16, %rd1; mad.wide.u32 %rd4, %r1, 16, %rd2; add.u32 %r8, %r2, 512;\n\
        cp.async.ca.shared.global [%r2], [%rd3], 4; cp.async.commit_group;\n\
        cp.async.ca.shared.global [%r8], [%rd3+4], 4; cp.async.commit_group;\n";
    let read = |body: &str| format!("{copies}{body}\nst.global.u32 [%rd4], %r9;");
    let input = of_u32(&(1..=128).collect::<Vec<u32>>());
    let run_it = |body: &str| {
        let mut memory = Memory::default();
        let (from, to) = (memory.put(&input), memory.put(&[0; 512]));
        let text = kernel(
            2,
            &format!(
                ".shared .align 16 .b8 s[1024];\nld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1];\n\
                 mov.u32 %r1, %tid.x; mov.u32 %r3, s; mad.lo.u32 %r2, %r1, 16, %r3;\n{}",
                read(body)
            ),
        );
        run(&text, &mut memory, (1, 32), &[from, to], 1).map(|_| memory.get(to).to_vec())
    };
    let first = "cp.async.wait_group 1; ld.shared.u32 %r9, [%r2];";
    assert_eq!(
        u32s(&run_it(first).unwrap_or_else(|error| panic!("{error}")))[4],
        5
    );
    let second = "cp.async.wait_group 0; ld.shared.u32 %r9, [%r8];";
    assert_eq!(
        u32s(&run_it(second).unwrap_or_else(|error| panic!("{error}")))[4],
        6
    );
    for too_early in [
        "ld.shared.u32 %r9, [%r2];",
        "cp.async.wait_group 1; ld.shared.u32 %r9, [%r8];",
        "cp.async.wait_group 2; ld.shared.u32 %r9, [%r2];",
        "mov.u32 %r9, 0; st.shared.u32 [%r2], %r9;",
        "bar.sync 0; ld.shared.u32 %r9, [%r2];",
    ] {
        let (fault, _) = match run_it(too_early) {
            Ok(_) => panic!("{too_early} passed"),
            Err(error) => fault_of(Err(error)),
        };
        assert!(
            matches!(fault, emulated_gpu::ptx::Fault::PendingCopy { .. }),
            "{too_early}: {fault}"
        );
    }
    // A wait covers only committed groups.
    let uncommitted = "cp.async.ca.shared.global [%r2+4], [%rd3], 4; cp.async.wait_group 0; ld.shared.u32 %r9, [%r2+4];";
    assert!(run_it(uncommitted).is_err());
    // Another thread needs a barrier after the wait.
    let neighbour = "cp.async.wait_all; xor.b32 %r10, %r2, 16; ld.shared.u32 %r9, [%r10];";
    let (race, _) = fault_of(run_it(neighbour).map(|_| panic!("it passed")));
    assert!(
        matches!(race, emulated_gpu::ptx::Fault::Race { .. }),
        "{race}"
    );
    let ordered =
        "cp.async.wait_all; bar.sync 0; xor.b32 %r10, %r2, 16; ld.shared.u32 %r9, [%r10];";
    assert_eq!(
        u32s(&run_it(ordered).unwrap_or_else(|error| panic!("{error}")))[4],
        1
    );
}
