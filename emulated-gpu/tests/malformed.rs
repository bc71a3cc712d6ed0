//! Whatever the text is, a load and a run end with a result, never with a panic.

mod support;

use emulated_gpu::launch::Launch;
use emulated_gpu::ptx::{Limits, Module};
use proptest::prelude::*;
use support::{Memory, kernel, x};

/// A kernel with most kinds of instructions.
const BODY: &str = "\
.shared .align 16 .b8 s[1024]; .local .align 8 .b8 l[16];
ld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1+0]; mov.u32 %r1, %tid.x; mov.u32 %r3, s;
mad.lo.u32 %r2, %r1, 16, %r3; mad.wide.u32 %rd3, %r1, 4, %rd1; mov.u32 %r4, 7;
st.shared.v4.u32 [%r2], {%r1, %r4, %r1, 3}; setp.eq.u32 %p5, %r1, 0;
@%p5 st.shared.u32 [s+1020], 0; bar.sync 0; bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r5, %r6, %r7, %r8}, [%r2];
mov.f32 %f1, 0f3F800000; fma.rn.ftz.f32 %f2, %f1, %f1, %f1; ex2.approx.f32 %f3, %f2; div.rz.f32 %f4, %f2, %f3;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f5, %f6, %f7, %f8}, {%r5, %r6, %r7, %r8}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
shfl.sync.bfly.b32 %r9|%p1, %r1, 4, 31, 0xffffffff; vote.sync.ballot.b32 %r10, %p1, -1;
setp.lt.and.s32 %p2|%p3, %r1, 12, %p1; @%p2 bra A; bfe.s32 %r11, %r10, %r4, %r1; bfi.b64 %rd4, %rd1, %rd2, %r4, %r1;
A: st.local.u64 [l+8], %rd1; ld.local.u32 %r12, [l+12]; cvt.rni.sat.s8.f32 %r13, %f4; cvt.rn.bf16x2.f32 %r14, %f1, %f2;
ld.global.nc.u32 %r15, [%rd3]; atom.global.add.f32 %f9, [%rd3+4], %f1; shl.b32 %r16, %r15, %r12; rem.s32 %r17, %r16, %r4;
cp.async.ca.shared.global [%r2], [%rd1], 16, 8; cp.async.commit_group; cp.async.wait_group 0;
mov.b64 {%r18, %r19}, %rd1; prmt.b32 %r20, %r18, %r19, 0x5410; lop3.b32 %r21, %r18, %r19, %r20, 0xe8;
mul.hi.s64 %rd5, %rd1, %rd2; shr.s64 %rd6, %rd5, 60; sub.s16 %rs1, 3, 5; abs.s32 %r22, %r21; div.s64 %rd7, %rd5, -1;
LOOP: add.s32 %r4, %r4, -1; setp.ne.s32 %p4, %r4, 0; @%p4 bra LOOP; red.shared.max.s32 [s+1020], %r4;
brx.idx %r4, T; T: .branchtargets END, A; END: st.global.u32 [%rd3], %r22;";

fn run(text: &str, threads: u32) -> Result<(), String> {
    let mut module = Module::load(text).map_err(|error| error.to_string())?;
    let mut memory = Memory::default();
    let buffer = memory.put(&[1; 512]);
    for variable in 0..module.variables().len() {
        module.place(variable, buffer);
    }
    let parameters: Vec<u8> = [buffer, buffer]
        .iter()
        .flat_map(|p| p.to_le_bytes())
        .collect();
    let limits = Limits {
        instructions: 2000,
        ..Limits::default()
    };
    let launch = Launch {
        grid: x(2),
        block: x(threads),
        dynamic_shared: 0,
        parameters: &parameters,
        seed: 1,
    };
    let result = module.run("k", &launch, &limits, &mut memory);
    result.map_err(|error| error.to_string())?;
    Ok(())
}

const REPLACEMENTS: [&str; 40] = [
    "0",
    "-1",
    "64",
    "255",
    "0xffffffff",
    "0x7fffffffffffffff",
    "18446744073709551615",
    "%r1",
    "%rd1",
    "%p1",
    "%rs1",
    "%f1",
    "_",
    "{",
    "}",
    "[",
    "]",
    ",",
    ";",
    ":",
    "|",
    "!",
    ".s8",
    ".u16",
    ".s32",
    ".u64",
    ".f32",
    ".f16x2",
    ".bf16",
    ".v2",
    ".sat",
    ".ftz",
    ".global",
    ".shared",
    ".local",
    "A",
    "T",
    "s",
    "-",
    "@",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn changed_tokens_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), 0usize..40), 1..4)) {
        let text = kernel(2, BODY);
        // Keeps the separators, so that the edits change single operands and modifiers.
        let mut parts: Vec<&str> = text.split_inclusive([' ', ',', ';', '[', ']', '.', '{', '}', '\n']).collect();
        for (at, replacement) in edits {
            let at = at.index(parts.len());
            parts[at] = REPLACEMENTS[replacement];
        }
        let _ = run(&parts.concat(), 32);
        let _ = run(&parts.concat(), 40);
    }

    #[test]
    fn cut_text_never_panics(from in any::<prop::sample::Index>(), len in 0usize..60) {
        let mut text = kernel(2, BODY);
        let from = from.index(text.len());
        let to = (from + len).min(text.len());
        text.replace_range(from..to, "");
        let _ = run(&text, 32);
    }
}

#[test]
fn the_unchanged_text_runs() {
    run(&kernel(2, BODY), 32).unwrap_or_else(|error| panic!("{error}"));
}
