//! Counters of instructions, bank conflicts and memory traffic, by hand.

mod support;

use emulated_gpu::ptx::{Class, Counters};
use support::{Memory, kernel, run};

/// Runs one warp; `%r1` is the thread, `%rd1` a buffer of 16 KiB, `%r2` the shared address of 16 KiB.
fn counted(body: &str) -> Counters {
    let mut memory = Memory::default();
    let buffer = memory.put(&[0; 16384]);
    let text = kernel(
        1,
        &format!(
            ".shared .align 16 .b8 s[16384];\nld.param.u64 %rd1, [arg0]; mov.u32 %r1, %tid.x; mov.u32 %r2, s;\n{body}\nret;"
        ),
    );
    run(&text, &mut memory, (1, 32), &[buffer], 1).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn instructions_are_counted_by_class() {
    let counters = counted(
        "mov.f32 %f1, 0f3F800000; add.f32 %f2, %f1, %f1; ex2.approx.f32 %f3, %f2; setp.lt.f32 %p1, %f1, %f2;\n\
         @!%p1 add.u32 %r3, %r1, 1; cvt.rn.f32.u32 %f4, %r1; bar.sync 0; st.shared.u32 [s], 1; mov.u32 %r4, 3;\n\
         LOOP: sub.u32 %r4, %r4, 1; setp.ne.u32 %p2, %r4, 0; @%p2 bra LOOP;",
    );
    let of = |class| counters.instructions[class];
    assert_eq!(of(Class::Single), 1);
    assert_eq!(of(Class::Approximate), 1);
    assert_eq!(of(Class::Predicate), 1 + 3);
    // One is skipped by its predicate and still issued.
    assert_eq!(of(Class::Integer), 1 + 3);
    assert_eq!(of(Class::Convert), 1);
    assert_eq!(of(Class::Synchronise), 1);
    assert_eq!(of(Class::SharedMemory), 1);
    assert_eq!(of(Class::Control), 3 + 1);
    assert_eq!(of(Class::Move), 2 + 2);
    assert_eq!(of(Class::Parameter), 1);
    assert_eq!(
        counters.instructions.total(),
        1 + 1 + 4 + 4 + 1 + 1 + 1 + 4 + 4 + 1
    );
}

#[test]
fn bank_conflicts_are_extra_turns() {
    let store = |stride: u32, form: &str| {
        counted(&format!(
            "mad.lo.u32 %r3, %r1, {stride}, %r2; mov.u64 %rd2, 0; {form}"
        ))
        .bank_conflicts
    };
    let word = "st.shared.u32 [%r3], %r1;";
    assert_eq!(store(4, word), 0);
    assert_eq!(store(8, word), 1);
    assert_eq!(store(128, word), 31);
    assert_eq!(store(132, word), 0);
    // One word for all lanes is a broadcast.
    assert_eq!(store(0, "st.shared.u32 [%r3], 7;"), 0);
    // Wide accesses take two and four turns, none of which conflicts.
    assert_eq!(store(8, "st.shared.u64 [%r3], %rd2;"), 0);
    assert_eq!(
        store(16, "st.shared.v4.u32 [%r3], {%r1, %r1, %r1, %r1};"),
        0
    );
    // In each of two turns, 16 lanes share eight pairs of banks.
    assert_eq!(store(16, "st.shared.u64 [%r3], %rd2;"), 2);
    // Rows of 128 bytes: the eight rows of each matrix lie in the same four banks.
    let fill = "mad.lo.u32 %r3, %r1, 128, %r2; st.shared.v4.u32 [%r3], {%r1, %r1, %r1, %r1}; bar.warp.sync -1;";
    let before = counted(fill).bank_conflicts;
    let load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];";
    assert_eq!(
        counted(&format!("{fill}{load}")).bank_conflicts - before,
        4 * 7
    );
}

#[test]
fn global_requests_touch_sectors() {
    let load = |stride: u32, offset: u32, form: &str| {
        counted(&format!(
            "mad.wide.u32 %rd2, %r1, {stride}, %rd1; add.u64 %rd2, %rd2, {offset}; {form}"
        ))
    };
    let word = "ld.global.u32 %r3, [%rd2];";
    let of = |counters: Counters| {
        (
            counters.global_requests,
            counters.global_sectors,
            counters.global_sectors_ideal,
        )
    };
    assert_eq!(of(load(4, 0, word)), (1, 4, 4));
    // Misaligned by one word: one sector more.
    assert_eq!(of(load(4, 4, word)), (1, 5, 4));
    assert_eq!(of(load(8, 0, word)), (1, 8, 4));
    assert_eq!(of(load(256, 0, word)), (1, 32, 4));
    assert_eq!(of(load(0, 0, word)), (1, 1, 1));
    assert_eq!(
        of(load(
            16,
            0,
            "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd2];"
        )),
        (1, 16, 16)
    );
    let counters = load(
        4,
        0,
        "st.global.u32 [%rd2], %r1; ld.global.u32 %r3, [%rd2]; red.global.add.u32 [%rd2], 1;",
    );
    assert_eq!(of(counters), (3, 12, 12));
    assert_eq!(
        (counters.global_bytes_read, counters.global_bytes_written),
        (256, 256)
    );
    let copy = "mad.lo.u32 %r3, %r1, 16, %r2; cp.async.cg.shared.global [%r3], [%rd2], 16;";
    assert_eq!(of(load(16, 0, copy)), (1, 16, 16));
}

#[test]
fn blocks_that_write_nothing_are_idle() {
    let mut memory = Memory::default();
    let buffer = memory.put(&[0; 4]);
    let text = kernel(
        1,
        "ld.param.u64 %rd1, [arg0]; ld.global.u32 %r2, [%rd1]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1;\n\
         @%p1 st.global.u32 [%rd1], %r1; ret;",
    );
    let counters = run(&text, &mut memory, (3, 1), &[buffer], 1).unwrap();
    assert_eq!(counters.idle_blocks, 2);
}
