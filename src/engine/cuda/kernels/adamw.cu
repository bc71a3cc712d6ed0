// AdamW (Loshchilov and Hutter, 2019), in the order of operations of PyTorch's torch.optim.AdamW and of the CPU
// engine, each rounded on its own: results are bitwise the CPU engine's.
//
// weights (the master weights), gradient and both moments: [elements], f32; copy: [elements], real, for the
// matrix products, or null.
//
// Any grid of 256 threads; a thread handles 4 elements at a time.
#include "real.cuh"

// The scalars of one step, computed by cpu-kernels/src/adamw.rs.
struct Factors {
    float gradient_scale, keep, beta1, beta2, step_size, inverse_root_correction2, epsilon;
};

struct Update {
    float *weights;
    real *copy;
    const float *gradient;
    float *exp_avg, *exp_avg_sq;
    Factors f;

    // The compiler must not fuse the operations into fused multiply-adds.
    template <int N> __device__ __forceinline__ void at(size_t i) {
        float w[N], g[N], m[N], v[N];
        load(w, weights + i);
        load(g, gradient + i);
        load(m, exp_avg + i);
        load(v, exp_avg_sq + i);
        for (int j = 0; j < N; j++) {
            float scaled = __fmul_rn(g[j], f.gradient_scale);
            float change = __fmul_rn(__fsub_rn(1, f.beta1), __fsub_rn(scaled, m[j]));
            m[j] = __fadd_rn(m[j], change);
            float square = __fmul_rn(__fsub_rn(1, f.beta2), __fmul_rn(scaled, scaled));
            v[j] = __fadd_rn(__fmul_rn(f.beta2, v[j]), square);
            float root = __fmul_rn(__fsqrt_rn(v[j]), f.inverse_root_correction2);
            float ratio = __fdiv_rn(m[j], __fadd_rn(root, f.epsilon));
            w[j] = __fsub_rn(__fmul_rn(f.keep, w[j]), __fmul_rn(f.step_size, ratio));
        }
        store(weights + i, w);
        store(exp_avg + i, m);
        store(exp_avg_sq + i, v);
        if (copy) store(copy + i, w);
    }
};

extern "C" __global__ void __launch_bounds__(256)
adamw(float *weights, real *copy, const float *gradient, float *exp_avg, float *exp_avg_sq,
      size_t elements, const Factors *factors) {
    bool packs = aligned(weights) && aligned(copy) && aligned(gradient) && aligned(exp_avg) &&
                 aligned(exp_avg_sq);
    Update update = {weights, copy, gradient, exp_avg, exp_avg_sq, *factors};
    over_grid<4>(elements, packs, update);
}
