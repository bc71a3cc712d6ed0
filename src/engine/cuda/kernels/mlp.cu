// The activation of an MLP: of a gated linear unit (Shazeer, 2020), h = a(gate) · up, SwiGLU with SiLU and GEGLU with GELU as
// a; or of an MLP without gates, h = a(up).
//
// gate_up: [n, 2 · inner], the gates of a row, then its ups; up: [n, inner]; h, dh: [n, inner]; elements = n · inner. All
// real.
//
// Any grid of 256 threads; a thread handles 16 bytes of each tensor at a time.
#include "real.cuh"

// a(x) = x · σ(s(x)). S has s, and (1 − σ) · s' with e = exp(−s) and σ = 1 / (1 + e).
template <typename S> struct ScaledSigmoid {
    static __device__ __forceinline__ float value(float x) { return x * (1 / (1 + expf(-S::s(x)))); }
    static __device__ __forceinline__ float value(float x, float &slope) {
        float e = expf(-S::s(x)), sigmoid = 1 / (1 + e);
        float activated = x * sigmoid;
        slope = sigmoid + activated * S::rest(x, e, sigmoid);
        return activated;
    }
};

struct OfSilu {
    static __device__ __forceinline__ float s(float x) { return x; }
    static __device__ __forceinline__ float rest(float x, float e, float sigmoid) { return 1 - sigmoid; }
};

// GELU's approximation by tanh has s(x) = 2 √(2/π) (x + 0.044715 x³), since ½ (1 + tanh(s/2)) = σ(s).
struct OfGeluTanh {
    static __device__ __forceinline__ float s(float x) { return 1.5957691216f * x * (1 + 0.044715f * x * x); }
    // The slope makes the rounding of 1 − σ large where σ is nearly 1; e may be infinite where it is nearly 0.
    static __device__ __forceinline__ float rest(float x, float e, float sigmoid) {
        float slope = 1.5957691216f * (1 + 0.134145f * x * x);
        return slope * (e < 1 ? e * sigmoid : 1 - sigmoid);
    }
};

using Silu = ScaledSigmoid<OfSilu>;
using GeluTanh = ScaledSigmoid<OfGeluTanh>;

// x · Φ(x) with the normal distribution Φ; the slope is Φ(x) + x · φ(x).
struct Gelu {
    static __device__ __forceinline__ float value(float x) { return x * (0.5f * erfcf(-0.70710678f * x)); }
    static __device__ __forceinline__ float value(float x, float &slope) {
        float below = 0.5f * erfcf(-0.70710678f * x);
        slope = below + x * (0.39894228f * expf(-0.5f * x * x));
        return x * below;
    }
};

// Where the gate of element i of h lies in gate_up. A division of 64 bits is slow.
__device__ __forceinline__ size_t gate_of(size_t i, size_t elements, int inner) {
    size_t row = elements <= 0xffffffffu ? (unsigned)i / (unsigned)inner : i / inner;
    return i + row * inner;
}

template <typename Activation> struct GatedForward {
    real *h;
    const real *gate_up;
    size_t elements;
    int inner;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        size_t from = gate_of(i, elements, inner);
        float gate[N], up[N];
        load(gate, gate_up + from);
        load(up, gate_up + from + inner);
        for (int j = 0; j < N; j++) gate[j] = Activation::value(gate[j]) * up[j];
        store(h + i, gate);
    }
};

// Takes dh and replaces it by h, which the weight gradient needs; replaces gate_up by its gradient: dup = dh · a(gate),
// dgate = dh · up · a'(gate).
template <typename Activation> struct GatedBackward {
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
            float slope, activated = Activation::value(gate[j], slope);
            gate[j] = dh[j] * up[j] * slope;
            float h = activated * up[j];
            up[j] = dh[j] * activated;
            dh[j] = h;
        }
        store(gate_up + from, gate);
        store(gate_up + from + inner, up);
        store(dh_to_h + i, dh);
    }
};

template <typename Activation> struct PlainForward {
    real *h;
    const real *up;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float x[N];
        load(x, up + i);
        for (int j = 0; j < N; j++) x[j] = Activation::value(x[j]);
        store(h + i, x);
    }
};

// Takes dh and replaces it by h; replaces up by its gradient dh · a'(up).
template <typename Activation> struct PlainBackward {
    real *dh_to_h, *up;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float x[N], dh[N];
        load(x, up + i);
        load(dh, dh_to_h + i);
        for (int j = 0; j < N; j++) {
            float slope, activated = Activation::value(x[j], slope);
            x[j] = dh[j] * slope;
            dh[j] = activated;
        }
        store(up + i, x);
        store(dh_to_h + i, dh);
    }
};

// The kernels of an activation. inner is the row length of h.
#define KERNELS(NAME, ACTIVATION)                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
    gated_##NAME##_forward(real *h, const real *gate_up, size_t elements, int inner) {                         \
        bool packs = inner % WIDE == 0 && aligned(h) && aligned(gate_up);                                      \
        over_grid<WIDE>(elements, packs, GatedForward<ACTIVATION>{h, gate_up, elements, inner});               \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
    gated_##NAME##_backward(real *dh_to_h, real *gate_up, size_t elements, int inner) {                        \
        bool packs = inner % WIDE == 0 && aligned(dh_to_h) && aligned(gate_up);                                \
        over_grid<WIDE>(elements, packs, GatedBackward<ACTIVATION>{dh_to_h, gate_up, elements, inner});        \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
    plain_##NAME##_forward(real *h, const real *up, size_t elements, int inner) {                              \
        over_grid<WIDE>(elements, aligned(h) && aligned(up), PlainForward<ACTIVATION>{h, up});                 \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
    plain_##NAME##_backward(real *dh_to_h, real *up, size_t elements, int inner) {                             \
        over_grid<WIDE>(elements, aligned(dh_to_h) && aligned(up), PlainBackward<ACTIVATION>{dh_to_h, up});    \
    }

KERNELS(silu, Silu)
KERNELS(gelu_tanh, GeluTanh)
KERNELS(gelu, Gelu)
