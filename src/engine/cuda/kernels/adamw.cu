// AdamW (Loshchilov and Hutter, 2019), in the order of operations of PyTorch's torch.optim.AdamW,
// on f32 master weights, with a bf16 copy for the matrix products.
//
// Master weights, gradient and both moments: [elements], f32; copy: [elements], the bits of bf16. One
// thread per element.

// The scalars of one step, computed by src/engine/cpu/kernels/adamw.rs.
struct Factors {
    float gradient_scale, keep, beta1, beta2, step_size, inverse_root_correction2, epsilon;
};

// Rounded to the nearest, ties to even; NaN stays NaN.
__device__ unsigned short bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

extern "C" __global__ void adamw(float *weights, unsigned short *copy, const float *gradient,
                                 float *exp_avg, float *exp_avg_sq, size_t elements,
                                 Factors factors) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    float g = gradient[i] * factors.gradient_scale;
    float m = exp_avg[i] + (1 - factors.beta1) * (g - exp_avg[i]);
    float v = factors.beta2 * exp_avg_sq[i] + (1 - factors.beta2) * (g * g);
    float denominator = sqrtf(v) * factors.inverse_root_correction2 + factors.epsilon;
    float w = factors.keep * weights[i] - factors.step_size * (m / denominator);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    weights[i] = w;
    copy[i] = bf16(w);
}
