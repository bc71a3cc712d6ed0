//! Prints the emulator's speed: `cargo test --release -p emulated-gpu --test speed -- --ignored --nocapture`.

mod support;

use emulated_gpu::ptx::Counters;
use support::{Memory, kernel, run};

/// Processor time of this thread; other programs do not count.
fn seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux has it");
    let nanoseconds = text
        .split(' ')
        .next()
        .and_then(|first| first.parse::<f64>().ok());
    nanoseconds.expect("the first field is a number") / 1e9
}

/// Runs a loop of 20,000 turns in 8 warps and prints millions of units a second.
fn measure(what: &str, set_up: &str, body: &str, unit: fn(&Counters) -> u64) {
    let text = kernel(
        1,
        &format!(
            ".shared .align 16 .b8 s[8192];\nld.param.u64 %rd1, [arg0]; mov.u32 %r1, %tid.x; mov.u32 %r2, 0;\n\
             mov.u32 %r3, s; mad.wide.u32 %rd2, %r1, 4, %rd1; mad.lo.u32 %r4, %r1, 16, %r3; mov.f32 %f1, 0f3F800000;\n\
             mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1; {set_up}\n\
             LOOP:\n{body}\nadd.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, 20000; @%p1 bra LOOP;"
        ),
    );
    let mut memory = Memory::default();
    let buffer = memory.put(&[0; 1024]);
    let start = seconds();
    let counters =
        run(&text, &mut memory, (1, 256), &[buffer], 1).unwrap_or_else(|error| panic!("{error}"));
    let rate = unit(&counters) as f64 / (seconds() - start) / 1e6;
    eprintln!("{what}: {rate:.1} M/s");
}

#[test]
#[ignore = "prints numbers"]
fn speed() {
    let all = |counters: &Counters| counters.instructions.total();
    measure("integer and f32 instructions", "", &"fma.rn.f32 %f2, %f2, %f1, %f3; mul.f32 %f3, %f1, %f4;\n\
        mad.lo.s32 %r5, %r1, %r2, %r2; xor.b32 %r6, %r5, %r1; mad.wide.u32 %rd3, %r6, 4, %rd1; add.s32 %r7, %r6, 3;\n\
        shl.b32 %r8, %r7, 2; max.f32 %f4, %f1, %f3;\n".repeat(2), all);
    measure(
        "the same with ftz and fast functions",
        "",
        "fma.rn.ftz.f32 %f2, %f2, %f1, %f3; mul.ftz.f32 %f3, %f1, %f4;\n\
        ex2.approx.ftz.f32 %f5, %f3; rcp.approx.ftz.f32 %f6, %f5; add.ftz.f32 %f4, %f1, %f6; cvt.rn.f32.s32 %f7, %r2;\n",
        all,
    );
    measure(
        "conversions to bf16",
        "",
        "cvt.rn.bf16x2.f32 %r5, %f1, %f2; cvt.rn.bf16.f32 %rs1, %f2; cvt.u64.u32 %rd3, %r2;",
        all,
    );
    measure(
        "global loads and stores of 4 bytes",
        "",
        "ld.global.f32 %f5, [%rd2]; st.global.f32 [%rd2], %f5;",
        all,
    );
    measure(
        "shared loads and stores of 16 bytes",
        "",
        "st.shared.v4.f32 [%r4], {%f1, %f2, %f3, %f4}; ld.shared.v4.f32 {%f5, %f6, %f7, %f8}, [%r4];",
        all,
    );
    measure(
        "shuffles",
        "",
        "shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;",
        all,
    );
    let mma = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r9, %r9, %r9, %r9}, \
        {%r9, %r9}, {%f1, %f2, %f3, %f4};\n";
    measure(
        "mma.m16n8k16",
        "mov.b32 %r9, 0x3f803f80;",
        &mma.repeat(4),
        |counters| counters.mma,
    );
    let registers: Vec<String> = (0..64).map(|i| format!("%d{i}")).collect();
    let wgmma = format!(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{}}}, {{%r9, %r9, %r9, %r9}}, %rd3, %p2, 1, 1, 0;\n",
        registers.join(", ")
    );
    let mut set_up = String::from(
        ".reg .f32 %d<64>; .shared .align 1024 .b8 t[16384]; mov.u32 %r9, t; setp.eq.u32 %p2, %r1, %r1;\n\
         shr.u32 %r5, %r9, 4; cvt.u64.u32 %rd3, %r5; or.b64 %rd3, %rd3, 0x4000004000000000;\n\
         mad.lo.u32 %r5, %r1, 16, %r9; mov.b32 %r9, 0x3f803f80;\n",
    );
    for i in 0..4 {
        set_up += &format!(
            "st.shared.v4.f32 [%r5+{}], {{%f1, %f1, %f1, %f1}};",
            4096 * i
        );
    }
    for register in registers {
        set_up += &format!("mov.f32 {register}, %f1;");
    }
    measure(
        "wgmma.m64n128k16, as mma.m16n8k16",
        &format!("{set_up} fence.proxy.async; bar.sync 0;"),
        &format!(
            "wgmma.fence.sync.aligned; {} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
            wgmma.repeat(2)
        ),
        |counters| counters.mma,
    );
    let load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r4];";
    measure(
        "ldmatrix.x4",
        "st.shared.v4.f32 [%r4], {%f1, %f2, %f3, %f4}; bar.sync 0;",
        &load.repeat(4),
        all,
    );
}
