//! State spaces, widths, vectors, atomics and variables.

mod support;

use emulated_gpu::launch::Launch;
use emulated_gpu::ptx::{Limits, Module};
use support::{Memory, kernel, load, of_u32, of_u64, run, u32s, u64s, x};

/// Runs one block of 32 threads; parameter 0 is the input, 1 the output with 32 bytes per thread at
/// `%rd2`, `%r1` the thread.
fn outputs(body: &str, input: &[u8]) -> Vec<u8> {
    let mut memory = Memory::default();
    let from = memory.put(input);
    let to = memory.put(&[0; 32 * 32]);
    let text = kernel(
        2,
        &format!(
            "ld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1];\n\
             mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, 32, %rd2;\n{body}\nret;"
        ),
    );
    run(&text, &mut memory, (1, 32), &[from, to], 1).unwrap_or_else(|error| panic!("{error}"));
    memory.get(to).to_vec()
}

const BYTES: [u8; 64] = {
    let mut bytes = [0; 64];
    let mut i = 0;
    while i < 64 {
        bytes[i] = (i as u8).wrapping_mul(37).wrapping_add(0x81);
        i += 1;
    }
    bytes
};

#[test]
fn loads_extend_by_their_type() {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| BYTES[at + i]));
    let cases: [(&str, &str, u64); 11] = [
        ("ld.global.u8 %r3, [%rd1];", "cvt.u64.u32 %rd3, %r3;", 0x81),
        (
            "ld.global.s8 %r3, [%rd1];",
            "cvt.u64.u32 %rd3, %r3;",
            0xffff_ff81,
        ),
        (
            "ld.global.s8 %rs3, [%rd1];",
            "cvt.u64.u16 %rd3, %rs3;",
            0xff81,
        ),
        ("ld.global.s8 %rd3, [%rd1];", "", 0xffff_ffff_ffff_ff81),
        (
            "ld.global.b16 %rs3, [%rd1+2];",
            "cvt.u64.u16 %rd3, %rs3;",
            word(2) & 0xffff,
        ),
        (
            "ld.global.u16 %r3, [%rd1];",
            "cvt.u64.u32 %rd3, %r3;",
            word(0) & 0xffff,
        ),
        (
            "ld.global.s16 %r3, [%rd1];",
            "cvt.u64.u32 %rd3, %r3;",
            0xffff_a681,
        ),
        (
            "ld.global.nc.b32 %r3, [%rd1+4];",
            "cvt.u64.u32 %rd3, %r3;",
            word(4) & 0xffff_ffff,
        ),
        (
            "ld.global.s32 %rd3, [%rd1];",
            "",
            word(0) as u32 as i32 as u64,
        ),
        (
            "ld.volatile.global.f32 %f3, [%rd1];",
            "mov.b32 %r3, %f3; cvt.u64.u32 %rd3, %r3;",
            word(0) & 0xffff_ffff,
        ),
        ("ld.f64 %fd3, [%rd1+8];", "mov.b64 %rd3, %fd3;", word(8)),
    ];
    for (load, convert, expected) in cases {
        let got = outputs(
            &format!("{load} {convert} st.global.u64 [%rd2], %rd3;"),
            &BYTES,
        );
        assert_eq!(u64s(&got)[0], expected, "{load}");
    }
    // Hints and scopes change nothing.
    for load in [
        "ld.global.ca.u64",
        "ld.global.cg.u64",
        "ld.global.cv.u64",
        "ld.global.nc.L1::no_allocate.L2::128B.u64",
        "ld.relaxed.gpu.global.u64",
        "ld.acquire.sys.global.u64",
        "ld.weak.global.u64",
        "ldu.global.u64",
    ] {
        let got = outputs(
            &format!("{load} %rd3, [%rd1]; st.global.u64 [%rd2], %rd3;"),
            &BYTES,
        );
        assert_eq!(u64s(&got)[0], word(0), "{load}");
    }
    let cached = "mov.u64 %rd9, 0; ld.global.L2::cache_hint.u64 %rd3, [%rd1], %rd9; st.global.wt.u64 [%rd2], %rd3;";
    assert_eq!(u64s(&outputs(cached, &BYTES))[0], word(0));
}

#[test]
fn vectors_move_through_every_space() {
    for space in ["global", "shared", "local"] {
        let set_up = match space {
            "global" => "mov.u64 %rd5, %rd2;",
            "shared" => {
                ".shared .align 16 .b8 s[1024]; mov.u64 %rd6, s; mad.wide.u32 %rd5, %r1, 32, %rd6;"
            }
            _ => ".local .align 16 .b8 l[32]; mov.u64 %rd5, l;",
        };
        let body = format!(
            "{set_up}\nld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd1];\n\
             st.{space}.v4.b32 [%rd5], {{%r7, %r6, %r5, %r4}};\n\
             ld.{space}.v2.u64 {{%rd7, %rd8}}, [%rd5];\nst.{space}.v2.u64 [%rd5+16], {{%rd8, %rd7}};\n\
             ld.{space}.v2.b32 {{_, %r8}}, [%rd5+16];\n\
             ld.{space}.v4.u16 {{%rs1, %rs2, %rs3, %rs4}}, [%rd5];\n\
             ld.{space}.v4.u8 {{%rs5, %rs6, %rs7, %rs8}}, [%rd5];\n\
             cvt.u32.u16 %r9, %rs2; cvt.u32.u16 %r10, %rs6;\n\
             st.global.v4.u32 [%rd2], {{%r8, %r9, %r10, 77}}; st.global.u64 [%rd2+16], %rd7;\n\
             st.global.u64 [%rd2+24], %rd8;"
        );
        let got = outputs(&body, &BYTES);
        let input = u32s(&BYTES);
        let expected = [
            input[0],
            input[3] >> 16,
            input[3] >> 8 & 0xff,
            77,
            input[3],
            input[2],
            input[1],
            input[0],
        ];
        for thread in u32s(&got).chunks_exact(8) {
            assert_eq!(thread, expected, "{space}");
        }
    }
}

#[test]
fn generic_addresses_reach_every_space() {
    let body = ".shared .align 8 .b8 s[256]; .local .align 8 .b8 l[16];\n\
        mov.u64 %rd3, s; cvta.shared.u64 %rd3, %rd3; mul.wide.u32 %rd4, %r1, 8; add.s64 %rd3, %rd3, %rd4;\n\
        mov.u64 %rd5, l; cvta.local.u64 %rd5, %rd5; cvta.global.u64 %rd6, %rd1;\n\
        st.u64 [%rd3], %rd4; mov.u64 %rd7, 5; st.u64 [%rd5+8], %rd7;\n\
        cvta.to.shared.u64 %rd8, %rd3; cvt.u32.u64 %r5, %rd8; ld.shared.u64 %rd9, [%r5];\n\
        cvta.to.local.u64 %rd10, %rd5; ld.local.u64 %rd11, [%rd10+8]; ld.u64 %rd12, [%rd6];\n\
        setp.lt.u32 %p1, %r1, 16; selp.b64 %rd13, %rd3, %rd6, %p1; ld.u64 %rd14, [%rd13];\n\
        st.global.v2.u64 [%rd2], {%rd9, %rd11}; st.v2.u64 [%rd2+16], {%rd12, %rd14};";
    let got = u64s(&outputs(body, &BYTES));
    let first = u64s(&BYTES)[0];
    for (i, thread) in got.chunks_exact(4).enumerate() {
        let at = 8 * i as u64;
        assert_eq!(thread, [at, 5, first, if i < 16 { at } else { first }]);
    }
}

#[test]
fn parameters_are_laid_out_by_alignment() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 to, .param .u32 a,\n\
        .param .u8 b, .param .align 8 .b8 big[24], .param .f32 c) {\n.reg .b32 %r<9>; .reg .b64 %rd<9>;\n\
        ld.param.u64 %rd1, [to]; ld.param.u32 %r1, [a]; ld.param.u8 %r2, [b];\n\
        ld.param.v2.u32 {%r3, %r4}, [big+8]; ld.param.b32 %r5, [c];\n\
        mov.b64 %rd2, big; ld.param.u32 %r6, [%rd2+20]; cvta.param.u64 %rd3, %rd2; ld.u32 %r7, [%rd3];\n\
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.v4.u32 [%rd1+16], {%r5, %r6, %r7, 0};\nret;\n}";
    let mut memory = Memory::default();
    let to = memory.put(&[0; 32]);
    let module = load(text, &mut memory);
    let kernel = module.kernel("k").expect("it is there");
    let offsets: Vec<(u64, u64)> = kernel
        .parameters
        .iter()
        .map(|p| (p.offset, p.bytes))
        .collect();
    assert_eq!(offsets, [(0, 8), (8, 4), (12, 1), (16, 24), (40, 4)]);
    let mut parameters = to.to_le_bytes().to_vec();
    parameters.extend(7u32.to_le_bytes());
    parameters.extend([9, 0, 0, 0]);
    parameters.extend(of_u32(&[20, 21, 22, 23, 24, 25]));
    parameters.extend(30u32.to_le_bytes());
    let launch = Launch {
        grid: x(1),
        block: x(1),
        dynamic_shared: 0,
        parameters: &parameters,
        seed: 0,
    };
    module
        .run("k", &launch, &Limits::default(), &mut memory)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(u32s(memory.get(to)), [7, 9, 22, 23, 30, 25, 20, 0]);
}

#[test]
fn variables_are_initialised_and_placed() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n\
        .const .align 4 .b8 table[8] = {1, 0, 0, 0, 2, 0, 0, 0};\n.global .align 4 .u32 counter = 7;\n\
        .global .align 8 .f64 halves[2] = {0d3FE0000000000000, 0dBFE0000000000000};\n\
        .visible .global .align 4 .b32 zeroes[4];\n.global .align 1 .u8 unused;\n\
        .visible .entry k(.param .u64 to) {\n.reg .b32 %r<9>; .reg .b64 %rd<9>;\nld.param.u64 %rd1, [to];\n\
        ld.const.u32 %r1, [table+4]; mov.u64 %rd2, table; ld.const.u32 %r2, [%rd2]; ld.global.u32 %r3, [counter];\n\
        ld.global.u64 %rd3, [halves+8]; mov.u64 %rd4, zeroes; ld.global.u32 %r4, [%rd4+12];\n\
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.u64 [%rd1+16], %rd3; st.global.u32 [counter], 8;\n}";
    let mut memory = Memory::default();
    let mut unplaced = Module::load(text).unwrap_or_else(|error| panic!("{error}"));
    let variables: Vec<(&str, u64, usize)> = unplaced
        .variables()
        .iter()
        .map(|v| (v.name.as_str(), v.align, v.initial.len()))
        .collect();
    let expected = [
        ("table", 4, 8),
        ("counter", 4, 4),
        ("halves", 8, 16),
        ("zeroes", 4, 16),
        ("unused", 1, 1),
    ];
    assert_eq!(variables, expected);
    let to = memory.put(&[0; 24]);
    let launch = Launch {
        grid: x(1),
        block: x(1),
        dynamic_shared: 0,
        parameters: &to.to_le_bytes(),
        seed: 0,
    };
    let refused = unplaced.run("k", &launch, &Limits::default(), &mut memory);
    let refused = refused.expect_err("variables have no address").to_string();
    assert_eq!(
        refused,
        "variable `table` has no address; place it before the launch"
    );
    let mut counter = 0;
    for i in 0..4 {
        let initial = unplaced.variables()[i].initial.clone();
        let address = memory.put(&initial);
        unplaced.place(i, address);
        if i == 1 {
            counter = address;
        }
    }
    // `unused` is not placed, and no kernel uses it.
    unplaced
        .run("k", &launch, &Limits::default(), &mut memory)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(u32s(memory.get(to)), [2, 1, 7, 0, 0, 0xbfe0_0000]);
    assert_eq!(u32s(memory.get(counter)), [8]);
}

#[test]
fn dynamic_shared_memory_follows_the_static_one() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n\
        .shared .align 4 .b8 other[100];\n.shared .align 4 .b8 used[20];\n\
        .visible .entry k(.param .u64 to) {\n.reg .b32 %r<9>; .reg .b64 %rd<9>;\nld.param.u64 %rd1, [to];\n\
        mov.u32 %r1, used; mov.u32 %r2, dynamic; mov.u32 %r3, %dynamic_smem_size; mov.u32 %r4, %total_smem_size;\n\
        mov.u32 %r5, 3; st.shared.u32 [dynamic+60], %r5; ld.shared.u32 %r6, [%r2+60];\n\
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.u32 [%rd1+16], %r6;\n}";
    let mut memory = Memory::default();
    let to = memory.put(&[0; 20]);
    let module = load(text, &mut memory);
    assert_eq!(module.kernels()[0].static_shared, 20);
    let launch = Launch {
        grid: x(1),
        block: x(1),
        dynamic_shared: 64,
        parameters: &to.to_le_bytes(),
        seed: 0,
    };
    module
        .run("k", &launch, &Limits::default(), &mut memory)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(u32s(memory.get(to)), [0, 32, 64, 96, 3]);
}

#[test]
fn atomics_apply_each_lane_once() {
    type Case = (&'static str, u64, fn(u64, u64) -> u64);
    let cases: [Case; 25] = [
        ("add.u32", 5, |x, i| (x + i) & 0xffff_ffff),
        ("add.s32", 5, |x, i| (x + i) & 0xffff_ffff),
        ("add.u64", u64::MAX, |x, i| x.wrapping_add(i)),
        ("min.u32", 0x8000_0000, |x, i| x.min(i)),
        ("max.u32", 5, |x, i| x.max(i)),
        ("min.s32", 0x8000_0000, |x, i| {
            (x as i32).min(i as i32) as u32 as u64
        }),
        ("max.s32", 0xffff_fff0, |x, i| {
            (x as i32).max(i as i32) as u32 as u64
        }),
        ("min.u64", 1 << 63, |x, i| x.min(i)),
        ("max.s64", 1 << 63, |x, i| (x as i64).max(i as i64) as u64),
        ("and.b32", 0xff, |x, i| x & i),
        ("or.b32", 0x100, |x, i| x | i),
        ("xor.b32", 0x100, |x, i| x ^ i),
        ("max.u64", 5, |x, i| x.max(i)),
        ("min.s64", u64::MAX, |x, i| (x as i64).min(i as i64) as u64),
        ("and.b64", 0xff, |x, i| x & i),
        ("or.b64", 1 << 40, |x, i| x | i),
        ("xor.b64", 1 << 40, |x, i| x ^ i),
        ("add.noftz.f16x2", 0x3c00_4000, |x, i| {
            let add = |x: u64, y: u64| {
                (half::f16::from_bits(x as u16) + half::f16::from_bits(y as u16)).to_bits()
            };
            u64::from(add(x, i)) | u64::from(add(x >> 16, i >> 16)) << 16
        }),
        ("exch.b32", 3, |_, i| i),
        ("exch.b64", 3, |_, i| i),
        ("inc.u32", 2, |x, i| if x >= i { 0 } else { x + 1 }),
        ("dec.u32", 2, |x, i| if x == 0 || x > i { i } else { x - 1 }),
        ("add.f32", 0x3f80_0000, |x, i| {
            (f32::from_bits(x as u32) + f32::from_bits(i as u32))
                .to_bits()
                .into()
        }),
        ("add.f64", 0x3ff0_0000_0000_0000, |x, i| {
            (f64::from_bits(x) + f64::from_bits(i)).to_bits()
        }),
        ("add.noftz.bf16x2", 0x3f80_4000, |x, i| {
            let add = |x: u64, y: u64| {
                (half::bf16::from_bits(x as u16) + half::bf16::from_bits(y as u16)).to_bits()
            };
            u64::from(add(x, i)) | u64::from(add(x >> 16, i >> 16)) << 16
        }),
    ];
    for (form, initial, meaning) in cases {
        let wide = form.ends_with("64");
        let (ty, old, operand) = if wide {
            ("u64", "%rd5", "%rd6")
        } else {
            ("u32", "%r5", "%r6")
        };
        for (space, address) in [
            ("shared", "[s]"),
            ("global", "[%rd1]"),
            ("generic", "[%rd1]"),
        ] {
            let dotted = if space == "generic" {
                String::new()
            } else {
                format!(".{space}")
            };
            // One lane initialises shared memory and publishes the result.
            let store = if space == "shared" {
                "st.shared"
            } else {
                "st.global"
            };
            let load = if space == "shared" {
                "ld.shared"
            } else {
                "ld.global"
            };
            let body = format!(
                ".shared .align 8 .b8 s[8]; setp.eq.u32 %p1, %r1, 0; mov.u64 %rd7, {initial};\n\
                 cvt.u32.u64 %r7, %rd7; @%p1 {store}.{ty} {address}, {initial_register}; bar.warp.sync -1;\n\
                 cvt.u64.u32 %rd6, %r1; mov.u32 %r6, %r1;\n\
                 atom{dotted}.{form} {old}, {address}, {operand}; st.global.{ty} [%rd2], {old};\n\
                 bar.warp.sync -1; red{dotted}.{reduction} {address}, {operand};\n\
                 bar.warp.sync -1; {load}.{ty} {old}, {address}; st.global.{ty} [%rd2+8], {old};",
                initial_register = if wide { "%rd7" } else { "%r7" },
                reduction = if form.starts_with("exch") {
                    if wide { "add.u64" } else { "add.u32" }
                } else {
                    form
                },
            );
            let got = u64s(&outputs(&body, &[0; 16]));
            let mut value = initial;
            for i in 0..32 {
                assert_eq!(got[4 * i], value, "{space} {form} lane {i}");
                value = meaning(value, i as u64);
            }
            for i in 0..32 {
                value = match form.starts_with("exch") {
                    true => value + i,
                    false => meaning(value, i),
                };
            }
            assert_eq!(got[1], value, "{space} {form}");
        }
    }
    let body = "setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd1], 0; add.u32 %r6, %r1, 1;\n\
        atom.global.cas.b32 %r5, [%rd1], %r1, %r6; st.global.u32 [%rd2], %r5; bar.warp.sync -1;\n\
        atom.acq_rel.gpu.global.cas.b32 %r7, [%rd1], 32, 99; st.global.u32 [%rd2+4], %r7;";
    let got = u32s(&outputs(body, &of_u64(&[0])));
    let wide = "cvt.u64.u32 %rd6, %r1; atom.global.cas.b64 %rd5, [%rd1], 0, 7; st.global.u64 [%rd2], %rd5;";
    let old = u64s(&outputs(wide, &of_u64(&[0])));
    assert_eq!((old[0], old[4]), (0, 7));
    for i in 0..32 {
        assert_eq!(got[8 * i], i as u32);
        assert_eq!(got[8 * i + 1], if i == 0 { 32 } else { 99 });
    }
}

#[test]
fn vectors_are_added_at_once() {
    for (elements, step) in [(2, 8), (4, 16)] {
        let list = |first: usize| {
            let names: Vec<String> = (first..first + elements)
                .map(|i| format!("%f{i}"))
                .collect();
            names.join(", ")
        };
        let mut body = format!(
            "cvt.rn.f32.u32 %f0, %r1; and.b32 %r4, %r1, 3; mad.wide.u32 %rd3, %r4, {step}, %rd1;\n"
        );
        for i in 1..elements {
            body += &format!("add.f32 %f{i}, %f{}, 0f3f800000;\n", i - 1);
        }
        for form in ["", ".relaxed.gpu"] {
            body += &format!(
                "red{form}.global.add.v{elements}.f32 [%rd3], {{{}}};\n",
                list(0)
            );
        }
        // The last lane to add has added to what the others have.
        body += &format!(
            "bar.warp.sync -1; setp.eq.u32 %p1, %r1, 31;\n\
             @%p1 atom.global.add.v{elements}.f32 {{{}}}, [%rd1], {{{}}}; @%p1 st.global.v{elements}.f32 [%rd2], {{{}}};",
            list(8),
            list(0),
            list(8)
        );
        let mut memory = Memory::default();
        let (sums, old) = (memory.put(&[0; 64]), memory.put(&[0; 16]));
        let text = kernel(
            2,
            &format!(
                "ld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1]; mov.u32 %r1, %tid.x;\n{body}\nret;"
            ),
        );
        // Vectors came with this version.
        let text = text.replace(".version 8.0", ".version 8.1");
        run(&text, &mut memory, (1, 32), &[sums, old], 1).unwrap_or_else(|error| panic!("{error}"));
        // Lanes 0, 4, …, 28 add to the first vector twice.
        let sum = |vector: usize, i: usize| {
            (0..8).map(|n| 2 * (vector + 4 * n + i)).sum::<usize>() as f32
        };
        let got = support::f32s(memory.get(sums));
        for vector in 0..4 {
            for i in 0..elements {
                let last = if vector == 0 { 31 + i } else { 0 };
                assert_eq!(got[vector * elements + i], sum(vector, i) + last as f32);
            }
        }
        for i in 0..elements {
            assert_eq!(support::f32s(memory.get(old))[i], sum(0, i));
        }
    }
    let misaligned = kernel(
        1,
        "ld.param.u64 %rd1, [arg0]; mov.f32 %f0, 0f00000000; red.global.add.v4.f32 [%rd1+8], {%f0, %f0, %f0, %f0};",
    );
    let mut memory = Memory::default();
    let buffer = memory.put(&[0; 64]);
    let (fault, _) = support::fault_of(run(&misaligned, &mut memory, (1, 32), &[buffer], 1));
    assert!(
        matches!(
            fault,
            emulated_gpu::ptx::Fault::Misaligned { bytes: 16, .. }
        ),
        "{fault}"
    );
}

#[test]
fn blocks_wait_for_those_with_lower_tickets() {
    const BLOCKS: usize = 12;
    // Block i adds 3^−i, and notes its number in its ticket's place.
    let body = "ld.param.u64 %rd1, [arg0]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra DONE;\n\
         atom.global.add.u32 %r2, [%rd1], 1; mov.u32 %r4, %ctaid.x; mad.wide.u32 %rd2, %r2, 4, %rd1;\n\
         st.global.u32 [%rd2+12], %r4; mov.f32 %f1, 0f3f800000;\n\
         POWER: setp.eq.u32 %p2, %r4, 0; @%p2 bra WAIT; mul.rn.f32 %f1, %f1, 0f3eaaaaab; sub.u32 %r4, %r4, 1; bra POWER;\n\
         WAIT: ld.acquire.gpu.global.u32 %r5, [%rd1+4]; setp.ne.u32 %p3, %r5, %r2; @%p3 bra WAIT;\n\
         ld.global.cg.f32 %f2, [%rd1+8]; add.rn.f32 %f2, %f2, %f1; st.global.cg.f32 [%rd1+8], %f2;\n\
         fence.acq_rel.gpu; red.release.gpu.global.add.u32 [%rd1+4], 1;\nDONE: ret;";
    let mut sums = Vec::new();
    for seed in 0..16 {
        let mut memory = Memory::default();
        let buffer = memory.put(&[0; 12 + 4 * BLOCKS]);
        let block = (BLOCKS as u32, 64);
        run(&kernel(1, body), &mut memory, block, &[buffer], seed)
            .unwrap_or_else(|error| panic!("{error}"));
        let words = u32s(memory.get(buffer));
        assert_eq!(words[..2], [BLOCKS as u32; 2]);
        let power = |&block: &u32| (0..block).fold(1f32, |x, _| x * f32::from_bits(0x3eaa_aaab));
        let sum: f32 = words[3..].iter().map(power).fold(0.0, |sum, x| sum + x);
        assert_eq!(words[2], sum.to_bits(), "in the order {:?}", &words[3..]);
        sums.push(words[2]);
    }
    sums.sort_unstable();
    sums.dedup();
    assert!(support::device::compares() || sums.len() > 1);
}
