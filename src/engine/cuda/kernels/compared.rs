//! Compares the kernels' source, run on the processor, with the CPU engine on random inputs.
//!
//! Widths are not multiples of the block's threads, so that a test covers every thread's last element.

use std::ffi::c_void;
use std::ptr;

use half::bf16;

use super::host::Host;
use crate::engine::cpu::kernels::{adamw, cross_entropy, rmsnorm, rope, swiglu};
use crate::engine::{AdamW, IGNORE, Parameter, Unit};

const THREADS: usize = 16;

/// Blocks that give each element a thread.
fn blocks(elements: usize) -> usize {
    elements.div_ceil(THREADS)
}

fn of<T>(parameter: &T) -> *const c_void {
    ptr::from_ref(parameter).cast()
}

/// Numbers in [−scale, scale), the same in every run (splitmix64).
fn random(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut random = crate::util::random::Random::seeded(seed);
    let next = || {
        let bits = random.next_u64() >> 40;
        (bits as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Asserts that every element is within 1e-5 of the expected one, relative to that or to the tensor's root
/// mean square, whichever is larger (sums may cancel).
#[track_caller]
fn agree(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let squares: f64 = expected.iter().map(|&x| f64::from(x).powi(2)).sum();
    let typical = (squares / expected.len() as f64).sqrt() as f32;
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let allowed = 1e-5 * expected.abs().max(typical);
        assert!(
            (got - expected).abs() <= allowed,
            "{what}[{i}]: {got}, not {expected}"
        );
    }
}

#[test]
fn rmsnorm_agrees() {
    let Some(host) = Host::get() else { return };
    let (n, width, eps) = (37, 83, 1e-5f32);
    let (x, w) = (random(1, n * width, 2.0), random(2, width, 1.5));
    let (dy, before) = (random(3, n * width, 0.1), random(4, n * width, 0.1));
    let dw_before = random(5, width, 0.1);

    let (mut y, mut inverse) = (vec![0.0; n * width], vec![0.0; n]);
    rmsnorm::forward(&mut y, &mut inverse, &x, &w, eps);
    let (mut y_to_be, mut inverse_to_be) = (vec![0.0f32; n * width], vec![0.0f32; n]);
    // SAFETY: the parameters and shapes of rmsnorm.cu.
    unsafe {
        host.launch(
            "rmsnorm_forward",
            (n, THREADS),
            &[
                of(&y_to_be.as_mut_ptr()),
                of(&inverse_to_be.as_mut_ptr()),
                of(&x.as_ptr()),
                of(&w.as_ptr()),
                of(&(width as i32)),
                of(&eps),
            ],
        );
    }
    agree("y", &y_to_be, &y);
    agree("inverse", &inverse_to_be, &inverse);

    for add in [false, true] {
        let mut scratch = vec![0.0; rmsnorm::scratch_len(n, width)];
        let (mut dy_to_y, mut dx, mut dw) = (dy.clone(), before.clone(), dw_before.clone());
        let weight = (&mut dw[..], add);
        rmsnorm::backward(
            &mut dy_to_y,
            &mut dx,
            weight,
            &x,
            &inverse,
            &w,
            &mut scratch,
        );

        let (mut dy_to_be, mut dx_to_be, mut dw_to_be) =
            (dy.clone(), before.clone(), dw_before.clone());
        // SAFETY: the parameters and shapes of rmsnorm.cu.
        unsafe {
            host.launch(
                "rmsnorm_backward_weight",
                (blocks(width), THREADS),
                &[
                    of(&dw_to_be.as_mut_ptr()),
                    of(&dy_to_be.as_ptr()),
                    of(&x.as_ptr()),
                    of(&inverse.as_ptr()),
                    of(&(n as i32)),
                    of(&(width as i32)),
                    of(&i32::from(add)),
                ],
            );
            host.launch(
                "rmsnorm_backward_input",
                (n, THREADS),
                &[
                    of(&dy_to_be.as_mut_ptr()),
                    of(&dx_to_be.as_mut_ptr()),
                    of(&x.as_ptr()),
                    of(&inverse.as_ptr()),
                    of(&w.as_ptr()),
                    of(&(width as i32)),
                ],
            );
        }
        agree("y again", &dy_to_be, &dy_to_y);
        agree("dx", &dx_to_be, &dx);
        agree("dw", &dw_to_be, &dw);
    }
}

#[test]
fn rope_agrees() {
    let Some(host) = Host::get() else { return };
    // Three heads of a row rotate, the rest of the row does not.
    let (n, seq_len, head_dim, heads, row) = (42, 21, 10, 3, 3 * 10 + 7);
    let mut table = vec![0.0; seq_len * head_dim];
    rope::fill_table(&mut table, head_dim, 10000.0);
    let x = random(6, n * row, 1.0);
    for (kernel, direction) in [
        ("rope_forward", rope::Direction::Forward),
        ("rope_backward", rope::Direction::Backward),
    ] {
        let (mut expected, mut got) = (x.clone(), x.clone());
        rope::rotate(
            &mut expected,
            row,
            heads,
            (&table, seq_len, head_dim),
            direction,
        );
        // SAFETY: the parameters and shapes of rope.cu.
        unsafe {
            host.launch(
                kernel,
                (n, THREADS),
                &[
                    of(&got.as_mut_ptr()),
                    of(&(row as i32)),
                    of(&(heads as i32)),
                    of(&table.as_ptr()),
                    of(&(seq_len as i32)),
                    of(&(head_dim as i32)),
                ],
            );
        }
        agree(kernel, &got, &expected);
    }
}

#[test]
fn swiglu_agrees() {
    let Some(host) = Host::get() else { return };
    let (n, inner) = (29, 45);
    let elements = n * inner;
    let (gate_up, dh) = (random(7, 2 * elements, 6.0), random(8, elements, 0.1));

    let (mut h, mut h_to_be) = (vec![0.0; elements], vec![0.0f32; elements]);
    swiglu::forward(&mut h, &gate_up, inner);
    let grid = (blocks(elements), THREADS);
    // SAFETY: the parameters and shapes of swiglu.cu.
    unsafe {
        host.launch(
            "swiglu_forward",
            grid,
            &[
                of(&h_to_be.as_mut_ptr()),
                of(&gate_up.as_ptr()),
                of(&elements),
                of(&(inner as i32)),
            ],
        );
    }
    agree("h", &h_to_be, &h);

    let (mut dh_to_h, mut gradient) = (dh.clone(), gate_up.clone());
    swiglu::backward(&mut dh_to_h, &mut gradient, inner);
    let (mut dh_to_be, mut gradient_to_be) = (dh, gate_up);
    // SAFETY: the parameters and shapes of swiglu.cu.
    unsafe {
        host.launch(
            "swiglu_backward",
            grid,
            &[
                of(&dh_to_be.as_mut_ptr()),
                of(&gradient_to_be.as_mut_ptr()),
                of(&elements),
                of(&(inner as i32)),
            ],
        );
    }
    agree("h again", &dh_to_be, &dh_to_h);
    agree("gradient", &gradient_to_be, &gradient);
}

#[test]
fn cross_entropy_agrees_and_rows_without_a_target_have_no_loss_or_gradient() {
    let Some(host) = Host::get() else { return };
    let (n, vocabulary) = (23, 151);
    // Large differences, so that only a shift by a row's maximum avoids an overflow.
    let logits = random(9, n * vocabulary, 100.0);
    let target = |row: usize| (row * 37 % vocabulary) as u32;
    let mut targets: Vec<u32> = (0..n).map(target).collect();
    targets[4] = IGNORE;
    targets[n - 1] = IGNORE;

    // The CPU engine takes only rows with a target.
    let (mut losses, mut gradient) = (vec![0.0; n], vec![0.0; n * vocabulary]);
    for row in (0..n).filter(|&row| targets[row] != IGNORE) {
        let at = row * vocabulary..(row + 1) * vocabulary;
        gradient[at.clone()].copy_from_slice(&logits[at.clone()]);
        let target = &targets[row..=row];
        losses[row] = cross_entropy::forward_backward(&mut gradient[at], target, vocabulary);
    }

    for kernel in ["cross_entropy_forward", "cross_entropy_forward_backward"] {
        let (mut losses_to_be, mut logits_to_be) = (vec![f64::NAN; n], logits.clone());
        // SAFETY: the parameters and shapes of cross_entropy.cu.
        unsafe {
            host.launch(
                kernel,
                (n, THREADS),
                &[
                    of(&losses_to_be.as_mut_ptr()),
                    of(&logits_to_be.as_mut_ptr()),
                    of(&targets.as_ptr()),
                    of(&(vocabulary as i32)),
                ],
            );
        }
        for row in 0..n {
            let (got, expected) = (losses_to_be[row], losses[row]);
            assert!(
                (got - expected).abs() <= 1e-5 * expected,
                "loss {row}: {got}, not {expected}"
            );
        }
        match kernel {
            "cross_entropy_forward" => assert_eq!(logits_to_be, logits),
            _ => agree("gradient", &logits_to_be, &gradient),
        }
    }
}

#[test]
fn adamw_agrees_and_rounds_its_copy_to_bf16() {
    let Some(host) = Host::get() else { return };
    let elements = 1003;
    let step = AdamW {
        learning_rate: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 3,
        gradient_scale: 0.5,
    };
    for decay in [false, true] {
        let unit = Unit {
            name: String::new(),
            parameters: vec![Parameter {
                name: String::new(),
                shape: vec![elements, 1],
                offset: 0,
                decay,
            }],
            len: elements,
        };
        let (mut w, mut g) = (random(10, elements, 1.0), random(11, elements, 3.0));
        let (mut m, mut v) = (random(12, elements, 0.1), random(13, elements, 0.2));
        v.iter_mut().for_each(|v| *v = v.abs());
        // Without gradient and decay these values do not change: halfway between two bf16, below and above an
        // even one, past the largest, and NaN.
        let still = [0x3f80_8000, 0x3f81_8000, f32::MAX.to_bits(), 0x7f80_0001].map(f32::from_bits);
        w[..still.len()].copy_from_slice(&still);
        for x in [&mut g, &mut m, &mut v] {
            x[..still.len()].fill(0.0);
        }

        let (mut w_to_be, mut m_to_be, mut v_to_be) = (w.clone(), m.clone(), v.clone());
        let mut copy = vec![0u16; elements];
        let factors = adamw::Factors::new(&step, decay);
        // SAFETY: the parameters and shapes of adamw.cu; `Factors` has the same layout as in C.
        unsafe {
            host.launch(
                "adamw",
                (blocks(elements), THREADS),
                &[
                    of(&w_to_be.as_mut_ptr()),
                    of(&copy.as_mut_ptr()),
                    of(&g.as_ptr()),
                    of(&m_to_be.as_mut_ptr()),
                    of(&v_to_be.as_mut_ptr()),
                    of(&elements),
                    of(&factors),
                ],
            );
        }
        adamw::update(&unit, 0, &mut w, &g, &mut m, &mut v, &step);
        agree("exp_avg", &m_to_be, &m);
        agree("exp_avg_sq", &v_to_be, &v);
        let moved = still.len()..;
        agree("weights", &w_to_be[moved.clone()], &w[moved]);
        let bits = |w: &f32| bf16::from_f32(*w).to_bits();
        assert_eq!(copy, w_to_be.iter().map(bits).collect::<Vec<u16>>());
        if !decay {
            assert_eq!(copy[..3], [0x3f80, 0x3f82, 0x7f80]);
            assert!(bf16::from_bits(copy[3]).is_nan());
        }
    }
}
