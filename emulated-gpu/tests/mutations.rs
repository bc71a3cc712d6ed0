//! Plants mistakes in the engine's kernels and asserts which check finds each of them.
//!
//! A mistake replaces a piece of a source that occurs once. The checks are those of the kernels' own tests, and
//! the sources as they are must pass them.

mod support;

use support::attention::{self, Shape};
use support::caught::{Caught, Check};
use support::kernels::{self, Compiled, HEADERS, Real, compile, source};
use support::nvrtc::{self, Nvrtc};

const ARCHITECTURE: &str = "sm_90a";

/// A source with one of its checks.
struct Subject {
    source: (&'static str, &'static str),
    real: Real,
    /// The head size that attention is compiled for.
    head_dim: Option<usize>,
    check: fn(&Compiled) -> Result<(), Caught>,
    mutations: Vec<Mutation>,
}

/// A mistake in a source or a header.
struct Mutation {
    what: &'static str,
    /// The text and what replaces it.
    from: &'static str,
    to: &'static str,
    /// The checks of which one must find it.
    by: &'static [Check],
}

/// What finds a missing order of two threads. Which of them runs first depends on the code that NVRTC emits.
const UNORDERED: &[Check] = &[Check::Race, Check::Uninitialised, Check::PendingCopy];

fn mutation(
    what: &'static str,
    by: &'static [Check],
    from: &'static str,
    to: &'static str,
) -> Mutation {
    Mutation { what, from, to, by }
}

impl Subject {
    /// Compiles the source, after replacing `change.0` in it or in a header by `change.1`, and checks it. Gives
    /// the file that was changed in addition.
    fn run(
        &self,
        nvrtc: &Nvrtc,
        change: Option<(&str, &str)>,
    ) -> (&'static str, Result<(), Caught>) {
        let included = |header: &(&str, &str)| self.source.1.contains(&format!("\"{}\"", header.0));
        let files = [self.source]
            .into_iter()
            .chain(HEADERS.into_iter().filter(included));
        let mut files: Vec<(&'static str, String)> =
            files.map(|(file, text)| (file, text.to_owned())).collect();
        let mut changed = self.source.0;
        if let Some((from, to)) = change {
            let occurrences: usize = files.iter().map(|file| file.1.matches(from).count()).sum();
            assert_eq!(occurrences, 1, "occurrences of `{from}` in {changed}");
            for (file, text) in &mut files {
                if text.contains(from) {
                    *text = text.replace(from, to);
                    changed = file;
                }
            }
        }
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(file, text)| (*file, text.as_str()))
            .collect();
        let of = match self.head_dim {
            None => {
                let target = (ARCHITECTURE, None);
                compile(nvrtc, files[0], &files[1..], target, self.real)
            }
            Some(size) => attention::compile(
                nvrtc,
                (files[0], self.real),
                &files[1..],
                ARCHITECTURE,
                size,
            ),
        };
        (changed, (self.check)(&of))
    }
}

fn embedding() -> Subject {
    Subject {
        source: source!("embedding.cu"),
        real: Real::F32,
        head_dim: None,
        check: kernels::embedding,
        mutations: vec![
            mutation(
                "the noise of the first sequence for all",
                &[Check::Value],
                "noise + blockIdx.x / seq_len * 3",
                "noise",
            ),
            mutation(
                "the same noise at every position",
                &[Check::Value],
                "(unsigned long long)(blockIdx.x % seq_len) * hidden",
                "0",
            ),
            mutation(
                "noise above 0 only",
                &[Check::Value],
                "* (1.0f / 8388608.0f) - 1.0f",
                "* (1.0f / 16777216.0f)",
            ),
            mutation(
                "the gradient of embeddings without their factor",
                &[Check::Value],
                "sum[j] * scale;",
                "sum[j];",
            ),
            mutation(
                "a block more than there are tokens",
                &[Check::OutOfBounds],
                "if (blockIdx.x >= *count) return;",
                "if (blockIdx.x > *count) return;",
            ),
            mutation(
                "only the first occurrence of a token",
                &[Check::Value],
                "starts[blockIdx.x + 1], hidden, scale}",
                "starts[blockIdx.x] + 1, hidden, scale}",
            ),
            mutation(
                "no occurrence of a token after 256",
                &[Check::Value],
                "for (unsigned k = first; k < last; k++) {",
                "for (unsigned k = first; k < min(last, first + 256); k++) {",
            ),
            mutation(
                "sums that do not begin at 0",
                &[Check::Uninitialised, Check::Value],
                "float sum[N] = {}, total[N];",
                "float sum[N], total[N];",
            ),
            mutation(
                "the row of a token without the column",
                &[Check::Value],
                "order[k] * hidden + i);",
                "order[k] * hidden);",
            ),
            mutation(
                "no check that rows are whole packs",
                &[Check::Misaligned],
                "hidden % 4 == 0 && aligned(x)",
                "aligned(x)",
            ),
            mutation(
                "the row for its position",
                &[Check::OutOfBounds],
                "places[blockIdx.x] : blockIdx.x % seq_len",
                "places[blockIdx.x] : blockIdx.x",
            ),
            mutation(
                "positions scaled as tokens",
                &[Check::Value],
                "v[j] += p[j];",
                "v[j] += scale * p[j];",
            ),
            mutation(
                "only the first sequence's gradient of positions",
                &[Check::Value],
                "for (int row = 0; row < rows; row++) {",
                "for (int row = 0; row < 1; row++) {",
            ),
        ],
    }
}

fn rmsnorm() -> Subject {
    Subject {
        source: source!("rmsnorm.cu"),
        real: Real::F32,
        head_dim: None,
        check: kernels::rmsnorm,
        mutations: vec![
            mutation(
                "the weights of a norm without what is added to them, in registers",
                &[Check::Value],
                "w[j] += of.shift;",
                "",
            ),
            mutation(
                "the weights of a norm without what is added to them, in memory",
                &[Check::Value],
                "w = of.shift + of.weights[i];",
                "w = of.weights[i];",
            ),
            mutation(
                "no epsilon",
                &[Check::Value],
                "block_sum(squares.sum) / width + eps)",
                "block_sum(squares.sum) / width)",
            ),
            mutation(
                "no check of an address's alignment",
                &[Check::Misaligned],
                "width % 4 == 0 && aligned(x) && aligned(y)",
                "width % 4 == 0 && aligned(y)",
            ),
            mutation(
                "column sums in memory that do not begin at 0",
                &[Check::Uninitialised],
                "for (int i = threadIdx.x; i < of.width; i += blockDim.x) of.partial[i] = 0;",
                "",
            ),
            mutation(
                "rows of the last block past the end",
                &[Check::OutOfBounds],
                "first, min(n, first + rows), width}",
                "first, first + rows, width}",
            ),
            mutation(
                "no bound of the columns that a thread reads",
                &[Check::OutOfBounds],
                "if (i >= of.width) continue;\n            load(x[p]",
                "load(x[p]",
            ),
            mutation(
                "return where other threads reduce",
                &[Check::AbsentLanes, Check::Uninitialised],
                "if (i >= of.width) continue;\n            load(x[p]",
                "if (i >= of.width) return;\n            load(x[p]",
            ),
            mutation(
                "`<=` for `<` in the bound of a store",
                &[Check::OutOfBounds],
                "if (i < of.width) store(of.partial",
                "if (i <= of.width) store(of.partial",
            ),
            mutation(
                "no barrier after the warps' sums",
                UNORDERED,
                "if (lane == 0) partial[warp] = value;\n    __syncthreads();\n    value = warp_sum(lane",
                "if (lane == 0) partial[warp] = value;\n    value = warp_sum(lane",
            ),
            mutation(
                "a barrier that one lane of each warp reaches",
                UNORDERED,
                "if (lane == 0) partial[warp] = value;\n    __syncthreads();\n    value = warp_sum(lane",
                "if (lane == 0) {\n        partial[warp] = value;\n        __syncthreads();\n    }\n    \
                 value = warp_sum(lane",
            ),
            mutation(
                "a barrier that the first warp reaches",
                &[Check::Barrier],
                "// The next reduction may write only after every thread has read.\n    __syncthreads();",
                "if (warp == 0) __syncthreads();",
            ),
        ],
    }
}

fn column_sums() -> Subject {
    Subject {
        source: source!("rmsnorm.cu"),
        real: Real::F32,
        head_dim: None,
        check: kernels::column_sums,
        mutations: vec![
            mutation(
                "no barrier before the warps' sums are added",
                UNORDERED,
                "of_warps[warp][lane] = sum;\n    __syncthreads();",
                "of_warps[warp][lane] = sum;",
            ),
            mutation(
                "no row of sums after 512",
                &[Check::Value],
                "for (int b = warp; b < blocks; b += warps)",
                "for (int b = warp; b < min(blocks, 512); b += warps)",
            ),
            mutation(
                "the first warp's sum twice",
                &[Check::Value],
                "for (int other = 1;",
                "for (int other = 0;",
            ),
            mutation(
                "no bound of the columns",
                &[Check::OutOfBounds],
                "    if (i < width) {\n        for",
                "    {\n        for",
            ),
        ],
    }
}

fn bias() -> Subject {
    Subject {
        source: source!("bias.cu"),
        real: Real::Bf16,
        head_dim: None,
        check: kernels::bias,
        mutations: vec![
            mutation(
                "the first bias for each",
                &[Check::Value],
                "load(bias, b + i);",
                "load(bias, b);",
            ),
            mutation(
                "no check that rows are whole packs",
                &[Check::Misaligned],
                "width % 4 == 0 && aligned(y)",
                "aligned(y)",
            ),
            mutation(
                "rows of the last block past the end",
                &[Check::OutOfBounds],
                "last = min(n, first + rows);",
                "last = first + rows;",
            ),
            mutation(
                "sums over the rows of all blocks before",
                &[Check::Value],
                "int row = first; row < last",
                "int row = 0; row < last",
            ),
            mutation(
                "no loop over columns beyond the threads",
                &[Check::Uninitialised, Check::Value],
                "i < width; i += blockDim.x) {",
                "i < width; i += 2 * blockDim.x) {",
            ),
        ],
    }
}

fn head_norms() -> Subject {
    Subject {
        source: source!("head_norms.cu"),
        real: Real::F32,
        head_dim: Some(40),
        check: |of| kernels::head_norms(of, 40),
        mutations: vec![
            mutation(
                "the queries' weights for the keys",
                &[Check::Value],
                "const float *weights = w + (head < heads ? 0 : HEAD_DIM);\n        float x[PER_LANE], sum",
                "const float *weights = w;\n        float x[PER_LANE], sum",
            ),
            mutation(
                "no epsilon",
                &[Check::Value],
                "warp_sum(squares) / HEAD_DIM + eps)",
                "warp_sum(squares) / HEAD_DIM)",
            ),
            mutation(
                "values are normed, too",
                &[Check::Value, Check::OutOfBounds],
                "head < normed; head += WARPS) {\n        const float *weights",
                "head < normed + kv_heads; head += WARPS) {\n        const float *weights",
            ),
            mutation(
                "elements beyond the head are kept",
                &[
                    Check::OutOfBounds,
                    Check::Race,
                    Check::Value,
                    Check::Uninitialised,
                ],
                "if (i >= HEAD_DIM) continue;\n            kept",
                "kept",
            ),
            mutation(
                "the gradient does not lose what is along x",
                &[Check::Value],
                "* scale[j] * r - x[j] * along)",
                "* scale[j] * r)",
            ),
            mutation(
                "all heads count for the queries",
                &[Check::Value],
                "if (head < heads) of_queries[j]",
                "if (head < normed) of_queries[j]",
            ),
            mutation(
                "no barrier before the warps' sums are added",
                UNORDERED,
                "of_warps[warp][HEAD_DIM + i] = of_keys[j];\n    }\n    __syncthreads();",
                "of_warps[warp][HEAD_DIM + i] = of_keys[j];\n    }",
            ),
            mutation(
                "rows of the last block past the end",
                &[Check::OutOfBounds],
                "last = min(n, first + rows);",
                "last = first + rows;",
            ),
        ],
    }
}

fn cached_attention() -> Subject {
    Subject {
        source: source!("cached_attention.cu"),
        real: Real::F32,
        head_dim: Some(40),
        check: |of| kernels::cached_attention(of, 40),
        mutations: vec![
            mutation(
                "the new rows over the past ones",
                &[Check::Value],
                "(size_t)(past + blockIdx.x) * width",
                "(size_t)blockIdx.x * width",
            ),
            mutation(
                "the queries for the keys",
                &[Check::Value],
                "(queries + width) + queries;",
                "(queries + width);",
            ),
            mutation(
                "a query sees the key after its own",
                &[Check::OutOfBounds, Check::Value],
                "key <= own; key += WARPS",
                "key <= own + 1; key += WARPS",
            ),
            mutation(
                "a window that is one key too long",
                &[Check::Value],
                "max(0, own + 1 - window)",
                "max(0, own - window)",
            ),
            mutation(
                "every query head has its own key head",
                &[Check::OutOfBounds, Check::Value],
                "key_head = head / (heads / kv_heads)",
                "key_head = head",
            ),
            mutation(
                "the sum does not shrink with its scores",
                &[Check::Value],
                "sum = fmaf(sum, shrink, p)",
                "sum += p",
            ),
            mutation(
                "warps are added with their own maxima",
                &[Check::Value],
                "factors[w] = expf(maxima[w] - largest)",
                "factors[w] = 1",
            ),
            mutation(
                "no barrier before the warps' results are read",
                &[Check::Race, Check::Uninitialised],
                "    __syncthreads();\n    // Warp 0",
                "    // Warp 0",
            ),
            mutation(
                "columns beyond the head",
                &[Check::OutOfBounds, Check::Race, Check::Value],
                "if (d < HEAD_DIM) results[warp][d]",
                "results[warp][d]",
            ),
        ],
    }
}

fn rope() -> Subject {
    Subject {
        source: source!("rope.cu"),
        real: Real::Bf16,
        head_dim: None,
        check: kernels::rope,
        mutations: vec![
            mutation(
                "positions of rows where documents are packed",
                &[Check::Value],
                "positions ? positions[blockIdx.x] :",
                "",
            ),
            mutation(
                "the row for its position",
                &[Check::OutOfBounds],
                "positions[blockIdx.x] : blockIdx.x % seq_len",
                "positions[blockIdx.x] : blockIdx.x",
            ),
            mutation(
                "the rotated first element for the second",
                &[Check::Value],
                "b[j] * cosine[j] + a[j] * (direction * sine[j])",
                "b[j] * cosine[j] + turned * (direction * sine[j])",
            ),
            mutation(
                "a wrong stride of heads",
                &[Check::Value],
                "x + head * head_dim + pair",
                "x + head * 2 * half + pair",
            ),
            mutation(
                "no check that rows are whole packs",
                &[Check::Misaligned],
                "head_dim % WIDE == 0 && row % WIDE == 0",
                "head_dim % WIDE == 0",
            ),
            mutation(
                "no check that heads are whole packs",
                &[Check::Misaligned],
                "half % WIDE == 0 && head_dim % WIDE == 0",
                "half % WIDE == 0",
            ),
        ],
    }
}

fn layernorm() -> Subject {
    Subject {
        source: source!("layernorm.cu"),
        real: Real::F32,
        head_dim: None,
        check: kernels::layernorm,
        mutations: vec![
            mutation(
                "the mean square for the variance",
                &[Check::Value],
                "sum += (v[j] - mean) * (v[j] - mean);",
                "sum += v[j] * v[j];",
            ),
            mutation(
                "no epsilon",
                &[Check::Value],
                "block_sum(squares.sum) / width + eps)",
                "block_sum(squares.sum) / width)",
            ),
            mutation(
                "no bias",
                &[Check::Value],
                "(v[j] - mean) * r * scale[j] + shift[j];",
                "(v[j] - mean) * r * scale[j];",
            ),
            mutation(
                "sums that do not begin at 0",
                &[Check::Uninitialised],
                "dw[i] = db[i] = 0;",
                "dw[i] = 0;",
            ),
            mutation(
                "the gradient of x along the mean",
                &[Check::Value],
                "dy * w[i] - shift - normed * along",
                "dy * w[i] - normed * along",
            ),
            mutation(
                "rows of the last block past the end",
                &[Check::OutOfBounds],
                "last = min(n, first + rows);",
                "last = first + rows;",
            ),
            mutation(
                "no check of an address's alignment",
                &[Check::Misaligned],
                "width % 4 == 0 && aligned(x) && aligned(y)",
                "width % 4 == 0 && aligned(y)",
            ),
        ],
    }
}

fn mlp() -> Subject {
    Subject {
        source: source!("mlp.cu"),
        real: Real::F32,
        head_dim: None,
        check: kernels::mlp,
        mutations: vec![
            mutation(
                "dh overwritten before its last use",
                &[Check::Value],
                "up[j] = dh[j] * activated;\n            dh[j] = h;",
                "dh[j] = h;\n            up[j] = dh[j] * activated;",
            ),
            mutation(
                "the stride of h for that of gate_up",
                &[Check::Value],
                "return i + row * inner;",
                "return i;",
            ),
            mutation(
                "the derivative of SiLU for that of GELU",
                &[Check::Value],
                "float slope = 1.5957691216f * (1 + 0.134145f * x * x);",
                "float slope = 1;",
            ),
            mutation(
                "no check that rows are whole packs",
                &[Check::Misaligned],
                "inner % WIDE == 0 && aligned(dh_to_h)",
                "aligned(dh_to_h)",
            ),
            mutation(
                "the slope of GELU without the density",
                &[Check::Value],
                "slope = below + x * (0.39894228f * expf(-0.5f * x * x));",
                "slope = below;",
            ),
            mutation(
                "the other tail of the normal distribution",
                &[Check::Value],
                "value(float x) { return x * (0.5f * erfcf(-0.70710678f * x)); }",
                "value(float x) { return x * (0.5f * erfcf(0.70710678f * x)); }",
            ),
            mutation(
                "a sigmoid of infinity by infinity",
                &[Check::Value],
                "value(float x) { return x * (1 / (1 + expf(-S::s(x)))); }",
                "value(float x) { return x * (expf(S::s(x)) / (expf(S::s(x)) + 1)); }",
            ),
            mutation(
                "the slope of SiLU as infinity times 0",
                &[Check::Value],
                "float e, float sigmoid) { return 1 - sigmoid; }",
                "float e, float sigmoid) { return e * sigmoid; }",
            ),
            mutation(
                "the slope of GELU as infinity times 0",
                &[Check::Value],
                "slope * (e < 1 ? e * sigmoid : 1 - sigmoid);",
                "slope * (e * sigmoid);",
            ),
            mutation(
                "the gradient without gates for its value",
                &[Check::Value],
                "x[j] = dh[j] * slope;\n            dh[j] = activated;",
                "x[j] = dh[j] * activated;\n            dh[j] = activated;",
            ),
        ],
    }
}

fn cross_entropy() -> Subject {
    Subject {
        source: source!("cross_entropy.cu"),
        real: Real::F32,
        head_dim: None,
        check: |of| {
            kernels::cross_entropy(of)?;
            kernels::cross_entropy_extremes(of)
        },
        mutations: vec![
            mutation(
                "no check for an ignored target",
                &[Check::OutOfBounds],
                "if (target == IGNORE) {",
                "if (false) {",
            ),
            mutation(
                "no shift by the maximum",
                &[Check::Value],
                "exponentials += expf(v[j] - most);",
                "exponentials += expf(v[j]);",
            ),
            mutation(
                "a sum that is not scaled to a new maximum",
                &[Check::Value],
                "sum *= expf(most - above);",
                "",
            ),
            mutation(
                "a maximum of −∞ before the first element",
                &[Check::Value],
                "Exponentials of_thread = {row, LOWEST, 0};",
                "Exponentials of_thread = {row, -__int_as_float(0x7f800000), 0};",
            ),
            mutation(
                "the first element of a pack for its target",
                &[Check::Value],
                "i + j == target",
                "i == target",
            ),
            mutation(
                "`<=` for `<` in a loop over packs",
                &[Check::OutOfBounds],
                "i < packed; i += blockDim.x * WIDE)",
                "i <= packed; i += blockDim.x * WIDE)",
            ),
            mutation(
                "a maximum of slots that no warp wrote",
                &[Check::Uninitialised],
                "partial[min(lane, blockDim.x / 32 - 1)]",
                "partial[lane]",
            ),
            mutation(
                "a reduction over half a warp",
                &[Check::Value],
                "for (int by = 16; by > 0; by /= 2) value = fmaxf",
                "for (int by = 8; by > 0; by /= 2) value = fmaxf",
            ),
            mutation(
                "the target's part without its row's weight",
                &[Check::Value],
                "(i + j == target ? of_target : 0.0f)",
                "(i + j == target ? 1.0f : 0.0f)",
            ),
            mutation(
                "a smoothed target that keeps its whole part",
                &[Check::Value],
                "weight * (1 - smoothing)",
                "weight",
            ),
            mutation(
                "a share of each target, not spread over the vocabulary",
                &[Check::Value],
                "weight * smoothing / vocabulary",
                "weight * smoothing",
            ),
            mutation(
                "a sum of logits for their mean",
                &[Check::Value],
                "(double)block_sum(total.sum) / vocabulary",
                "(double)block_sum(total.sum)",
            ),
            mutation(
                "a dynamic gradient without its factor",
                &[Check::Value],
                "float weight = factor * ",
                "float weight = ",
            ),
            mutation(
                "the weight of the first row for all",
                &[Check::Value],
                "weights ? weights[blockIdx.x] : 1",
                "weights ? weights[0] : 1",
            ),
        ],
    }
}

fn sum_losses() -> Subject {
    Subject {
        source: source!("cross_entropy.cu"),
        real: Real::F32,
        head_dim: None,
        check: |of| kernels::sum(of, "sum_losses", 1024),
        mutations: vec![
            mutation(
                "a sum of losses in f32",
                &[Check::Value],
                "double sum = 0;",
                "float sum = 0;",
            ),
            mutation(
                "every thread adds the sum",
                &[Check::Order, Check::Value],
                "if (threadIdx.x == 0) *total += sum;",
                "*total += sum;",
            ),
        ],
    }
}

fn adamw() -> Subject {
    Subject {
        source: source!("adamw.cu"),
        real: Real::Bf16,
        head_dim: None,
        check: kernels::adamw,
        mutations: vec![
            mutation(
                "the square of the gradient before it is scaled",
                &[Check::Value],
                "__fmul_rn(scaled, scaled)",
                "__fmul_rn(g[j], g[j])",
            ),
            mutation(
                "operations that the compiler may fuse",
                &[Check::Fusible],
                "__fsub_rn(__fmul_rn(f.keep, w[j]), __fmul_rn(f.step_size, ratio))",
                "f.keep * w[j] - f.step_size * ratio",
            ),
            mutation(
                "no check of an address's alignment",
                &[Check::Misaligned],
                "aligned(gradient) && aligned(exp_avg) &&",
                "aligned(gradient) &&",
            ),
            mutation(
                "a copy that is null",
                &[Check::OutOfBounds],
                "if (copy) store(copy + i, w);",
                "store(copy + i, w);",
            ),
        ],
    }
}

fn cast() -> Subject {
    Subject {
        source: source!("cast.cu"),
        real: Real::Bf16,
        head_dim: None,
        check: kernels::cast,
        mutations: vec![
            mutation(
                "truncation to bf16",
                &[Check::Value],
                "asm(\"cvt.rn.bf16.f32 %0, %1;\" : \"=h\"(bits) : \"f\"(x));",
                "bits = __float_as_uint(x) >> 16;",
            ),
            mutation(
                "the halves of a pair exchanged",
                &[Check::Value],
                ": \"f\"(high), \"f\"(low));",
                ": \"f\"(low), \"f\"(high));",
            ),
            mutation(
                "a pack at the end of the elements",
                &[Check::OutOfBounds],
                "size_t packed = packs ? elements / N * N : 0;",
                "size_t packed = packs ? elements : 0;",
            ),
            mutation(
                "`<=` for `<` in a loop over elements",
                &[Check::OutOfBounds],
                "i < elements; i += threads)",
                "i <= elements; i += threads)",
            ),
        ],
    }
}

fn dropout() -> Subject {
    Subject {
        source: source!("adapter.cu"),
        real: Real::Bf16,
        head_dim: None,
        check: kernels::dropout,
        mutations: vec![
            mutation(
                "the dropout of the first sequence for all",
                &[Check::Value],
                "keys + blockIdx.x / seq_len * 2",
                "keys",
            ),
            mutation(
                "the same dropout at every position",
                &[Check::Value],
                "(unsigned long long)(blockIdx.x % seq_len) * width",
                "0",
            ),
            mutation(
                "the same dropout for every adapter",
                &[Check::Value],
                "of_row[0], adapter + 1);",
                "of_row[0], 1);",
            ),
            mutation(
                "a row's dropout that depends on the pack",
                &[Check::Value],
                "nth(key, first + i + j + 1)",
                "nth(key, first + i + 1)",
            ),
            mutation(
                "elements that are kept as they are",
                &[Check::Value],
                "(drops ? 0.0f : factor)",
                "(drops ? 0.0f : 1.0f)",
            ),
            mutation(
                "a gradient that replaces the sum",
                &[Check::Value],
                "if (ADDS) load(sum, to + i);",
                "",
            ),
            mutation(
                "another shift of the random numbers",
                &[Check::Value],
                "bits >> 30",
                "bits >> 29",
            ),
            mutation(
                "no check that rows are whole packs",
                &[Check::Misaligned],
                "width % 4 == 0 && aligned(to)",
                "aligned(to)",
            ),
        ],
    }
}

fn dequantise() -> Subject {
    Subject {
        source: source!("nf4.cu"),
        real: Real::Bf16,
        head_dim: None,
        check: kernels::dequantise,
        mutations: vec![
            mutation(
                "the halves of a byte exchanged",
                &[Check::Value],
                "(element % 2 ? 0 : 4)",
                "(element % 2 ? 4 : 0)",
            ),
            mutation(
                "the first half of a byte for both elements of the end",
                &[Check::Value],
                "N == 1 ? i % 2 : j",
                "j",
            ),
            mutation(
                "the scale of the first block for all",
                &[Check::Value],
                "scales[i / 64]",
                "scales[0]",
            ),
            mutation(
                "no barrier before the table is read",
                UNORDERED,
                "__syncthreads();",
                "",
            ),
            mutation(
                "no check of the weights' alignment",
                &[Check::Misaligned],
                "aligned(weights), Dequantise",
                "true, Dequantise",
            ),
        ],
    }
}

fn dequantise_scales() -> Subject {
    Subject {
        source: source!("nf4.cu"),
        real: Real::F32,
        head_dim: None,
        check: kernels::dequantise_scales,
        mutations: vec![
            mutation(
                "the factor of the first group for all",
                &[Check::Value],
                "factors[i / 256]",
                "factors[0]",
            ),
            mutation(
                "the last factor as the offset",
                &[Check::Value],
                "(elements + 255) / 256",
                "(elements - 1) / 256",
            ),
            mutation(
                "a product that is not rounded",
                &[Check::Value],
                "__fadd_rn(__fmul_rn(numbers[codes[i]], factors[i / 256]), offset)",
                "__fmaf_rn(numbers[codes[i]], factors[i / 256], offset)",
            ),
            mutation(
                "the codes of the first threads only",
                &[Check::Value],
                "i += threads)\n        scales",
                "i += elements)\n        scales",
            ),
        ],
    }
}

fn gradients() -> Subject {
    Subject {
        source: source!("squares.cu"),
        real: Real::F32,
        head_dim: None,
        check: kernels::gradients,
        mutations: vec![
            mutation(
                "squares in f32",
                &[Check::Value],
                "sum += (double)x * (double)x;",
                "sum += __fmul_rn(x, x);",
            ),
            mutation(
                "every block's sum at the first place",
                &[Check::Order, Check::Value],
                "partial[blockIdx.x] = squares;",
                "partial[0] = squares;",
            ),
            mutation(
                "a wrong stride of a grid's loop",
                &[Check::Value],
                "i < packed; i += threads * N)",
                "i < packed; i += threads)",
            ),
            mutation(
                "no barrier before the next reduction",
                UNORDERED,
                "// The next reduction may write only after every thread has read.\n    __syncthreads();",
                "",
            ),
            mutation(
                "a mask of half a warp",
                &[Check::AbsentLanes],
                "value += __shfl_xor_sync(~0u, value, by);",
                "value += __shfl_xor_sync(0xffffu, value, by);",
            ),
            mutation(
                "reversed arguments of a shuffle",
                &[Check::Value],
                "value += __shfl_xor_sync(~0u, value, by);",
                "value += __shfl_xor_sync(~0u, by, value);",
            ),
            mutation(
                "`<=` for `<` in the number of warps",
                &[Check::Uninitialised],
                "lane < blockDim.x / 32 ?",
                "lane <= blockDim.x / 32 ?",
            ),
            mutation(
                "too few slots for the warps' sums",
                &[Check::OutOfBounds],
                "__shared__ T partial[32];",
                "__shared__ T partial[4];",
            ),
            mutation(
                "the lane for the warp",
                UNORDERED,
                "if (lane == 0) partial[warp] = value;\n    __syncthreads();\n    value = warp_sum(lane",
                "if (lane == 0) partial[lane] = value;\n    __syncthreads();\n    value = warp_sum(lane",
            ),
            mutation(
                "launch bounds smaller than the block",
                &[Check::Limits],
                "__launch_bounds__(256)\nsquared_norm",
                "__launch_bounds__(128)\nsquared_norm",
            ),
        ],
    }
}

/// More keys than eight tiles have, and inputs of up to ±20.
fn beyond(of: &Compiled, shape: Shape) -> Result<(), Caught> {
    let long = Shape {
        seq_len: 300,
        heads: 1,
        kv_heads: 1,
        ..shape
    };
    attention::check(of, long)?;
    attention::check_with(of, shape, 20.0)
}

fn attention_f32() -> Subject {
    Subject {
        source: attention::F32,
        real: Real::F32,
        head_dim: Some(6),
        check: |of| {
            let shape = Shape {
                batch: 1,
                seq_len: 65,
                heads: 4,
                kv_heads: 2,
                head_dim: 6,
                packed: &[],
                window: None,
            };
            attention::check(of, shape)?;
            attention::check(
                of,
                Shape {
                    window: Some(5),
                    ..shape
                },
            )?;
            attention::check(
                of,
                Shape {
                    packed: &[40, 25],
                    ..shape
                },
            )?;
            beyond(of, shape)
        },
        mutations: vec![
            mutation(
                "no key after 256",
                &[Check::Value],
                "key_tile <= query_tile; key_tile++) {\n        // Every warp",
                "key_tile <= min(query_tile, 7); key_tile++) {\n        // Every warp",
            ),
            mutation(
                "a maximum that begins at −100",
                &[Check::Value],
                "most[r] = -infinity(), total[r] = 0;",
                "most[r] = -100, total[r] = 0;",
            ),
            mutation(
                "probabilities as quotients of exponentials",
                &[Check::Value],
                "expf(scores[r] * scale - log_sum[r]) *",
                "expf(scores[r] * scale) / expf(log_sum[r]) *",
            ),
            mutation(
                "documents that begin where rows do",
                &[Check::OutOfBounds, Check::Value],
                "first_token(spans, blockIdx.y, seq_len);\n    if (key_tile",
                "(size_t)blockIdx.y * seq_len;\n    if (key_tile",
            ),
            mutation(
                "documents as long as a row",
                &[Check::Value, Check::OutOfBounds],
                "seq_len = span.y;",
                "",
            ),
            mutation(
                "a window of one key more",
                &[Check::Value],
                "query - key < window; }",
                "query - key <= window; }",
            ),
            mutation(
                "the first tile of the last query's window",
                &[Check::Value],
                "return max(0, query - window + 1) / TILE; }",
                "return max(0, query - window + TILE) / TILE; }",
            ),
            mutation(
                "maxima of tiles before the window",
                &[Check::Value],
                "float shift = maximum == -infinity() ? 0 : maximum;",
                "float shift = maximum;",
            ),
            mutation(
                "no barrier before the next tile",
                UNORDERED,
                "// Every warp has read the keys and values before.\n        __syncthreads();",
                "",
            ),
            mutation(
                "no barrier after a tile",
                UNORDERED,
                "__syncthreads();\n        float p[ROWS];\n        multiply_rows(p, queries",
                "float p[ROWS];\n        multiply_rows(p, queries",
            ),
            mutation(
                "no __syncwarp before a store",
                UNORDERED,
                "// The lanes may still read the probabilities of the call before.\n    __syncwarp();",
                "",
            ),
            mutation(
                "no __syncwarp after a store",
                UNORDERED,
                "scratch[r * P_STRIDE + lane] = p[r];\n    __syncwarp();",
                "scratch[r * P_STRIDE + lane] = p[r];",
            ),
            mutation(
                "the scratch of the first warp for all",
                UNORDERED,
                "float *scratch = values + TILE * STRIDE + warp * ROWS * P_STRIDE;\n    // The last queries",
                "float *scratch = values + TILE * STRIDE;\n    // The last queries",
            ),
            mutation(
                "a warp without queries returns before a barrier",
                &[Check::Barrier],
                "float sums[ROWS][COLUMNS] = {}, most[ROWS], total[ROWS];",
                "if (first >= seq_len) return;\n    float sums[ROWS][COLUMNS] = {}, most[ROWS], total[ROWS];",
            ),
            mutation(
                "a causal mask that lacks the diagonal",
                &[Check::Value],
                "return key <= query && query",
                "return key < query && query",
            ),
            mutation(
                "a causal mask one key too wide",
                &[Check::Value],
                "return key <= query && query",
                "return key <= query + 1 && query",
            ),
            mutation(
                "heads in turn for groups of heads",
                &[Check::Value],
                "int query_tile = gridDim.z - 1 - blockIdx.z;\n    size_t row_width = (size_t)(heads + 2 * kv_heads) * HEAD_DIM;\n    unsigned start = first_token(spans, blockIdx.y, seq_len);\n    if (query_tile * TILE >= seq_len) return;\n    qkv += (size_t)start * row_width;\n    const real *of_key = qkv + (size_t)(heads + head / (heads / kv_heads)) * HEAD_DIM;\n    const real *of_value = of_key + (size_t)kv_heads * HEAD_DIM;\n    const float scale = 1 / sqrtf(HEAD_DIM);\n    int first = query_tile * TILE + warp * ROWS;\n\n    float sums",
                "int query_tile = gridDim.z - 1 - blockIdx.z;\n    size_t row_width = (size_t)(heads + 2 * kv_heads) * HEAD_DIM;\n    unsigned start = first_token(spans, blockIdx.y, seq_len);\n    if (query_tile * TILE >= seq_len) return;\n    qkv += (size_t)start * row_width;\n    const real *of_key = qkv + (size_t)(heads + head % kv_heads) * HEAD_DIM;\n    const real *of_value = of_key + (size_t)kv_heads * HEAD_DIM;\n    const float scale = 1 / sqrtf(HEAD_DIM);\n    int first = query_tile * TILE + warp * ROWS;\n\n    float sums",
            ),
            mutation(
                "sums that are not scaled to a new maximum",
                &[Check::Value],
                "for (int c = 0; c < COLUMNS; c++) sums[r][c] *= correction;",
                "for (int c = 0; c < COLUMNS; c++) sums[r][c] *= 1;",
            ),
            mutation(
                "no shift by the maximum",
                &[Check::Value],
                "p[r] = expf(score - shift);",
                "p[r] = expf(score);",
            ),
            mutation(
                "rows from seq_len on",
                &[Check::OutOfBounds],
                "if (first + row < seq_len && column < HEAD_DIM) {",
                "if (column < HEAD_DIM) {",
            ),
            mutation(
                "16-byte reads of rows that are not multiples of 16 bytes",
                &[Check::Misaligned],
                "#define STRIDE (4 * (((HEAD_DIM + 3) / 4) | 1))",
                "#define STRIDE (HEAD_DIM | 1)",
            ),
            mutation(
                "a tile's padding that is not 0",
                &[Check::Uninitialised],
                "const int pairs = (HEAD_DIM + 3) / 4 * 2;",
                "const int pairs = HEAD_DIM / 2;",
            ),
            mutation(
                "log_sums of rows from seq_len on",
                &[Check::OutOfBounds],
                "if (lane == r && first + r < seq_len) {",
                "if (lane == r) {",
            ),
            mutation(
                "log_sums without the maximum",
                &[Check::Value],
                "= most[r] + logf(total[r]);",
                "= logf(total[r]);",
            ),
            mutation(
                "the probabilities of the diagonal tile only",
                &[Check::Value],
                "query_tile * TILE < seq_len; query_tile++",
                "query_tile <= key_tile; query_tile++",
            ),
            mutation(
                "the first query head of a group only",
                &[Check::Value],
                "head < (kv_head + 1) * group; head++) {",
                "head <= kv_head * group; head++) {",
            ),
            mutation(
                "dS without delta",
                &[Check::Value],
                "ds[r] = seen ? p[r] * (ds[r] - along) : 0;",
                "ds[r] = seen ? p[r] * ds[r] : 0;",
            ),
        ],
    }
}

/// A head of more than 64 elements, which are no multiple of 4.
fn attention_f32_of_66() -> Subject {
    Subject {
        source: attention::F32,
        real: Real::F32,
        head_dim: Some(66),
        check: |of| {
            attention::check(
                of,
                Shape {
                    batch: 1,
                    seq_len: 65,
                    heads: 2,
                    kv_heads: 1,
                    head_dim: 66,
                    packed: &[],
                    window: None,
                },
            )
        },
        mutations: vec![
            mutation(
                "the last elements of a head are not stored",
                &[Check::Uninitialised, Check::Value],
                "if (column < HEAD_DIM) to[",
                "if (column < HEAD_DIM / 4 * 4) to[",
            ),
            mutation(
                "the last elements of a head are not read",
                &[Check::Value],
                "if (first + row < seq_len && column < HEAD_DIM) {",
                "if (first + row < seq_len && column < HEAD_DIM / 4 * 4) {",
            ),
            mutation(
                "no elements after 64 in sums over a head",
                &[Check::Value],
                "for (int d = 0; d < HEAD_DIM; d += 4) {",
                "for (int d = 0; d < min(HEAD_DIM, 64); d += 4) {",
            ),
        ],
    }
}

fn attention_bf16() -> Subject {
    Subject {
        source: attention::BF16,
        real: Real::Bf16,
        head_dim: Some(12),
        check: |of| {
            let shape = Shape {
                batch: 1,
                seq_len: 130,
                heads: 4,
                kv_heads: 2,
                head_dim: 12,
                packed: &[],
                window: None,
            };
            attention::check(of, shape)?;
            attention::check(
                of,
                Shape {
                    packed: &[2, 67, 61, 0],
                    ..shape
                },
            )?;
            beyond(of, shape)
        },
        mutations: vec![
            mutation(
                "sums that outgrow f32",
                &[Check::Value],
                "lags |= of_lane > most[m][half] + 8 / exponent;",
                "lags |= of_lane > most[m][half] + 200 / exponent;",
            ),
            mutation(
                "numbers of documents by row",
                &[Check::Value, Check::OutOfBounds, Check::Uninitialised],
                "from += (size_t)start * heads + (size_t)head * seq_len + (exists ? query : 0);",
                "from += ((size_t)blockIdx.y * heads + head) * seq_len + (exists ? query : 0);",
            ),
            mutation(
                "one group of copies more under way",
                &[Check::PendingCopy],
                "commit();\n    wait<1>();\n    __syncthreads();\n    Own<M, DIM <= 64> own;",
                "commit();\n    wait<2>();\n    __syncthreads();\n    Own<M, DIM <= 64> own;",
            ),
            mutation(
                "no wait for the keys",
                &[Check::PendingCopy],
                "// The keys are there, and every warp has used the values before.\n        wait<0>();",
                "// The keys are there, and every warp has used the values before.",
            ),
            mutation(
                "no wait for the values",
                &[Check::PendingCopy],
                "// The values are there, and every warp has used the keys.\n        wait<0>();",
                "// The values are there, and every warp has used the keys.",
            ),
            mutation(
                "no barrier after the wait",
                UNORDERED,
                "// The values are there, and every warp has used the keys.\n        wait<0>();\n        __syncthreads();",
                "// The values are there, and every warp has used the keys.\n        wait<0>();",
            ),
            mutation(
                "no barrier before a copy",
                UNORDERED,
                "// The keys are there, and every warp has used the values before.\n        wait<0>();\n        __syncthreads();",
                "// The keys are there, and every warp has used the values before.\n        wait<0>();",
            ),
            mutation(
                "a warp without keys leaves before a barrier",
                &[Check::Barrier],
                "bool sees = first_key <= last;\n        // The keys",
                "bool sees = first_key <= last;\n        if (!sees) break;\n        // The keys",
            ),
            mutation(
                "rows from seq_len on",
                &[Check::OutOfBounds],
                "int bytes = first + row < seq_len ? COPY : 0;",
                "int bytes = COPY;",
            ),
            mutation(
                "a causal mask that lacks the diagonal",
                &[Check::Value],
                "if (key > query) scores",
                "if (key >= query) scores",
            ),
            mutation(
                "sums that are not scaled to a new maximum",
                &[Check::Value],
                "sums[m][column][half * 2] *= correction;",
                "",
            ),
            mutation(
                "running sums in bf16",
                &[Check::Value],
                "total[m][half] += scores[m][n][i];",
                "total[m][half] = __uint_as_float(__float_as_uint(total[m][half] + scores[m][n][i]) & 0xffff0000);",
            ),
            mutation(
                "padding that is not cleared",
                &[Check::Uninitialised],
                "clear_padding<QUERIES + 2 * FORWARD_KEYS>();",
                "",
            ),
            mutation(
                "rows that do not begin at multiples of 16 bytes",
                &[Check::Misaligned],
                "#define STRIDE (DIM + 8)",
                "#define STRIDE (DIM + 4)",
            ),
            mutation(
                "a copy to the stage that is read",
                UNORDERED,
                "copy_stage(1 - stage, next_head",
                "copy_stage(stage, next_head",
            ),
            mutation(
                "copies that are not committed to a group",
                &[Check::PendingCopy],
                "copy_stage(stage, head, first_query);\n    commit();",
                "copy_stage(stage, head, first_query);",
            ),
            mutation(
                "no wait for a stage",
                &[Check::PendingCopy],
                "// The stage is there, and every warp has used the other one.\n        wait<0>();",
                "",
            ),
            mutation(
                "a tile on the diagonal that has no mask",
                &[Check::Value],
                "bool diagonal = first_query < first + 16 * M - 1;",
                "bool diagonal = first_query < first;",
            ),
            mutation(
                "the first stage in every turn",
                &[Check::Value],
                "stage = 1 - stage;",
                "stage = 0;",
            ),
            mutation(
                "no __syncwarp before rows are read",
                UNORDERED,
                "__syncwarp();\n    #pragma unroll 4",
                "#pragma unroll 4",
            ),
            mutation(
                "fragments in the wrong order",
                &[Check::Value],
                "a[m][n / 2][1] = pack(products[m][n][2], products[m][n][3]);\n            a[m][n / 2][2] = pack(products[m][n + 1][0], products[m][n + 1][1]);",
                "a[m][n / 2][2] = pack(products[m][n][2], products[m][n][3]);\n            a[m][n / 2][1] = pack(products[m][n + 1][0], products[m][n + 1][1]);",
            ),
            mutation(
                "ldmatrix without .trans",
                &[Check::Value],
                "x4.trans.shared",
                "x4.shared",
            ),
            mutation(
                "a base-2 exponential of natural logarithms",
                &[Check::Value],
                "float log_sum[M][2], along[M][2], factors[M][2];",
                "#undef LOG2_E\n#define LOG2_E 1.0f\n    float log_sum[M][2], along[M][2], factors[M][2];",
            ),
            mutation(
                "ldmatrix by half a warp",
                &[Check::AbsentLanes],
                "own.place(queries, warp * 32, lane);",
                "if (lane < 16) own.place(queries, warp * 32, lane);",
            ),
            mutation(
                "heads in turn for groups of heads",
                &[Check::Value],
                "int head = kv_head * group, first_query = first_key, stage = 0;",
                "int head = kv_head, first_query = first_key, stage = 0;",
            ),
        ],
    }
}

fn attention_wgmma() -> Subject {
    Subject {
        source: attention::WGMMA,
        real: Real::Bf16,
        head_dim: Some(64),
        check: |of| {
            let shape = Shape {
                batch: 1,
                seq_len: 260,
                heads: 3,
                kv_heads: 1,
                head_dim: 64,
                packed: &[],
                window: None,
            };
            // Large enough that exponentials outgrow the sums.
            attention::check_with(of, shape, 8.0)?;
            attention::check_with(of, shape, 20.0)?;
            attention::check(
                of,
                Shape {
                    packed: &[100, 2, 158, 0],
                    ..shape
                },
            )
        },
        mutations: vec![
            mutation(
                "sums that outgrow f32",
                &[Check::Value],
                "lags |= of_lane > most[half] + 8 / exponent;",
                "lags |= of_lane > most[half] + 200 / exponent;",
            ),
            mutation(
                "numbers of documents by row",
                &[Check::Value, Check::OutOfBounds, Check::Uninitialised],
                "log_sums += numbers_at;",
                "log_sums += (size_t)of_head * seq_len;",
            ),
            mutation(
                "copies that are not published to the products",
                &[Check::AsyncProduct],
                "wait_copies();\n                publish();",
                "wait_copies();",
            ),
            mutation(
                "copies that are not waited for",
                &[Check::PendingCopy, Check::AsyncProduct],
                "wait_copies();\n                publish();",
                "publish();",
            ),
            mutation(
                "gradients of scores that are not published",
                &[Check::AsyncProduct],
                "store_fragments<N / 2, KEYS>(of_stage, warp * 16, rounded_ds, lane);\n        publish();",
                "store_fragments<N / 2, KEYS>(of_stage, warp * 16, rounded_ds, lane);",
            ),
            mutation(
                "no barrier before the other warpgroup's gradients are read",
                &[Check::Race, Check::AsyncProduct, Check::Uninitialised],
                "meet<SCORED, 256>();\n        float dq[8][4];",
                "float dq[8][4];",
            ),
            mutation(
                "scores that are read before their product is there",
                &[Check::AsyncProduct],
                "wait_groups<1>();\n        settle(p);",
                "settle(p);",
            ),
            mutation(
                "gradients of scores that are read before their product is there",
                &[Check::AsyncProduct],
                "wait_groups<0>();\n        settle(ds);",
                "settle(ds);",
            ),
            mutation(
                "a stage that is given back while products read it",
                &[Check::Race, Check::AsyncProduct],
                "wait_groups<1>();\n        settle(dv);",
                "wait_groups<2>();\n        settle(dv);",
            ),
            mutation(
                "no fence before the products of rounded scores",
                &[Check::AsyncProduct],
                "publish();\n        fence();\n        #pragma unroll",
                "publish();\n        #pragma unroll",
            ),
            mutation(
                "probabilities of keys after their query",
                &[Check::Value],
                "if (key + j / 2 * 8 > first_query + i * 8 + lane % 4 * 2 + j % 2) p[i][j] = 0;",
                "if (key + j / 2 * 8 > first_query + i * 8 + lane % 4 * 2) p[i][j] = 0;",
            ),
            mutation(
                "a sum that does not begin with its first part",
                &[Check::Uninitialised],
                "bool first = tile * QUERIES / KEYS == block;",
                "bool first = false;",
            ),
            mutation(
                "a block that leaves out the parts before it",
                &[Check::Value],
                "if (!first) take_parts<8>(dq,",
                "if (false) take_parts<8>(dq,",
            ),
            mutation(
                "heads of a group that replace each other's parts",
                &[Check::Value],
                "add_part<COLUMNS>(dk_sums, dk, key, 0, seq_len, member == 0, lane);",
                "add_part<COLUMNS>(dk_sums, dk, key, 0, seq_len, true, lane);",
            ),
            mutation(
                "sums that are not corrected",
                &[Check::Value],
                "if (lags) {\n            #pragma unroll",
                "if (false) {\n            #pragma unroll",
            ),
            mutation(
                "another swizzle for copies than for products",
                &[Check::Value],
                "return row * 128 + ((chunk ^ row % 8) << 4);",
                "return row * 128 + (chunk << 4);",
            ),
            mutation(
                "rows of the next panel",
                &[Check::Value, Check::OutOfBounds, Check::Uninitialised],
                "multiply<1, 1>(dq, panel(own_scores + step * 2048), panel(own_keys + step * 2048), step > 0);",
                "multiply<1, 1>(dq, panel(own_scores + step * 2048), panel(own_keys + step * 1024), step > 0);",
            ),
            mutation(
                "keys as rows where they are columns",
                &[Check::Value, Check::OutOfBounds, Check::Uninitialised],
                "multiply<1, 1>(dq,",
                "multiply<1, 0>(dq,",
            ),
            mutation(
                "queries beyond the sequence",
                &[Check::Value, Check::OutOfBounds, Check::Race],
                "if (first + of_row >= seq_len) continue;",
                "",
            ),
        ],
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn planted_mistakes_are_caught() {
    let Some(nvrtc) = nvrtc::all().into_iter().next() else {
        return;
    };
    let subjects = [
        embedding(),
        rmsnorm(),
        column_sums(),
        bias(),
        head_norms(),
        layernorm(),
        cached_attention(),
        rope(),
        mlp(),
        cross_entropy(),
        sum_losses(),
        adamw(),
        cast(),
        dropout(),
        dequantise(),
        dequantise_scales(),
        gradients(),
        attention_f32(),
        attention_f32_of_66(),
        attention_bf16(),
        attention_wgmma(),
    ];
    let mut wrong = Vec::new();
    println!("| mistake | file | caught by |\n|---|---|---|");
    for subject in &subjects {
        let (file, result) = subject.run(&nvrtc, None);
        result.unwrap_or_else(|caught| panic!("{file} without a mistake: {caught}"));
        for mutation in &subject.mutations {
            let (file, result) = subject.run(&nvrtc, Some((mutation.from, mutation.to)));
            let what = mutation.what;
            match result {
                Err(Caught { by, .. }) if mutation.by.contains(&by) => {
                    println!("| {what} | `{file}` | {by} |");
                }
                other => wrong.push(format!("{file}: {what}: {other:?}, not {:?}", mutation.by)),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
