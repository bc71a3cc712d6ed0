// SwiGLU (Shazeer, 2020): h = silu(gate) · up with silu(x) = x · σ(x).
//
// gate_up: [n, 2 × inner], the gates of a row, then its ups; h, dh: [n, inner]. All f32; one thread for
// each of the n × inner elements.

__device__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

extern "C" __global__ void swiglu_forward(float *h, const float *gate_up, size_t elements, int inner) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    size_t at = i / inner * 2 * inner + i % inner;
    float gate = gate_up[at], up = gate_up[at + inner];
    h[i] = gate * sigmoid(gate) * up;
}

// Takes dh and replaces it by h, which the weight gradient needs; replaces gate_up by
// its gradient: dup = dh · silu(gate), dgate = dh · up · (σ + silu · (1 − σ)).
extern "C" __global__ void swiglu_backward(float *dh_to_h, float *gate_up, size_t elements, int inner) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    size_t at = i / inner * 2 * inner + i % inner;
    float gate = gate_up[at], up = gate_up[at + inner], dh = dh_to_h[i];
    float s = sigmoid(gate);
    float silu = gate * s;
    dh_to_h[i] = silu * up;
    gate_up[at] = dh * up * (s + silu * (1 - s));
    gate_up[at + inner] = dh * silu;
}
