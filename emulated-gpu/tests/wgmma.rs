//! `wgmma` against its definition, and the mistakes of order that it allows.

mod support;

use emulated_gpu::ptx::{Counters, Fault, RunError};
use half::bf16;
use support::{Memory, Random, f32s, fault_of, kernel, of_f32, run};

/// K of all products here: one panel of 64 elements, four instructions.
const K: usize = 64;
/// Bytes of 64 rows of a panel.
const PANEL: usize = 8192;

/// Small integers, whose sums are exact in every order.
fn integers(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| (random.bits() % 9) as f32 - 4.0).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Major {
    K,
    Mn,
}

/// Bytes of an operand of `count` × K.
fn bytes_of(major: Major, count: usize) -> usize {
    match major {
        Major::K => (count * 128).next_multiple_of(1024),
        Major::Mn => count.div_ceil(64) * PANEL,
    }
}

/// An operand with 128-byte swizzle: rows of 64 elements of K, or panels with rows of 64 elements along M or N.
fn swizzled(major: Major, count: usize, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; bytes_of(major, count)];
    for at in 0..count {
        for k in 0..K {
            let (panel, row, column) = match major {
                Major::K => (0, at, k),
                Major::Mn => (at / 64 * PANEL, k, at % 64),
            };
            let to = panel + row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
            let bits = bf16::from_f32(values[at * K + k]).to_bits();
            bytes[to..to + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
    bytes
}

/// `%rd3` is a descriptor of the memory at `%r3`, with the next 64 elements along M or N a panel later.
const DESCRIPTOR: &str =
    "shr.u32 %r4, %r3, 4; cvt.u64.u32 %rd3, %r4; or.b64 %rd3, %rd3, 0x4000004002000000;\n";

/// Copies `bytes` from `%rd1` to the shared memory `s`, 16 to each of 128 threads at a time; `%r1` is the thread.
fn fill(bytes: usize, threads: usize) -> String {
    let mut body = format!(
        ".shared .align 1024 .b8 s[{bytes}];\nld.param.u64 %rd1, [arg0]; ld.param.u64 %rd2, [arg1];\n\
         mov.u32 %r1, %tid.x; mov.u32 %r2, s; shl.b32 %r3, %r1, 4; add.u32 %r3, %r3, %r2;\n\
         mul.wide.u32 %rd3, %r1, 16; add.u64 %rd3, %rd3, %rd1;\n"
    );
    for at in (0..bytes).step_by(16 * threads) {
        body += &format!(
            "ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd3+{at}]; st.shared.v4.u32 [%r3+{at}], {{%r4, %r5, %r6, %r7}};\n"
        );
    }
    body + "fence.proxy.async.shared::cta; bar.sync 0;\n"
}

fn list(prefix: &str, range: std::ops::Range<usize>) -> String {
    let names: Vec<String> = range.map(|i| format!("%{prefix}{i}")).collect();
    names.join(", ")
}

/// How a product is made.
#[derive(Debug, Clone, Copy)]
struct Form {
    n: usize,
    /// `None`: in registers.
    a: Option<Major>,
    b: Major,
    /// The first instruction adds to what D was.
    accumulate: bool,
    scale: [i32; 2],
}

/// Products of the four steps of K, whose sums begin as the second buffer's, and end there: N / 2 for each thread.
fn body(form: Form) -> String {
    let Form { n, a, b, .. } = form;
    let of_a = bytes_of(a.unwrap_or(Major::K), 64);
    let mut body = fill((of_a + bytes_of(b, n)).next_multiple_of(2048), 128);
    body += &format!(
        ".reg .f32 %d<128>; .reg .b32 %a<16>; .reg .b64 %x<2>;\n\
         mov.u32 %r3, %r2; {DESCRIPTOR} mov.u64 %x0, %rd3;\n\
         add.u32 %r3, %r2, {of_a}; {DESCRIPTOR} mov.u64 %x1, %rd3;\n\
         mad.wide.u32 %rd4, %r1, {}, %rd2;\n",
        2 * n
    );
    if form.accumulate {
        for i in 0..n / 2 {
            body += &format!("ld.global.f32 %d{i}, [%rd4+{}];\n", 4 * i);
        }
    }
    if a.is_none() {
        body += "shr.u32 %r4, %r1, 5; shl.b32 %r4, %r4, 4; and.b32 %r5, %r1, 15; add.u32 %r4, %r4, %r5;\n\
            and.b32 %r5, %r4, 7; bfe.u32 %r6, %r1, 4, 1; shl.b32 %r4, %r4, 7; add.u32 %r4, %r4, %r2;\n";
        for k in 0..4 {
            body += &format!(
                "add.u32 %r7, %r6, {}; xor.b32 %r7, %r7, %r5; shl.b32 %r7, %r7, 4; add.u32 %r7, %r7, %r4;\n\
                 ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}}}, [%r7];\n",
                2 * k,
                list("a", 4 * k..4 * k + 4)
            );
        }
    }
    body += "wgmma.fence.sync.aligned;\n";
    let step = |major: Major| if major == Major::K { 2 } else { 128 };
    let transposed = |major: Major| u8::from(major == Major::Mn);
    let [scale_a, scale_b] = form.scale;
    for k in 0..4 {
        body += &format!(
            "mov.u32 %r9, {}; setp.ne.u32 %p1, %r9, 0; add.u64 %rd6, %x1, {};\n",
            u8::from(k > 0 || form.accumulate),
            k * step(b)
        );
        let (left, of_left) = match a {
            None => (
                format!("{{{}}}", list("a", 4 * k..4 * k + 4)),
                String::new(),
            ),
            Some(major) => {
                body += &format!("add.u64 %rd5, %x0, {};\n", k * step(major));
                ("%rd5".to_owned(), format!("{}, ", transposed(major)))
            }
        };
        body += &format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{}}}, {left}, %rd6, %p1, {scale_a}, {scale_b}, \
             {of_left}{};\n",
            list("d", 0..n / 2),
            transposed(b),
        );
    }
    body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";
    for i in 0..n / 2 {
        body += &format!("st.global.f32 [%rd4+{}], %d{i};\n", 4 * i);
    }
    body + "ret;"
}

/// Runs a form and compares its results with the formula.
fn agrees(form: Form) {
    let Form { n, a, b, .. } = form;
    let mut random = Random(n as u64);
    let (left, right) = (integers(&mut random, 64 * K), integers(&mut random, n * K));
    let before = integers(&mut random, 64 * n);
    let mut image = swizzled(a.unwrap_or(Major::K), 64, &left);
    image.extend(swizzled(b, n, &right));
    image.resize(image.len().next_multiple_of(2048), 0);
    let mut memory = Memory::default();
    let (from, to) = (memory.put(&image), memory.put(&of_f32(&before)));
    let text = kernel(2, &body(form));
    let counters = run(&text, &mut memory, (1, 128), &[from, to], n as u64)
        .unwrap_or_else(|error| panic!("{form:?}: {error}"));
    assert_eq!(counters.mma, (4 * n / 8 * 4) as u64, "{form:?}");
    let got = f32s(memory.get(to));
    let sign = (form.scale[0] * form.scale[1]) as f32;
    for thread in 0..128 {
        for i in 0..n / 2 {
            let row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
            let column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            let at = thread * n / 2 + i;
            let products = (0..K).map(|k| left[row * K + k] * right[column * K + k]);
            let sum: f32 = products.sum();
            let before = if form.accumulate { before[at] } else { 0.0 };
            assert_eq!(got[at], before + sign * sum, "{form:?} [{row}][{column}]");
        }
    }
}

const FORM: Form = Form {
    n: 64,
    a: Some(Major::K),
    b: Major::K,
    accumulate: false,
    scale: [1, 1],
};

#[test]
fn every_form_gives_the_product() {
    for n in [8, 16, 32, 64, 96, 128, 256] {
        for a in [Some(Major::K), Some(Major::Mn), None] {
            for b in [Major::K, Major::Mn] {
                for accumulate in [false, true] {
                    agrees(Form {
                        n,
                        a,
                        b,
                        accumulate,
                        ..FORM
                    });
                }
            }
        }
    }
}

#[test]
fn a_scale_of_minus_one_negates_the_product() {
    for scale in [[-1, 1], [1, -1], [-1, -1]] {
        for a in [Some(Major::K), None] {
            agrees(Form {
                a,
                accumulate: true,
                scale,
                ..FORM
            });
        }
    }
}

/// Two products of N = 8 in two warpgroups, the second of which has A in registers and overwrites what the first one read. Each
/// statement that a mistake changes is a line.
const ORDERED: &str = "\
.reg .f32 %d<8>; .reg .b32 %a<4>; .reg .b64 %x<2>;
mov.u32 %r3, %r2; DESCRIPTOR mov.u64 %x0, %rd3;
add.u32 %r3, %r2, 8192; DESCRIPTOR mov.u64 %x1, %rd3;
setp.eq.u32 %p1, %r1, %r1;
shl.b32 %r8, %r1, 4; add.u32 %r8, %r8, %r2; mad.wide.u32 %rd4, %r1, 16, %rd2;
mov.f32 %d0, 0f3f800000; mov.f32 %d1, %d0; mov.f32 %d2, %d0; mov.f32 %d3, %d0;
setmaxnreg.inc.sync.aligned.u32 232;
// before
wgmma.fence.sync.aligned;
// fenced
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, %x0, %x1, %p1, 1, 1, 0, 0;
// between
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, %x0, %x1, %p1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
// under way
wgmma.wait_group.sync.aligned 0;
// waited
bar.sync 0;
// met
mov.b32 %a0, 0x3f803f80; mov.b32 %a1, %a0; mov.b32 %a2, %a0; mov.b32 %a3, %a0;
st.shared.v4.u32 [%r8], {%a0, %a1, %a2, %a3};
// second fence
wgmma.fence.sync.aligned;
// second fenced
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, %x1, %p1, 1, 1, 0;
wgmma.commit_group.sync.aligned;
// second under way
wgmma.wait_group.sync.aligned 0;
st.global.v4.f32 [%rd4], {%d0, %d1, %d2, %d3};
ret;";

/// Runs [`ORDERED`] with changes in a block of two warpgroups, or of another number of threads.
fn ordered(changes: &[(&str, &str)], threads: usize, seed: u64) -> Result<Counters, RunError> {
    let mut text = format!("{}{ORDERED}", fill(16384, 256)).replace("DESCRIPTOR", DESCRIPTOR);
    for (from, to) in changes {
        assert_eq!(text.matches(from).count(), 1, "occurrences of `{from}`");
        text = text.replace(from, to);
    }
    let mut memory = Memory::default();
    let (from, to) = (memory.put(&[0; 16384]), memory.put(&[0; 4096]));
    run(
        &kernel(2, &text),
        &mut memory,
        (1, threads as u32),
        &[from, to],
        seed,
    )
}

#[track_caller]
fn passes(changes: &[(&str, &str)]) {
    for seed in 0..8 {
        ordered(changes, 256, seed).unwrap_or_else(|error| panic!("{changes:?}: {error}"));
    }
}

#[track_caller]
fn fails(changes: &[(&str, &str)], is_found: fn(&Fault) -> bool) {
    for seed in 0..8 {
        let result = ordered(changes, 256, seed);
        assert!(result.is_err(), "{changes:?} passes");
        let (fault, _) = fault_of(result);
        assert!(is_found(&fault), "{changes:?}: {fault}");
    }
}

fn is_under_way(fault: &Fault) -> bool {
    matches!(fault, Fault::RegisterUnderWay { .. })
}

fn is_unfenced(fault: &Fault) -> bool {
    matches!(fault, Fault::NoRegisterFence { .. })
}

fn is_unordered(fault: &Fault) -> bool {
    matches!(fault, Fault::OperandUnderWay { .. } | Fault::Race { .. })
}

fn has_no_proxy_fence(fault: &Fault) -> bool {
    matches!(fault, Fault::NoProxyFence { .. })
}

#[test]
fn registers_of_a_product_wait_for_its_group() {
    passes(&[]);
    for place in ["// between", "// under way", "// second under way"] {
        fails(&[(place, "add.f32 %f1, %d3, %d3;")], is_under_way);
        fails(&[(place, "mov.f32 %d2, 0f00000000;")], is_under_way);
        fails(&[(place, "st.global.f32 [%rd4], %d0;")], is_under_way);
    }
    fails(&[("// second under way", "mov.u32 %a1, 0;")], is_under_way);
    fails(
        &[("// second under way", "add.u32 %r9, %a1, 0;")],
        is_under_way,
    );
    // Only a product of the same shape may add to the sums.
    let other = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, %x0, \
        %x1, 0, 1, 1, 0, 0;";
    fails(&[("// between", other)], is_under_way);
    let of_sums = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d4, %d5, %d6, %d7}, {%d0, %d1, %d2, %d3}, \
        %x1, 0, 1, 1, 0;";
    fails(&[("// between", of_sums)], is_under_way);
    // Copies of sums are those of the compiler, and are under way too.
    passes(&[("// between", "mov.f32 %d4, %d0; mov.f32 %d0, %d4;")]);
    fails(
        &[("// between", "mov.f32 %d4, %d0; add.f32 %d4, %d4, %d4;")],
        is_under_way,
    );
}

#[test]
fn a_wait_covers_committed_groups_but_the_newest() {
    let first = "%x0, %x1, %p1, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;";
    let uncommitted = "%x0, %x1, %p1, 1, 1, 0, 0;";
    let read = ("// waited", "add.f32 %f1, %d3, %d3;");
    passes(&[read]);
    fails(&[(first, uncommitted), read], is_under_way);
    let wait = (
        "// under way\nwgmma.wait_group.sync.aligned 0;",
        "wgmma.wait_group.sync.aligned 1;",
    );
    fails(&[wait, read], is_under_way);
    let empty = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;";
    passes(&[
        ("// under way\nwgmma.wait_group.sync.aligned 0;", empty),
        read,
    ]);
    fails(
        &[("// second under way\nwgmma.wait_group.sync.aligned 0;", "")],
        is_under_way,
    );
}

#[test]
fn registers_are_fenced_before_a_product() {
    let fence = "wgmma.fence.sync.aligned;\n// fenced";
    let second = "wgmma.fence.sync.aligned;\n// second fenced";
    fails(&[(fence, "")], is_unfenced);
    fails(&[(second, "")], is_unfenced);
    fails(&[("// fenced", "add.f32 %d1, %d1, %d1;")], is_unfenced);
    fails(&[("// second fenced", "add.u32 %a1, %a1, 0;")], is_unfenced);
    fails(
        &[("// second fenced", "mul.f32 %d1, %d1, %d1;")],
        is_unfenced,
    );
    passes(&[("// second fence\n", "mul.f32 %d1, %d1, %d1;\n")]);
    // A copy of a fenced register needs no other fence.
    passes(&[("// fenced", "mov.f32 %d4, %d0; mov.f32 %d0, %d4;")]);
}

#[test]
fn what_a_product_reads_stays_until_its_wait() {
    let store = "st.shared.u32 [%r8], %r1;";
    fails(&[("// under way", store)], is_unordered);
    fails(&[("// between", store)], is_unordered);
    // Other warps read B.
    let of_b = "mov.u32 %r9, 0; st.shared.u32 [%r2+8192], %r9;";
    fails(&[("// waited", of_b)], is_unordered);
    passes(&[(
        "// met",
        "setp.eq.u32 %p2, %r1, 9; @%p2 st.shared.u32 [%r2+8192], 0; fence.proxy.async; bar.sync 0;",
    )]);
    // A barrier does not end a product.
    fails(
        &[
            (
                "// under way\nwgmma.wait_group.sync.aligned 0;\n// waited\nbar.sync 0;",
                "bar.sync 0;",
            ),
            ("// second under way\nwgmma.wait_group.sync.aligned 0;", ""),
            (
                "mov.b32 %a0, 0x3f803f80;",
                "wgmma.wait_group.sync.aligned 0; mov.b32 %a0, 0x3f803f80;",
            ),
        ],
        is_unordered,
    );
    let copy = "cp.async.cg.shared.global [%r8], [%rd1], 16; cp.async.wait_all;";
    fails(&[("// under way", copy)], is_unordered);
}

#[test]
fn writes_are_fenced_for_the_asynchronous_proxy() {
    let publish = "fence.proxy.async.shared::cta; bar.sync 0;";
    fails(&[(publish, "bar.sync 0;")], has_no_proxy_fence);
    fails(
        &[(publish, "fence.proxy.async.global; bar.sync 0;")],
        has_no_proxy_fence,
    );
    // After the barrier, a fence of another warp is not ordered before the product.
    fails(
        &[(publish, "bar.sync 0; fence.proxy.async.shared::cta;")],
        has_no_proxy_fence,
    );
    passes(&[(publish, "fence.proxy.async; bar.sync 0;")]);
    passes(&[(
        publish,
        "bar.sync 0; fence.proxy.async.shared::cta; bar.sync 0;",
    )]);
    // One thread's fence does not cover the others' writes.
    fails(
        &[(
            publish,
            "setp.eq.u32 %p3, %r1, 0; @%p3 fence.proxy.async; bar.sync 0;",
        )],
        has_no_proxy_fence,
    );
    fails(
        &[(publish, "bar.sync 0;"), ("// fenced", "bar.sync 0;")],
        has_no_proxy_fence,
    );
    // The fence of a copy follows its wait.
    let copy = "mul.wide.u32 %rd7, %r1, 16; add.u64 %rd7, %rd7, %rd1; cp.async.cg.shared.global [%r8], [%rd7], 16;\n";
    let after = format!("{copy}cp.async.wait_all; fence.proxy.async; bar.sync 0;");
    let before = format!("{copy}fence.proxy.async; cp.async.wait_all; bar.sync 0;");
    passes(&[("// before", &after)]);
    fails(&[("// before", &before)], has_no_proxy_fence);
    let unwaited = format!("{copy}fence.proxy.async; bar.sync 0;");
    fails(&[("// before", &unwaited)], |fault| {
        matches!(fault, Fault::PendingCopy { .. })
    });
    // Without a barrier, it is a race.
    fails(&[(publish, "fence.proxy.async;")], |fault| {
        matches!(
            fault,
            Fault::Race { .. } | Fault::UninitialisedMemory { .. }
        )
    });
}

#[test]
fn whole_warpgroups_execute_the_same_products() {
    let product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, {%a0";
    let guarded = |predicate: &str| format!("{predicate} @%p2 {product}");
    let first_lane = guarded("setp.ne.u32 %p2, %r1, 0;");
    fails(&[(product, &first_lane)], |fault| {
        matches!(fault, Fault::InactiveLanes { .. })
    });
    fails(
        &[("setmaxnreg", "setp.ne.u32 %p2, %r1, 0; @%p2 setmaxnreg")],
        |fault| matches!(fault, Fault::InactiveLanes { .. }),
    );
    let first_warp = guarded("setp.ge.u32 %p2, %r1, 32;");
    fails(&[(product, &first_warp)], |fault| {
        matches!(fault, Fault::WarpgroupDiffers { .. })
    });
    // One of the warpgroups may execute other products than the other.
    passes(&[(product, &guarded("setp.ge.u32 %p2, %r1, 128;"))]);
    let exit = "setp.lt.u32 %p2, %r1, 32; @%p2 exit;";
    fails(&[("// second fence\n", exit)], |fault| {
        matches!(fault, Fault::WarpgroupExited { .. })
    });
    passes(&[("// second fence\n", "setp.lt.u32 %p2, %r1, 128; @%p2 exit;")]);
    let other = "setp.lt.u32 %p2, %r1, 32; @%p2 add.u64 %x1, %x1, 2;";
    fails(&[("// fenced", other)], |fault| {
        matches!(fault, Fault::WarpgroupDiffers { .. })
    });
    fails(&[("// fenced", "setp.ne.u32 %p1, %r1, 0;")], |fault| {
        matches!(fault, Fault::NotUniform)
    });
    fails(&[("// fenced", "cvt.u64.u32 %x1, %r1;")], |fault| {
        matches!(fault, Fault::NotUniform)
    });
    let (fault, _) = fault_of(ordered(&[], 224, 0));
    assert!(
        matches!(fault, Fault::NoWarpgroup { threads: 224 }),
        "{fault}"
    );
}

#[test]
fn descriptors_are_checked() {
    for (bits, problem) in [
        ("xor.b64 %x1, %x1, 0xC000000000000000;", "swizzle"),
        ("or.b64 %x1, %x1, 0x0002000000000000;", "base offset"),
        ("or.b64 %x1, %x1, 0x0000000000004000;", "must be 0"),
    ] {
        let (fault, _) = fault_of(ordered(&[("// before", bits)], 256, 0));
        assert!(fault.to_string().contains(problem), "{fault}");
    }
    fails(&[("// before", "or.b64 %x1, %x1, 0x3000;")], |fault| {
        matches!(fault, Fault::OutOfWindow { .. })
    });
}
