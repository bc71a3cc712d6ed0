// Gated linear units (Shazeer, 2020): h = a(gate) · up with a(x) = x · σ(s(x)). SwiGLU has SiLU, s(x) = x; GEGLU has GELU's
// approximation by tanh, s(x) = 2 √(2/π) (x + 0.044715 x³), since ½ (1 + tanh(s/2)) = σ(s).
//
// gate_up: [n, 2 · inner], the gates of a row, then its ups; h, dh: [n, inner]; elements = n · inner. All
// real.
//
// Any grid of 256 threads; a thread handles 16 bytes of each tensor at a time.
#include "real.cuh"

// s, and (1 − σ) · s' with e = exp(−s) and σ = 1 / (1 + e).
struct Silu {
    static __device__ __forceinline__ float s(float x) { return x; }
    static __device__ __forceinline__ float rest(float x, float e, float sigmoid) { return 1 - sigmoid; }
};

struct GeluTanh {
    static __device__ __forceinline__ float s(float x) { return 1.5957691216f * x * (1 + 0.044715f * x * x); }
    // The slope makes the rounding of 1 − σ large where σ is nearly 1; e may be infinite where it is nearly 0.
    static __device__ __forceinline__ float rest(float x, float e, float sigmoid) {
        float slope = 1.5957691216f * (1 + 0.134145f * x * x);
        return slope * (e < 1 ? e * sigmoid : 1 - sigmoid);
    }
};

// Where the gate of element i of h lies in gate_up. A division of 64 bits is slow.
__device__ __forceinline__ size_t gate_of(size_t i, size_t elements, int inner) {
    size_t row = elements <= 0xffffffffu ? (unsigned)i / (unsigned)inner : i / inner;
    return i + row * inner;
}

template <typename Activation> struct Forward {
    real *h;
    const real *gate_up;
    size_t elements;
    int inner;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        size_t from = gate_of(i, elements, inner);
        float gate[N], up[N];
        load(gate, gate_up + from);
        load(up, gate_up + from + inner);
        for (int j = 0; j < N; j++) gate[j] = gate[j] * (1 / (1 + expf(-Activation::s(gate[j])))) * up[j];
        store(h + i, gate);
    }
};

template <typename Activation>
__device__ __forceinline__ void forward(real *h, const real *gate_up, size_t elements, int inner) {
    bool packs = inner % WIDE == 0 && aligned(h) && aligned(gate_up);
    over_grid<WIDE>(elements, packs, Forward<Activation>{h, gate_up, elements, inner});
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_forward(real *h, const real *gate_up, size_t elements, int inner) {
    forward<Silu>(h, gate_up, elements, inner);
}

extern "C" __global__ void __launch_bounds__(256)
geglu_forward(real *h, const real *gate_up, size_t elements, int inner) {
    forward<GeluTanh>(h, gate_up, elements, inner);
}

template <typename Activation> struct Backward {
    real *dh_to_h, *gate_up;
    size_t elements;
    int inner;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        size_t from = gate_of(i, elements, inner);
        float gate[N], up[N], dh[N];
        load(gate, gate_up + from);
        load(up, gate_up + from + inner);
        load(dh, dh_to_h + i);
        for (int j = 0; j < N; j++) {
            float e = expf(-Activation::s(gate[j])), sigmoid = 1 / (1 + e);
            float activated = gate[j] * sigmoid;
            gate[j] = dh[j] * up[j] * (sigmoid + activated * Activation::rest(gate[j], e, sigmoid));
            float h = activated * up[j];
            up[j] = dh[j] * activated;
            dh[j] = h;
        }
        store(gate_up + from, gate);
        store(gate_up + from + inner, up);
        store(dh_to_h + i, dh);
    }
};

// Takes dh and replaces it by h, which the weight gradient needs; replaces gate_up by its gradient: dup = dh · a(gate),
// dgate = dh · up · (σ + a(gate) · (1 − σ) · s').
template <typename Activation>
__device__ __forceinline__ void backward(real *dh_to_h, real *gate_up, size_t elements, int inner) {
    bool packs = inner % WIDE == 0 && aligned(dh_to_h) && aligned(gate_up);
    over_grid<WIDE>(elements, packs, Backward<Activation>{dh_to_h, gate_up, elements, inner});
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(real *dh_to_h, real *gate_up, size_t elements, int inner) {
    backward<Silu>(dh_to_h, gate_up, elements, inner);
}

extern "C" __global__ void __launch_bounds__(256)
geglu_backward(real *dh_to_h, real *gate_up, size_t elements, int inner) {
    backward<GeluTanh>(dh_to_h, gate_up, elements, inner);
}
