//! Each check has kernels that break its rule, and the nearest ones that do not.

mod support;

use emulated_gpu::launch::{Dim, Launch, MemoryFault};
use emulated_gpu::ptx::{Counters, Fault, LaunchError, Limits, Module, RunError};
use support::{Memory, fault_of, kernel, load, run, x};

/// Runs a block: `%rd1` is a buffer of 64 bytes, `%r1` the thread, `%r2` its lane, `%r3` the shared address
/// of 4 KiB, `%r4` that of the thread's word.
fn block(body: &str, threads: u32) -> Result<Counters, RunError> {
    let mut memory = Memory::default();
    let buffer = memory.put(&[0; 64]);
    run(&text(body), &mut memory, (1, threads), &[buffer], 7)
}

fn text(body: &str) -> String {
    kernel(
        1,
        &format!(
            ".shared .align 16 .b8 s[4096]; .local .align 8 .b8 l[16];\nld.param.u64 %rd1, [arg0];\n\
             mov.u32 %r1, %tid.x; mov.u32 %r2, %laneid; mov.u32 %r3, s; mad.lo.u32 %r4, %r1, 4, %r3;\n{body}\nret;"
        ),
    )
}

fn fails(body: &str, threads: u32) -> (Fault, u32) {
    fault_of(block(body, threads))
}

#[track_caller]
fn passes(body: &str, threads: u32) {
    if let Err(error) = block(body, threads) {
        panic!("{error}");
    }
}

#[test]
fn an_error_names_kernel_line_block_thread_and_address() {
    let body = "setp.eq.u32 %p1, %r1, 37;\n@%p1 ld.global.u32 %r5, [%rd1+2];";
    let mut memory = Memory::default();
    let buffer = memory.put(&[0; 64]);
    let error = run(&text(body), &mut memory, (3, 64), &[buffer], 7).expect_err("it is misaligned");
    let RunError::Execution(error) = error else {
        panic!("{error}");
    };
    let message = format!(
        "kernel `k`, line 16 `@%p1 ld.global.u32 %r5, [%rd1+2];`, block ({}, 0, 0), thread (37, 0, 0): access of \
         4 bytes at {:#x} is misaligned",
        error.block.x,
        buffer + 2
    );
    assert_eq!(error.to_string(), message);
}

#[test]
fn addresses_are_aligned_and_in_bounds() {
    let cases = [
        ("st.shared.u32 [%r4+2], %r1;", true),
        ("ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r3+8];", true),
        ("st.local.u64 [l+4], %rd1;", true),
        ("ld.param.u64 %rd2, [arg0+4];", true),
        ("atom.global.add.u32 %r5, [%rd1+1], 1;", true),
        ("cp.async.cg.shared.global [%r3+8], [%rd1], 16;", true),
        ("st.shared.u32 [%r3+4096], %r1;", false),
        ("st.shared.u32 [%r3+-4], %r1;", false),
        ("st.local.u64 [l+16], %rd1;", false),
        ("ld.param.u64 %rd2, [arg0+8];", false),
        (
            "mov.u64 %rd2, l; cvta.local.u64 %rd2, %rd2; st.u32 [%rd2+16], %r1;",
            false,
        ),
    ];
    for (body, misaligned) in cases {
        let (fault, _) = fails(body, 1);
        match misaligned {
            true => assert!(matches!(fault, Fault::Misaligned { .. }), "{body}: {fault}"),
            false => assert!(
                matches!(fault, Fault::OutOfWindow { .. }),
                "{body}: {fault}"
            ),
        }
    }
    // The thread at fault is the one beyond the buffer, also within a coalesced access.
    let (fault, thread) = fails(
        "mad.wide.u32 %rd2, %r1, 4, %rd1; ld.global.u32 %r5, [%rd2];",
        32,
    );
    let expected = matches!(
        fault,
        Fault::Global(MemoryFault::OutOfBounds { bytes: 4, .. })
    );
    assert!(expected && thread == 16, "{fault} {thread}");
    let (fault, thread) = fails(
        "mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r1;",
        32,
    );
    assert!(
        matches!(fault, Fault::Global(_)) && thread == 16,
        "{fault} {thread}"
    );
    let (fault, _) = fails("mov.u64 %rd2, 0; ld.global.u32 %r5, [%rd2];", 1);
    assert!(matches!(fault, Fault::Global(_)), "{fault}");
}

#[test]
fn registers_and_memory_are_written_before_they_are_read() {
    let (fault, _) = fails("add.u32 %r5, %r6, 1;", 1);
    assert_eq!(
        fault,
        Fault::UninitialisedRegister {
            name: "%r6".to_owned()
        }
    );
    // The compiler says that it leaves a register undefined on purpose.
    passes("// implicit-def: %rs3\nmov.b32 %r5, {%rs3, %rs3};", 1);
    // Written by some lanes only.
    let (fault, thread) = fails(
        "setp.lt.u32 %p1, %r1, 5; @%p1 mov.u32 %r6, 1; add.u32 %r5, %r6, 1;",
        32,
    );
    assert_eq!(
        (fault, thread),
        (
            Fault::UninitialisedRegister {
                name: "%r6".to_owned()
            },
            5
        )
    );
    let (fault, _) = fails("@%p3 mov.u32 %r5, 1;", 1);
    assert_eq!(
        fault,
        Fault::UninitialisedRegister {
            name: "%p3".to_owned()
        }
    );
    // A lane outside the shuffle has no value.
    let (fault, thread) = fails(
        "shfl.sync.down.b32 %r5, %r1, 1, 31, 0xffffffff; add.u32 %r6, %r5, 1;",
        20,
    );
    assert_eq!(
        (fault, thread),
        (
            Fault::UninitialisedRegister {
                name: "%r5".to_owned()
            },
            19
        )
    );
    let (fault, _) = fails("ld.shared.u32 %r5, [%r4];", 1);
    assert!(
        matches!(
            fault,
            Fault::UninitialisedMemory {
                space: "shared",
                ..
            }
        ),
        "{fault}"
    );
    let (fault, _) = fails("st.shared.u16 [%r4], 1; ld.shared.u32 %r5, [%r4];", 1);
    assert!(
        matches!(
            fault,
            Fault::UninitialisedMemory {
                space: "shared",
                address: 2
            }
        ),
        "{fault}"
    );
    let (fault, _) = fails("atom.shared.add.u32 %r5, [%r4], 1;", 1);
    assert!(
        matches!(fault, Fault::UninitialisedMemory { .. }),
        "{fault}"
    );
    let (fault, _) = fails("st.local.u32 [l], 1; ld.local.u64 %rd2, [l];", 1);
    assert!(
        matches!(fault, Fault::UninitialisedMemory { space: "local", .. }),
        "{fault}"
    );
    // Shared memory does not survive its block.
    let body = "setp.eq.u32 %p1, %r1, 0; mov.u32 %r5, %ctaid.x; setp.eq.u32 %p2, %r5, 0;\n\
        @%p2 st.shared.u32 [%r4], %r1; ld.shared.u32 %r6, [%r4];";
    let mut memory = Memory::default();
    let buffer = memory.put(&[0; 64]);
    let (fault, _) = fault_of(run(&text(body), &mut memory, (2, 1), &[buffer], 0));
    assert!(
        matches!(fault, Fault::UninitialisedMemory { .. }),
        "{fault}"
    );
}

fn races(body: &str, threads: u32) {
    // Whatever the order of the warps is.
    for seed in 0..8 {
        let mut memory = Memory::default();
        let buffer = memory.put(&[0; 64]);
        let (fault, _) = fault_of(run(&text(body), &mut memory, (1, threads), &[buffer], seed));
        assert!(matches!(fault, Fault::Race { .. }), "{body}: {fault}");
    }
}

#[test]
fn accesses_of_two_warps_without_a_barrier_race() {
    // Write and write.
    races("st.shared.u32 [%r3], %r1;", 64);
    races("mov.u32 %r5, %warpid; st.shared.u32 [%r3], %r5;", 64);
    // Write and read of the other warp's word.
    races(
        "st.shared.u32 [%r4], %r1; bar.sync 0; st.shared.u32 [%r4], 5; xor.b32 %r5, %r4, 128;\n\
         ld.shared.u32 %r6, [%r5];",
        64,
    );
    let ordered =
        "st.shared.u32 [%r4], %r1; bar.sync 0; xor.b32 %r5, %r4, 128; ld.shared.u32 %r6, [%r5];";
    passes(ordered, 64);
    // Read, then write by another warp.
    let overwrite = format!("{ordered} st.shared.u32 [%r4], %r6;");
    races(&overwrite, 64);
    passes(
        &format!("{ordered} bar.sync 0; st.shared.u32 [%r4], %r6;"),
        64,
    );
    // The writer is the last reader, but not the only one.
    races(
        "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r3], 5; bar.sync 0; setp.eq.u32 %p2, %r1, 40;\n\
         or.pred %p3, %p1, %p2; @%p3 ld.shared.u32 %r5, [%r3]; @%p2 st.shared.u32 [%r3], 6;",
        64,
    );
    // An atomic and a plain write; two atomics do not race.
    let zero = "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r3], 0; bar.sync 0;";
    passes(&format!("{zero} red.shared.add.u32 [%r3], 1;"), 64);
    races(
        &format!(
            "{zero} red.shared.add.u32 [%r3], 1; setp.eq.u32 %p2, %r1, 40; @%p2 st.shared.u32 [%r3], 3;"
        ),
        64,
    );
    // Volatile accesses do not race with each other.
    passes(
        &format!("{zero} ld.volatile.shared.u32 %r5, [%r3]; st.volatile.shared.u32 [%r3], %r1;"),
        64,
    );
    // A barrier of some warps orders only those.
    let named = "mov.u32 %r5, %warpid; setp.eq.u32 %p1, %r5, 2; @%p1 bra C;\nst.shared.u32 [%r4], %r1; bar.sync 1, 64;\n\
        xor.b32 %r6, %r4, 128; ld.shared.u32 %r7, [%r6]; bra END;\nC: ";
    passes(&format!("{named} mov.u32 %r7, 1;\nEND:"), 96);
    races(
        &format!("{named} sub.u32 %r6, %r4, 256; st.shared.u32 [%r6], %r1;\nEND:"),
        96,
    );
    // A warp that only arrives orders what it did before, not what it does after.
    let arrives = "st.shared.u32 [%r4], %r1; bar.sync 0; mov.u32 %r5, %warpid; setp.eq.u32 %p1, %r5, 1; @%p1 bra C;\n\
        st.shared.u32 [%r4], 5; bar.arrive 1, 64;";
    let waits =
        "bra END;\nC: bar.sync 1, 64; sub.u32 %r6, %r4, 128; ld.shared.u32 %r7, [%r6];\nEND:";
    passes(&format!("{arrives} {waits}"), 64);
    races(&format!("{arrives} st.shared.u32 [%r4], 6; {waits}"), 64);
    // Neighbours within a word do not race.
    passes(
        "mad.lo.u32 %r5, %r1, 2, %r3; cvt.u16.u32 %rs1, %r1; st.shared.u16 [%r5], %rs1;",
        64,
    );
    passes(
        "add.u32 %r5, %r1, %r3; cvt.u16.u32 %rs1, %r1; st.shared.u8 [%r5], %rs1;",
        64,
    );
}

#[test]
fn lanes_of_a_warp_race_too() {
    // Different values at one address.
    races("st.shared.u32 [%r3], %r1;", 32);
    passes("st.shared.u32 [%r3], 5;", 32);
    // Lockstep is no synchronisation.
    let neighbour = "xor.b32 %r5, %r4, 4; ld.shared.u32 %r6, [%r5];";
    races(&format!("st.shared.u32 [%r4], %r1; {neighbour}"), 32);
    passes(
        &format!("st.shared.u32 [%r4], %r1; bar.warp.sync 0xffffffff; {neighbour}"),
        32,
    );
    races("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r1};", 32);
}

#[test]
fn warps_reach_barriers_together() {
    let (fault, _) = fails("setp.lt.u32 %p1, %r1, 16; @%p1 exit; bar.sync 0;", 32);
    assert_eq!(fault, Fault::DivergentBarrier { missing: 0xffff });
    let (fault, _) = fails("setp.lt.u32 %p1, %r1, 16; @%p1 bar.sync 0;", 32);
    assert_eq!(
        fault,
        Fault::DivergentBarrier {
            missing: 0xffff_0000
        }
    );
    let (fault, _) = fails(
        "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.sync 0; bra B;\nA: bar.sync 0;\nB:",
        32,
    );
    assert!(matches!(fault, Fault::DivergentBarrier { .. }), "{fault}");
    // Both sides meet at one barrier.
    passes(
        "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; mov.u32 %r5, 1;\nB: bar.sync 0; bra C;\nA: bra B;\nC:",
        64,
    );
    let (fault, thread) = fails("setp.lt.u32 %p1, %r1, 32; @%p1 exit; bar.sync 0;", 64);
    assert_eq!(
        (fault, thread),
        (Fault::BarrierAfterExit { id: 0, exited: 1 }, 32)
    );
    let (fault, _) = fails(
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 0; bra B;\nA: bar.sync 0;\nB:",
        64,
    );
    assert!(
        matches!(fault, Fault::BarrierElsewhere { id: 0, .. }),
        "{fault}"
    );
    let (fault, _) = fails(
        "setp.lt.u32 %p1, %r1, 32; selp.u32 %r5, 64, 96, %p1; bar.sync 1, %r5;",
        96,
    );
    assert!(
        matches!(fault, Fault::BarrierCount { id: 1, .. }),
        "{fault}"
    );
    let (fault, _) = fails("mov.u32 %r5, %warpid; bar.sync %r5;", 64);
    assert!(
        matches!(
            fault,
            Fault::Deadlock {
                arrived: 32,
                threads: 64,
                ..
            }
        ),
        "{fault}"
    );
    let (fault, _) = fails("bar.sync 16;", 32);
    assert!(
        matches!(fault, Fault::BarrierInvalid { id: 16, .. }),
        "{fault}"
    );
    let (fault, _) = fails("bar.sync 1, 40;", 64);
    assert!(
        matches!(fault, Fault::BarrierInvalid { threads: 40, .. }),
        "{fault}"
    );
    let (fault, _) = fails("bar.sync %r1;", 32);
    assert_eq!(fault, Fault::NotUniform);
    // An incomplete last warp is no divergence.
    passes("bar.sync 0;", 40);
}

#[test]
fn exchanges_need_the_lanes_of_their_mask() {
    let guarded = |form: &str| fails(&format!("setp.lt.u32 %p1, %r1, 16; @%p1 {form}"), 32).0;
    let missing = Fault::InactiveLanes {
        mask: 0xffff_ffff,
        missing: 0xffff_0000,
    };
    let forms = [
        "shfl.sync.bfly.b32 %r5, %r1, 1, 31, 0xffffffff;",
        "vote.sync.any.pred %p2, %p1, 0xffffffff;",
        "match.any.sync.b32 %r5, %r1, 0xffffffff;",
        "redux.sync.add.u32 %r5, %r1, 0xffffffff;",
        "bar.warp.sync 0xffffffff;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r3];",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1, %f1, %f1, %f1}, {%r1, %r1}, {%r1}, {%f1, %f1, %f1, %f1};",
    ];
    for form in forms {
        let prologue = format!("mov.f32 %f1, 0f00000000; setp.lt.u32 %p1, %r1, 16; @%p1 {form}");
        assert_eq!(fails(&prologue, 32).0, missing, "{form}");
    }
    assert_eq!(
        guarded("shfl.sync.bfly.b32 %r5, %r1, 1, 31, 0xff00;"),
        Fault::NotInMask { mask: 0xff00 }
    );
    passes(
        "setp.lt.u32 %p1, %r1, 16; @%p1 shfl.sync.bfly.b32 %r5, %r1, 1, 31, 0xffff;",
        32,
    );
    // Lanes at two different shuffles do not exchange.
    let apart = "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1; bra B;\n\
        A: shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;\nB:";
    assert!(matches!(fails(apart, 32).0, Fault::InactiveLanes { .. }));
    // A mask may name lanes that have exited, `mma` may not lack any.
    passes(
        "setp.lt.u32 %p1, %r1, 16; @%p1 exit; bar.warp.sync 0xffffffff;",
        32,
    );
    let mma = format!("mov.f32 %f1, 0f00000000; {}", forms[6]);
    assert!(matches!(
        fails(&mma, 16).0,
        Fault::InactiveLanes {
            missing: 0xffff_0000,
            ..
        }
    ));
}

#[test]
fn endless_loops_traps_and_wild_branches_end() {
    let mut memory = Memory::default();
    let text = kernel(0, "AGAIN: bra AGAIN;");
    let module = load(&text, &mut memory);
    let launch = Launch {
        grid: x(1),
        block: x(64),
        dynamic_shared: 0,
        parameters: &[],
        seed: 0,
    };
    let limits = Limits {
        instructions: 10_000,
        ..Limits::default()
    };
    let (endless, _) = fault_of(module.run("k", &launch, &limits, &mut memory));
    assert_eq!(
        endless,
        Fault::Budget {
            instructions: 10_000
        }
    );
    assert_eq!(fails("trap;", 1).0, Fault::Trap);
    let wild = "T: .branchtargets A, B;\nbrx.idx %r1, T;\nA:\nB:";
    assert_eq!(
        fails(wild, 3),
        (
            Fault::BranchIndex {
                index: 2,
                targets: 2
            },
            2
        )
    );
    let copy = "mov.u32 %r5, 17; cp.async.cg.shared.global [%r3], [%rd1], 16, %r5;";
    assert_eq!(
        fails(copy, 1).0,
        Fault::CopySize {
            bytes: 17,
            limit: 16
        }
    );
}

#[test]
fn launches_keep_the_limits() {
    let with = |directives: &str, shared: u64| {
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u32 a)\n{directives}\n{{\n\
             .reg .b32 %r<4>; .shared .align 4 .b8 s[{shared}];\nst.shared.u32 [s], 1;\nret;\n}}"
        )
    };
    let (parameters, too_many) = ([0; 4], [0; 5]);
    let good = Launch {
        grid: x(1),
        block: x(32),
        dynamic_shared: 0,
        parameters: &parameters,
        seed: 0,
    };
    let refused = |text: &str, kernel: &str, launch: &Launch<'_>| {
        let module = Module::load(text).unwrap_or_else(|error| panic!("{error}"));
        match module.run(kernel, launch, &Limits::default(), &mut Memory::default()) {
            Err(RunError::Launch(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let plain = with("", 4);
    assert!(matches!(
        refused(&plain, "other", &good),
        LaunchError::NoKernel { .. }
    ));
    let launch = |grid: Dim, block: Dim, dynamic_shared: u32| Launch {
        grid,
        block,
        dynamic_shared,
        ..good.clone()
    };
    let zero = Dim { x: 1, y: 0, z: 1 };
    assert!(matches!(
        refused(&plain, "k", &launch(x(1), zero, 0)),
        LaunchError::Empty { .. }
    ));
    let tall = Dim {
        x: 1,
        y: 65536,
        z: 1,
    };
    assert!(matches!(
        refused(&plain, "k", &launch(tall, x(1), 0)),
        LaunchError::Grid { .. }
    ));
    let threads = |block| LaunchError::Threads {
        threads: block,
        limit: 1024,
    };
    assert_eq!(
        refused(&plain, "k", &launch(x(1), x(1025), 0)),
        threads(1025)
    );
    let bounded = with(".maxntid 64, 1, 1\n.minnctapersm 2", 4);
    let limit = LaunchError::Threads {
        threads: 65,
        limit: 64,
    };
    assert_eq!(refused(&bounded, "k", &launch(x(1), x(65), 0)), limit);
    let required = with(".reqntid 64", 4);
    assert!(matches!(
        refused(&required, "k", &good),
        LaunchError::RequiredThreads { .. }
    ));
    let many = with(".maxnreg 128", 4);
    let registers = LaunchError::Registers {
        registers: 128,
        threads: 1024,
        limit: 65536,
    };
    assert_eq!(refused(&many, "k", &launch(x(1), x(1024), 0)), registers);
    let large = LaunchError::StaticShared {
        bytes: 49156,
        limit: 49152,
    };
    assert_eq!(refused(&with("", 49156), "k", &good), large);
    let both = LaunchError::Shared {
        bytes: 232_452,
        limit: 232_448,
    };
    assert_eq!(refused(&plain, "k", &launch(x(1), x(1), 232_448)), both);
    let passed = Launch {
        parameters: &too_many,
        ..good.clone()
    };
    assert_eq!(
        refused(&plain, "k", &passed),
        LaunchError::Parameters {
            bytes: 5,
            expected: 4
        }
    );
}

#[test]
fn forms_that_are_not_implemented_fail_when_the_module_is_loaded() {
    let cases = [
        (
            "tcgen05.wait::ld.sync.aligned;",
            "line 12: `tcgen05` is not implemented: `tcgen05.wait::ld.sync.aligned;`",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "line 12: the form of `wgmma` is not implemented: `wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;`",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "line 12: the shape `.m64n12k16` does not exist: `wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;`",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "line 12: operand 1 must have 8 elements: `wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;`",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f3}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "line 12: the registers of D must differ: `wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f3}, %rd1, %rd2, 1, 1, 1, 0, 0;`",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 2, 0, 0;",
            "line 12: operand 6 must be 1 or -1: `wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 2, 0, 0;`",
        ),
        (
            "setmaxnreg.inc.sync.aligned.u32 12;",
            "line 12: 12 registers are not 24, 32, …, 256: `setmaxnreg.inc.sync.aligned.u32 12;`",
        ),
        (
            "red.shared.add.v4.f32 [%r1], {%f1, %f2, %f3, %f4};",
            "line 12: vectors are only implemented for `.global.add.f32`: `red.shared.add.v4.f32 [%r1], {%f1, %f2, %f3, %f4};`",
        ),
        (
            "add.cc.u32 %r1, %r1, 1;",
            "line 12: `.cc` is not implemented here: `add.cc.u32 %r1, %r1, 1;`",
        ),
        (
            "add.s32 %r1, %rd1, 1;",
            "line 12: `%rd1` has 64 bits, the type 32: `add.s32 %r1, %rd1, 1;`",
        ),
        (
            "add.f32 %f1, %f1, 1;",
            "line 12: the literal must be a floating-point number: `add.f32 %f1, %f1, 1;`",
        ),
        (
            "bra NOWHERE;",
            "line 12: the label `NOWHERE` does not exist: `bra NOWHERE;`",
        ),
        (
            "mov.u32 %r1, %nowhere;",
            "line 12: `%nowhere` is not declared or not implemented: `mov.u32 %r1, %nowhere;`",
        ),
        (
            "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;",
            "line 12: the type `.e4m3x2` is not implemented: `cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;`",
        ),
        (
            "ld.shared::cluster.u32 %r1, [%r2];",
            "line 12: `.shared::cluster` is not implemented here: `ld.shared::cluster.u32 %r1, [%r2];`",
        ),
        (
            "shfl.down.b32 %r1, %r2, 1, 31;",
            "line 12: only the `.sync` form is implemented: `shfl.down.b32 %r1, %r2, 1, 31;`",
        ),
        (
            "add.s32 %r1, %r2;",
            "line 12: the form with 2 operands is not implemented: `add.s32 %r1, %r2;`",
        ),
        (
            "add.s32 %r1 %r2, 1;",
            "line 12: expected `;`: `add.s32 %r1 %r2, 1;`",
        ),
        (
            "add.s32 %r1, %r2, 0xfg;",
            "line 12: the number is malformed: `add.s32 %r1, %r2, 0xfg;`",
        ),
        (
            "call.uni (%r1), f, (%r2);",
            "line 12: expected an operand: `call.uni (%r1), f, (%r2);`",
        ),
        (
            "setp.lt.s32 %r1, %r2, %r3;",
            "line 12: `%r1` has 32 bits, the type 1: `setp.lt.s32 %r1, %r2, %r3;`",
        ),
        (
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r1}, {%r1}, {%r1};",
            "line 12: the form of `mma` is not implemented: `mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r1}, {%r1}, {%r1};`",
        ),
    ];
    for (body, expected) in cases {
        let error = Module::load(&kernel(0, body)).expect_err(body);
        assert_eq!(error.to_string(), expected);
    }
    for (text, expected) in [
        (
            ".version 8.0\n.func f() { ret; }",
            "line 2: device functions are not implemented; inline them: `.func f() { ret; }`",
        ),
        (
            ".address_size 32",
            "line 1: addresses must have 64 bits: `.address_size 32`",
        ),
        (
            ".entry k() {",
            "line 1: the module ends too early: `.entry k() {`",
        ),
        (
            ".global .align 8 .u64 p = generic(q);",
            "line 1: an initialiser must be a list of numbers: `.global .align 8 .u64 p = generic(q);`",
        ),
        (
            ".tex .u64 t;",
            "line 1: `.tex` is not implemented: `.tex .u64 t;`",
        ),
    ] {
        let error = Module::load(text).expect_err(text);
        assert_eq!(error.to_string(), expected);
    }
}
