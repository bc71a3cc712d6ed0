//! Control flow, barriers and the instructions by which the lanes of a warp exchange values.

mod support;

use proptest::prelude::*;
use support::{Memory, kernel, of_u32, run, u32s};

/// Runs a kernel whose threads each leave one number in `%r0`, which it stores. `%r1` is the thread, `%r2`
/// its lane, `%r3` the thread's input.
fn outputs(body: &str, threads: u32, inputs: &[u32], seed: u64) -> Vec<u32> {
    let mut memory = Memory::default();
    let from = memory.put(&of_u32(inputs));
    let to = memory.put(&vec![0; 4 * threads as usize]);
    let text = kernel(
        2,
        &format!(
            "ld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1];\n\
             mov.u32 %r1, %tid.x; mov.u32 %r2, %laneid;\n\
             mad.wide.u32 %rd1, %r1, 4, %rd1; mad.wide.u32 %rd2, %r1, 4, %rd2;\n\
             ld.global.u32 %r3, [%rd1];\n{body}\n\
             st.global.u32 [%rd2], %r0;\nret;"
        ),
    );
    run(&text, &mut memory, (1, threads), &[from, to], seed)
        .unwrap_or_else(|error| panic!("{error}"));
    u32s(memory.get(to))
}

/// The same with the numbers 100, 101, …
fn of_lanes(body: &str) -> Vec<u32> {
    outputs(body, 32, &(100..132).collect::<Vec<u32>>(), 1)
}

#[test]
fn lanes_diverge_and_meet_again() {
    // Odd lanes loop as often as their number says, even lanes take the other side, whose block lies behind.
    let body = "and.b32 %r4, %r2, 1; setp.eq.u32 %p1, %r4, 0; mov.u32 %r0, 0;\n\
        @%p1 bra EVEN;\nmov.u32 %r5, 0;\n\
        LOOP: add.u32 %r0, %r0, %r5; add.u32 %r5, %r5, 1; setp.le.u32 %p2, %r5, %r2;\n\
        @%p2 bra LOOP;\n\
        JOIN: activemask.b32 %r6; popc.b32 %r6, %r6; mad.lo.u32 %r0, %r6, 1000, %r0; bra.uni END;\n\
        EVEN: mov.u32 %r0, 7; bra.uni JOIN;\n\
        END:";
    let got = of_lanes(body);
    for (lane, got) in got.into_iter().enumerate() {
        let lane = lane as u32;
        let value = if lane.is_multiple_of(2) {
            7
        } else {
            lane * (lane + 1) / 2
        };
        assert_eq!(got % 1000, value, "lane {lane}");
    }
    // Both sides lie before the join: all lanes meet there.
    let body = "setp.lt.u32 %p1, %r2, 5;\n@%p1 bra A;\nmov.u32 %r0, 1; bra B;\n\
        A: mov.u32 %r0, 2;\nB: activemask.b32 %r4; setp.eq.u32 %p2, %r4, 0xffffffff;\n\
        @!%p2 mov.u32 %r0, 9;";
    let got = of_lanes(body);
    assert!(
        got.iter()
            .enumerate()
            .all(|(lane, &x)| x == if lane < 5 { 2 } else { 1 }),
        "{got:?}"
    );
}

#[test]
fn predicates_guard_every_instruction_and_exits_end_lanes() {
    let body = "mov.u32 %r0, 1; setp.gt.u32 %p1, %r2, 9; @%p1 mov.u32 %r0, 2;\n\
        setp.gt.u32 %p2, %r2, 19; @%p2 st.global.u32 [%rd2], %r2; @%p2 exit;";
    let got = of_lanes(body);
    for (lane, got) in got.into_iter().enumerate() {
        let expected = match lane {
            0..10 => 1,
            10..20 => 2,
            _ => lane as u32,
        };
        assert_eq!(got, expected);
    }
}

#[test]
fn indexed_branches_choose_their_target() {
    let body = "and.b32 %r4, %r2, 3;\nT: .branchtargets A, B, C, B;\nbrx.idx %r4, T;\n\
        A: mov.u32 %r0, 10; bra END;\nB: mov.u32 %r0, 20; bra END;\nC: mov.u32 %r0, 30;\nEND:";
    let expected: Vec<u32> = (0..32).map(|lane| [10, 20, 30, 20][lane % 4]).collect();
    assert_eq!(of_lanes(body), expected);
}

#[test]
fn nested_scopes_declare_separate_registers_and_labels() {
    let body = "mov.u32 %r0, 0;\n\
        { .reg .pred p; .reg .b32 %r5; mov.u32 %r5, 3; AGAIN: sub.u32 %r5, %r5, 1; add.u32 %r0, %r0, 1;\n\
        setp.ne.u32 p, %r5, 0; @p bra AGAIN; }\n\
        { .reg .pred p; AGAIN: add.u32 %r0, %r0, 10; setp.lt.u32 p, %r0, 40; @p bra AGAIN; }";
    assert_eq!(of_lanes(body), [43; 32]);
}

#[test]
fn special_registers_describe_the_thread() {
    let mut memory = Memory::default();
    let to = memory.put(&vec![0; 4 * 24 * 2 * 3 * 8]);
    let names = [
        "%tid.x",
        "%tid.y",
        "%tid.z",
        "%ctaid.y",
        "%laneid",
        "%warpid",
        "%lanemask_lt",
        "%ntid.y",
    ];
    let mut body = String::from(
        "ld.param.u64 %rd1, [arg0];\n\
         mov.u32 %r1, %tid.z; mov.u32 %r2, %ntid.y; mov.u32 %r3, %tid.y; mad.lo.u32 %r1, %r1, %r2, %r3;\n\
         mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r1, %r1, %r2, %r3;\n\
         mov.u32 %r4, %ctaid.y; mov.u32 %r5, 24; mad.lo.u32 %r1, %r4, %r5, %r1;\n\
         mad.wide.u32 %rd1, %r1, 32, %rd1;\n",
    );
    for (i, name) in names.iter().enumerate() {
        body += &format!(
            "mov.u32 %r9, {name}; st.global.u32 [%rd1+{}], %r9;\n",
            4 * i
        );
    }
    let text = kernel(1, &body);
    let launch = emulated_gpu::launch::Launch {
        grid: emulated_gpu::launch::Dim { x: 1, y: 2, z: 1 },
        block: emulated_gpu::launch::Dim { x: 4, y: 2, z: 3 },
        dynamic_shared: 0,
        parameters: &to.to_le_bytes(),
        seed: 3,
    };
    let module = support::load(&text, &mut memory);
    let limits = emulated_gpu::ptx::Limits::default();
    module
        .run("k", &launch, &limits, &mut memory)
        .unwrap_or_else(|error| panic!("{error}"));
    for (i, row) in u32s(memory.get(to)).chunks_exact(8).take(48).enumerate() {
        let (block, thread) = (i as u32 / 24, i as u32 % 24);
        let expected = [
            thread % 4,
            thread / 4 % 2,
            thread / 8,
            block,
            thread,
            0,
            (1 << thread) - 1,
            2,
        ];
        assert_eq!(row, expected, "thread {thread}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The four modes by the definition of the segment mask and the clamp.
    #[test]
    fn shuffles_read_the_defined_lane(b in 0u32..40, clamp in 0u32..32, segment in 0u32..32) {
        let c = segment << 8 | clamp;
        for mode in ["up", "down", "bfly", "idx"] {
            let body = format!(
                "shfl.sync.{mode}.b32 %r4|%p1, %r3, {b}, {c}, 0xffffffff; selp.u32 %r5, 1000, 0, %p1;\n\
                 add.u32 %r0, %r4, %r5;"
            );
            let got = of_lanes(&body);
            for lane in 0..32u32 {
                let (b, max) = (b & 31, (lane & segment) | (clamp & !segment));
                let min = lane & segment;
                let (from, in_range) = match mode {
                    "up" => (lane.wrapping_sub(b), lane as i32 - b as i32 >= max as i32),
                    "down" => (lane + b, lane + b <= max),
                    "bfly" => (lane ^ b, lane ^ b <= max),
                    _ => (min | (b & !segment), min | (b & !segment) <= max),
                };
                let from = if in_range { from } else { lane };
                let expected = 100 + from + if in_range { 1000 } else { 0 };
                prop_assert_eq!(got[lane as usize], expected, "{} lane {}", mode, lane);
            }
        }
    }

    #[test]
    fn votes_and_reductions_agree(values in prop::collection::vec(any::<u32>(), 32)) {
        let inputs = |body: &str| outputs(body, 32, &values, 1);
        let odd = |&x: &u32| x & 1 == 1;
        let setp = "and.b32 %r4, %r3, 1; setp.eq.u32 %p1, %r4, 1;";
        let vote = |kind: &str| {
            inputs(&format!("{setp} vote.sync.{kind}.pred %p2, %p1, -1; selp.u32 %r0, 1, 0, %p2;"))[7]
        };
        prop_assert_eq!(vote("all"), u32::from(values.iter().all(odd)));
        prop_assert_eq!(vote("any"), u32::from(values.iter().any(odd)));
        let odds = values.iter().filter(|x| odd(x)).count();
        prop_assert_eq!(vote("uni"), u32::from(odds == 0 || odds == 32));
        let ballot = (0..32).fold(0, |mask, i| mask | (values[i] & 1) << i);
        let got = inputs(&format!("{setp} vote.sync.ballot.b32 %r0, !%p1, 0xffffffff;"));
        prop_assert_eq!(got, vec![!ballot; 32]);
        let reduced = |form: &str| inputs(&format!("redux.sync.{form} %r0, %r3, 0xffffffff;"))[0];
        let signed = || values.iter().map(|&x| x as i32);
        prop_assert_eq!(reduced("add.u32"), values.iter().fold(0, |a: u32, &b| a.wrapping_add(b)));
        prop_assert_eq!(reduced("add.s32"), reduced("add.u32"));
        prop_assert_eq!(Some(reduced("min.u32")), values.iter().copied().min());
        prop_assert_eq!(Some(reduced("max.u32")), values.iter().copied().max());
        prop_assert_eq!(Some(reduced("min.s32") as i32), signed().min());
        prop_assert_eq!(Some(reduced("max.s32") as i32), signed().max());
        prop_assert_eq!(reduced("and.b32"), values.iter().fold(!0, |a, &b| a & b));
        prop_assert_eq!(reduced("or.b32"), values.iter().fold(0, |a, &b| a | b));
        prop_assert_eq!(reduced("xor.b32"), values.iter().fold(0, |a, &b| a ^ b));
        let few: Vec<u32> = values.iter().map(|x| x % 3).collect();
        let matched = outputs("match.any.sync.b32 %r0, %r3, 0xffffffff;", 32, &few, 1);
        for lane in 0..32 {
            let expected = (0..32).fold(0, |mask, i| mask | u32::from(few[i] == few[lane]) << i);
            prop_assert_eq!(matched[lane], expected);
        }
        // All lanes and the predicate, or nothing.
        let body = "match.all.sync.b32 %r4|%p1, %r3, 0xffffffff; selp.u32 %r5, 1, 0, %p1; xor.b32 %r0, %r4, %r5;";
        let same = few.iter().all(|&x| x == few[0]);
        prop_assert_eq!(outputs(body, 32, &few, 1)[0], if same { 0xffff_fffe } else { 0 });
        prop_assert_eq!(outputs(body, 32, &[5; 32], 1)[0], 0xffff_fffe);
    }
}

#[test]
fn masks_let_halves_of_a_warp_exchange_apart() {
    let body = "setp.lt.u32 %p1, %r2, 16; selp.b32 %r4, 0x0000ffff, 0xffff0000, %p1;\n\
        vote.sync.ballot.b32 %r0, %p1, %r4;";
    let got = of_lanes(body);
    assert_eq!((got[0], got[31]), (0xffff, 0));
    // Lanes that arrive at different times meet at the shuffle.
    let body = "setp.lt.u32 %p1, %r2, 16; mov.u32 %r4, 1; @%p1 bra LOW; mov.u32 %r4, 2; bra HIGH;\n\
        BACK: shfl.sync.bfly.b32 %r0, %r4, 16, 31, 0xffffffff; bra END;\nLOW: bra BACK;\nHIGH: bra BACK;\nEND:";
    let got = of_lanes(body);
    assert_eq!((got[0], got[31]), (2, 1));
    let got = of_lanes("elect.sync %r4|%p1, 0xffffffff; selp.u32 %r0, 1, %r4, %p1;");
    assert_eq!((got[0], got[1]), (1, 0));
}

#[test]
fn barriers_order_warps_for_every_seed() {
    // Every warp publishes its number; after the barrier every thread adds those of all warps.
    let body = ".shared .align 4 .b32 all[8];\nmov.u32 %r4, %warpid; mov.u32 %r5, all;\n\
        shl.b32 %r6, %r4, 2; add.u32 %r6, %r6, %r5; setp.eq.u32 %p1, %r2, 0;\n\
        @%p1 st.shared.u32 [%r6], %r4;\nbar.sync 0;\n\
        ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [all]; ld.shared.v4.u32 {%r11, %r12, %r13, %r14}, [all+16];\n\
        add.u32 %r0, %r7, %r8; add.u32 %r0, %r0, %r9; add.u32 %r0, %r0, %r10; add.u32 %r0, %r0, %r11;\n\
        add.u32 %r0, %r0, %r12; add.u32 %r0, %r0, %r13; add.u32 %r0, %r0, %r14;";
    for seed in 0..20 {
        assert_eq!(outputs(body, 256, &[0; 256], seed), [28; 256]);
    }
    // Reductions of a predicate over the block.
    let values: Vec<u32> = (0..96).map(|i| u32::from(i % 5 == 0)).collect();
    let body = |form: &str| format!("setp.ne.u32 %p1, %r3, 0; {form}");
    let count = outputs(&body("bar.red.popc.u32 %r0, 0, %p1;"), 96, &values, 2);
    assert_eq!(count, [20; 96]);
    for (kind, expected) in [("and", 0), ("or", 1)] {
        let form = format!("bar.red.{kind}.pred %p2, 0, %p1; selp.u32 %r0, 1, 0, %p2;");
        assert_eq!(outputs(&body(&form), 96, &values, 3), [expected; 96]);
    }
    // Producers arrive, consumers wait, at a barrier for 64 of 96 threads.
    let body = ".shared .align 4 .b32 box;\nmov.u32 %r0, 0; mov.u32 %r4, %warpid;\n\
        setp.eq.u32 %p1, %r4, 0; setp.eq.u32 %p2, %r4, 1; setp.eq.u32 %p3, %r1, 0;\n\
        @%p1 bra PRODUCE; @%p2 bra CONSUME; bra END;\n\
        PRODUCE: @%p3 st.shared.u32 [box], 42; bar.warp.sync 0xffffffff; barrier.cta.arrive.aligned 1, 64; bra END;\n\
        CONSUME: barrier.cta.sync.aligned 1, 64; ld.shared.u32 %r0, [box];\nEND:";
    for seed in 0..10 {
        let got = outputs(body, 96, &[0; 96], seed);
        assert_eq!((got[5], got[40], got[70]), (0, 42, 0));
    }
}

#[test]
fn the_seed_changes_the_order_of_warps_and_nothing_else() {
    // Tickets by an atomic show the order.
    let body = ".shared .align 4 .b32 next;\nsetp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [next], 0; bar.sync 0;\n\
        mov.u32 %r4, next; atom.shared.add.u32 %r0, [%r4], 1;";
    let orders: Vec<Vec<u32>> = (0..8)
        .map(|seed| outputs(body, 128, &[0; 128], seed))
        .collect();
    assert!(orders.iter().any(|order| *order != orders[0]));
    assert_eq!(outputs(body, 128, &[0; 128], 5), orders[5]);
    for mut order in orders {
        order.sort_unstable();
        assert_eq!(order, (0..128).collect::<Vec<u32>>());
    }
}

#[test]
fn the_seed_changes_the_order_of_blocks() {
    let text = kernel(
        2,
        "ld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1]; mov.u32 %r1, %ctaid.x;\n\
         atom.global.add.u32 %r2, [%rd1], 1; mad.wide.u32 %rd2, %r1, 4, %rd2; st.global.u32 [%rd2], %r2;",
    );
    let order = |seed| {
        let mut memory = Memory::default();
        let (tickets, to) = (memory.put(&[0; 4]), memory.put(&[0; 4 * 16]));
        run(&text, &mut memory, (16, 1), &[tickets, to], seed)
            .unwrap_or_else(|error| panic!("{error}"));
        u32s(memory.get(to))
    };
    assert!((1..8).any(|seed| order(seed) != order(0)));
    let mut sorted = order(3);
    sorted.sort_unstable();
    assert_eq!(sorted, (0..16).collect::<Vec<u32>>());
}

#[test]
fn no_ops_are_accepted() {
    let body = "membar.cta; membar.gl; fence.acq_rel.gpu; fence.proxy.async; nanosleep.u32 20;\n\
        prefetch.global.L2 [%rd1]; createpolicy.fractional.L2::evict_last.b64 %rd9, 1.0; mov.u64 %rd8, %clock64;\n\
        mov.u32 %r9, %clock; .pragma \"nounroll\"; griddepcontrol.wait; mov.u32 %r0, 5;";
    assert_eq!(of_lanes(body), [5; 32]);
}
