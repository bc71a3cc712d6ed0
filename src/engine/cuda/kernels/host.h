// CUDA C as C++, so that a machine without a GPU can run the kernels: every thread of a
// block is a thread of the machine, and blocks run one after another. It does not model warps,
// the memory of a GPU, its arithmetic (which fuses multiplications with additions) and its speed.
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <thread>
#include <utility>
#include <vector>

struct Index {
    unsigned x;
};
static thread_local Index threadIdx, blockIdx, blockDim;
static pthread_barrier_t barrier;

#define __global__
#define __device__ static
// One block runs at a time, so memory shared by its threads may be static.
#define __shared__ static
#define __syncthreads() pthread_barrier_wait(&barrier)

static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}

// Like cuLaunchKernel, in one dimension: arguments point at the kernel's parameters.
template <typename... A>
static void launch(void (*kernel)(A...), unsigned blocks, unsigned threads, void **arguments) {
    pthread_barrier_init(&barrier, nullptr, threads);
    std::vector<std::thread> block;
    for (unsigned thread = 0; thread < threads; thread++) {
        block.emplace_back([=] {
            threadIdx.x = thread;
            blockDim.x = threads;
            for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
                call(kernel, arguments, std::index_sequence_for<A...>());
                // Shared memory belongs to the next block only when this one has ended.
                __syncthreads();
            }
        });
    }
    for (std::thread &thread : block) thread.join();
    pthread_barrier_destroy(&barrier);
}

#define LAUNCHER(kernel)                                                                           \
    extern "C" void launch_##kernel(unsigned blocks, unsigned threads, void **arguments) {         \
        launch(kernel, blocks, threads, arguments);                                                \
    }
