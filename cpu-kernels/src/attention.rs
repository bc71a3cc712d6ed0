//! Causal grouped-query attention, in blocks of queries.
//!
//! A block of queries uses only the keys that they see, so that at least nearly half of the square is never
//! computed and its scores fit the second-level cache. Forward stores only the logarithm of each query's
//! softmax sum; backward recomputes the probabilities (Dao et al., 2022).
//!
//! `qkv` is `[n, (heads + 2 × kv_heads) × head_dim]`: the query heads of a row, its key heads, its value
//! heads. Its rows are those of sequences that do not see each other, adjacent and in order. The numbers of queries are
//! those of a sequence, `[heads, tokens]`, then those of the next.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::exp::{exp, exp_and_sum, max};
use super::matrix::{Matrix, MatrixMut, multiply};
use super::{dot, vectorised};

const BLOCK: usize = 64;

/// Shapes of the attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Keys that a query sees, itself included; `None`: all up to itself.
    pub window: Option<usize>,
}

impl Shape {
    /// Width of a row of `qkv`, in elements.
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of a row of queries and keys, in elements.
    pub fn queries_and_keys(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim
    }

    /// One head of a sequence, `[tokens, head_dim]`.
    fn head<'a>(&self, all: Matrix<'a>, sequence: &Range<usize>, head: usize) -> Matrix<'a> {
        let head_dim = self.head_dim;
        all.block(sequence.start, head * head_dim, sequence.len(), head_dim)
    }

    /// The queries, keys and values of a query head.
    fn operands<'a>(
        &self,
        qkv: Matrix<'a>,
        sequence: &Range<usize>,
        head: usize,
    ) -> (Matrix<'a>, Matrix<'a>, Matrix<'a>) {
        let key = self.heads + head / (self.heads / self.kv_heads);
        (
            self.head(qkv, sequence, head),
            self.head(qkv, sequence, key),
            self.head(qkv, sequence, key + self.kv_heads),
        )
    }

    fn factor(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// The first key that a query sees.
    fn first_key(&self, query: usize) -> usize {
        self.window
            .map_or(0, |window| (query + 1).saturating_sub(window))
    }
}

/// Scratch for two blocks of scores per thread.
#[derive(Debug)]
pub struct Scratch {
    threads: Vec<Mutex<[Vec<f32>; 2]>>,
}

impl Scratch {
    /// Elements of each block, for sequences of up to `seq_len` tokens.
    pub fn block_len(seq_len: usize) -> usize {
        BLOCK.min(seq_len) * seq_len
    }

    /// Two blocks of at least [`Scratch::block_len`] for each thread of the pool.
    pub fn new(threads: Vec<[Vec<f32>; 2]>) -> Scratch {
        Scratch {
            threads: threads.into_iter().map(Mutex::new).collect(),
        }
    }

    /// Lends this thread's two blocks.
    fn with<R>(&self, f: impl FnOnce(&mut [f32], &mut [f32]) -> R) -> R {
        let thread = rayon::current_thread_index().unwrap_or(0);
        // Each thread has its own scratch, whose content is unspecified between uses.
        let blocks = self.threads[thread].lock();
        let mut blocks = blocks.unwrap_or_else(PoisonError::into_inner);
        let [first, second] = &mut *blocks;
        f(first, second)
    }
}

/// The number of tokens, which is the end of the last sequence.
fn tokens(sequences: &[Range<usize>]) -> usize {
    sequences.last().map_or(0, |sequence| sequence.end)
}

/// out `[n, heads × head_dim]` and log_sums.
pub fn forward(
    out: &mut [f32],
    log_sums: &mut [f32],
    qkv: &[f32],
    (shape, sequences): (Shape, &[Range<usize>]),
    scratch: &Scratch,
) {
    let Shape {
        heads, head_dim, ..
    } = shape;
    let n = tokens(sequences);
    let all = Matrix::new(qkv, n, shape.qkv());
    let outs = MatrixMut::new(out, n, heads * head_dim).bands(sequences.iter().cloned(), head_dim);
    let mut rest = log_sums;
    let tasks: Vec<_> = (outs.into_iter().enumerate())
        .map(|(i, out)| {
            let (sequence, head) = (&sequences[i / heads], i % heads);
            let (log_sums, later) = std::mem::take(&mut rest).split_at_mut(sequence.len());
            rest = later;
            (sequence, head, out, log_sums)
        })
        .collect();
    tasks
        .into_par_iter()
        .for_each(|(sequence, head, mut out, log_sums)| {
            let (q, k, v) = shape.operands(all, sequence, head);
            scratch.with(|scores, _| {
                for from in (0..sequence.len()).step_by(BLOCK) {
                    let to = sequence.len().min(from + BLOCK);
                    let first = shape.first_key(from);
                    let (rows, keys) = (to - from, to - first);
                    let scores = &mut scores[..rows * keys];
                    let q = q.block(from, 0, rows, head_dim);
                    let k = k.block(first, 0, keys, head_dim);
                    let v = v.block(first, 0, keys, head_dim);
                    let product = MatrixMut::new(scores, rows, keys);
                    multiply(product, q, k.t(), shape.factor(), false);
                    softmax(scores, &mut log_sums[from..to], from, shape);
                    let p = Matrix::new(scores, rows, keys);
                    multiply(out.rows(from, to), p, v, 1.0, false);
                }
            });
        });
}

/// Keys and values of the tokens of one sequence so far, `[tokens, 2 × kv_heads × head_dim]`: the key heads of a row, its
/// value heads.
#[derive(Debug, Clone, Copy)]
pub struct Cache<'a> {
    pub rows: &'a [f32],
    /// Tokens before the first query's.
    pub past: usize,
}

/// Puts the keys and values of `qkv` `[n, qkv]` into the rows `cache` `[n, 2 × kv_heads × head_dim]`.
pub fn fill_cache(cache: &mut [f32], qkv: &[f32], shape: Shape) {
    let queries = shape.heads * shape.head_dim;
    let rows = cache.chunks_exact_mut(shape.qkv() - queries);
    for (row, qkv) in rows.zip(qkv.chunks_exact(shape.qkv())) {
        row.copy_from_slice(&qkv[queries..]);
    }
}

/// out `[n, heads × head_dim]` of the last n tokens of one sequence, whose queries are in `qkv` `[n, qkv]`, and whose keys
/// and values the `cache` has.
pub fn over_cache(out: &mut [f32], qkv: &[f32], cache: Cache<'_>, shape: Shape, scratch: &Scratch) {
    let Shape {
        heads,
        kv_heads,
        head_dim,
        ..
    } = shape;
    let n = qkv.len() / shape.qkv();
    let queries = Matrix::new(qkv, n, shape.qkv());
    let keys_and_values = Matrix::new(cache.rows, cache.past + n, 2 * kv_heads * head_dim);
    let outs = MatrixMut::new(out, n, heads * head_dim).grid(n, head_dim);
    outs.into_par_iter()
        .enumerate()
        .for_each(|(head, mut out)| {
            let key_head = head / (heads / kv_heads);
            scratch.with(|scores, _| {
                for from in (0..n).step_by(BLOCK) {
                    let to = n.min(from + BLOCK);
                    // Within the sequence.
                    let (query, end) = (cache.past + from, cache.past + to);
                    let first = shape.first_key(query);
                    let (rows, keys) = (to - from, end - first);
                    let of = |head| keys_and_values.block(first, head * head_dim, keys, head_dim);
                    let (k, v) = (of(key_head), of(kv_heads + key_head));
                    let q = queries.block(from, head * head_dim, rows, head_dim);
                    let scores = &mut scores[..rows * keys];
                    let product = MatrixMut::new(scores, rows, keys);
                    multiply(product, q, k.t(), shape.factor(), false);
                    softmax(scores, &mut [0.0; BLOCK][..rows], query, shape);
                    let p = Matrix::new(scores, rows, keys);
                    multiply(out.rows(from, to), p, v, 1.0, false);
                }
            });
        });
}

/// Rows of causal softmax over the scores of the queries from `from` on and the keys that they see, in place.
fn softmax(scores: &mut [f32], log_sums: &mut [f32], from: usize, shape: Shape) {
    let first = shape.first_key(from);
    let keys = scores.len() / log_sums.len();
    vectorised(
        #[inline(always)]
        || {
            for (i, (row, log_sum)) in scores.chunks_exact_mut(keys).zip(log_sums).enumerate() {
                let query = from + i;
                let (row, unseen) = row.split_at_mut(query + 1 - first);
                let (too_early, seen) = row.split_at_mut(shape.first_key(query) - first);
                too_early.fill(0.0);
                let shift = max(seen);
                let sum = exp_and_sum(seen, shift);
                let inverse = 1.0 / sum;
                for p in seen {
                    *p *= inverse;
                }
                unseen.fill(0.0);
                *log_sum = shift + sum.ln();
            }
        },
    )
}

/// dqkv from dout; they have the shapes of `qkv` and `out`.
pub fn backward(
    dqkv: &mut [f32],
    dout: &[f32],
    (qkv, out, log_sums): (&[f32], &[f32], &[f32]),
    (shape, sequences): (Shape, &[Range<usize>]),
    scratch: &Scratch,
) {
    let Shape {
        heads,
        kv_heads,
        head_dim,
        ..
    } = shape;
    let group = heads / kv_heads;
    let n = tokens(sequences);
    let all = Matrix::new(qkv, n, shape.qkv());
    let outs = Matrix::new(out, n, heads * head_dim);
    let douts = Matrix::new(dout, n, heads * head_dim);

    // One task takes a key head with its group of query heads and adds up their gradients.
    let mut blocks =
        MatrixMut::new(dqkv, n, shape.qkv()).bands(sequences.iter().cloned(), head_dim);
    let mut tasks = Vec::with_capacity(sequences.len() * kv_heads);
    for sequence in sequences.iter().rev() {
        let mut dv = blocks.split_off(blocks.len() - kv_heads);
        let mut dk = blocks.split_off(blocks.len() - kv_heads);
        let mut dq = blocks.split_off(blocks.len() - heads);
        for kv_head in (0..kv_heads).rev() {
            if let (Some(dk), Some(dv)) = (dk.pop(), dv.pop()) {
                let dq = dq.split_off(dq.len() - group);
                tasks.push((sequence, kv_head, dq, dk, dv));
            }
        }
    }

    tasks
        .into_par_iter()
        .for_each(|(sequence, kv_head, dq, mut dk, mut dv)| {
            let seq_len = sequence.len();
            scratch.with(|p, ds| {
                for (member, mut dq) in dq.into_iter().enumerate() {
                    let head = kv_head * group + member;
                    let (q, k, v) = shape.operands(all, sequence, head);
                    let log_sums = &log_sums[sequence.start * heads + head * seq_len..][..seq_len];
                    let head = Head {
                        q,
                        k,
                        v,
                        out: shape.head(outs, sequence, head),
                        dout: shape.head(douts, sequence, head),
                        log_sums,
                        shape,
                    };
                    // The last block runs first. If it touches every key, it may overwrite.
                    let last = (seq_len - 1) / BLOCK;
                    let overwrites = member == 0 && shape.first_key(last * BLOCK) == 0;
                    if member == 0 && !overwrites {
                        dk.fill(0.0);
                        dv.fill(0.0);
                    }
                    for block in (0..=last).rev() {
                        let (from, to) = (block * BLOCK, seq_len.min((block + 1) * BLOCK));
                        let first = shape.first_key(from);
                        let add = !(overwrites && block == last);
                        let scores = (to - from) * (to - first);
                        head.backward_block(
                            (from, to),
                            (dq.rows(from, to), dk.rows(first, to), dv.rows(first, to)),
                            add,
                            &mut p[..scores],
                            &mut ds[..scores],
                        );
                    }
                }
            });
        });
}

/// One query head of one sequence, `[tokens, head_dim]` each.
struct Head<'a> {
    q: Matrix<'a>,
    k: Matrix<'a>,
    v: Matrix<'a>,
    out: Matrix<'a>,
    dout: Matrix<'a>,
    log_sums: &'a [f32],
    shape: Shape,
}

impl Head<'_> {
    /// Gradients of the queries `from..to`: dq is overwritten; dk and dv are overwritten unless `add`.
    fn backward_block(
        &self,
        (from, to): (usize, usize),
        (dq, dk, dv): (MatrixMut<'_>, MatrixMut<'_>, MatrixMut<'_>),
        add: bool,
        p: &mut [f32],
        ds: &mut [f32],
    ) {
        let (rows, head_dim) = (to - from, self.q.columns());
        let first = self.shape.first_key(from);
        let keys = to - first;
        let q = self.q.block(from, 0, rows, head_dim);
        let dout = self.dout.block(from, 0, rows, head_dim);
        let k = self.k.block(first, 0, keys, head_dim);
        let v = self.v.block(first, 0, keys, head_dim);
        let factor = self.shape.factor();

        multiply(MatrixMut::new(p, rows, keys), q, k.t(), factor, false);
        multiply(MatrixMut::new(ds, rows, keys), dout, v.t(), 1.0, false);
        self.probabilities(from, keys, p, ds);
        let (p, ds) = (Matrix::new(p, rows, keys), Matrix::new(ds, rows, keys));
        multiply(dv, p.t(), dout, 1.0, add);
        multiply(dq, ds, k, factor, false);
        multiply(dk, ds.t(), q, factor, add);
    }

    /// Turns the scores in `p` into probabilities, and the gradient of the probabilities in `ds` into that of
    /// the scores.
    fn probabilities(&self, from: usize, keys: usize, p: &mut [f32], ds: &mut [f32]) {
        let first = self.shape.first_key(from);
        vectorised(
            #[inline(always)]
            || {
                let rows = p.chunks_exact_mut(keys).zip(ds.chunks_exact_mut(keys));
                for (i, (p, ds)) in rows.enumerate() {
                    let query = from + i;
                    let along = dot(self.out.row(query), self.dout.row(query));
                    let log_sum = self.log_sums[query];
                    let (from, to) = (self.shape.first_key(query) - first, query + 1 - first);
                    let seen = p[from..to].iter_mut().zip(&mut ds[from..to]);
                    for (p, ds) in seen {
                        *p = exp(*p - log_sum);
                        *ds = *p * (*ds - along);
                    }
                    for row in [p, ds] {
                        row[..from].fill(0.0);
                        row[to..].fill(0.0);
                    }
                }
            },
        )
    }
}
