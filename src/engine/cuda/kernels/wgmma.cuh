// Hopper's products of a warpgroup (wgmma, sm_90a), of bf16 with f32 sums.
//
// Operands in shared memory are panels: rows of 64 elements (128 bytes), which begin at a multiple of 1024 bytes. Of
// row r, chunk c of 8 elements lies at c ^ (r % 8), the hardware's 128-byte swizzle. A product takes the rows of
// a panel as rows of the operand, or its columns.
//
// In d, thread t of the warpgroup has rows t / 32 × 16 + t % 32 / 4 (elements 0 and 1 of d[i]) and 8 more (2 and 3),
// and columns 8 i + t % 4 × 2 and the next.
//
// Products run asynchronously, in groups. Between fence() and the wait for the group, no other instruction touches
// d and a.
#pragma once

typedef unsigned long long Panel;

// A panel, or its part from 16 columns (32 bytes) or 16 rows (2048 bytes) on. A product of more than 64 of its columns
// needs the bytes to the panel with the next 64.
__device__ __forceinline__ Panel panel(unsigned address, unsigned next = 0) {
    return (Panel)(address >> 4) | (Panel)(next >> 4) << 16 | (Panel)(1024 >> 4) << 32 | (Panel)1 << 62;
}

// The bytes from the panel's begin to a chunk of 8 elements.
__device__ __forceinline__ unsigned chunk_at(int row, int chunk) { return row * 128 + ((chunk ^ row % 8) << 4); }

// Makes the thread's writes to shared memory visible to products, after the next barrier to those of all threads.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first product, and after other instructions wrote its registers.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void close_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most this many groups run.
template <int GROUPS>
__device__ __forceinline__ void wait_groups() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// The compiler moves no use of the registers over this point: it does not know that products are asynchronous.
template <int N>
__device__ __forceinline__ void settle(float (&d)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        #pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+f"(d[i][j])::"memory");
    }
}

template <int N>
__device__ __forceinline__ void settle(unsigned (&a)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        #pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[i][j])::"memory");
    }
}

#define FOUR(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 1)

// d [64, N] += a [64, 16] · b [16, N], or = where add is false. A_COLUMNS: the 64 are the columns of a's panel, not
// its rows; B_COLUMNS: the N are the columns of b's.
template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void multiply(float (&d)[8][4], Panel a, Panel b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, %35, %36;\n}"
        : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)
        : "l"(a), "l"(b), "r"((int)add), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void multiply(float (&d)[16][4], Panel a, Panel b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, "
        "%33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "
        "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, %67, %68;\n}"
        : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6), EIGHT(d, 8), EIGHT(d, 10), EIGHT(d, 12), EIGHT(d, 14)
        : "l"(a), "l"(b), "r"((int)add), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

// The same with a in registers, as columns 16 k to 16 k + 15 of d after rounding, and b's N as columns of its panel.
__device__ __forceinline__ void multiply(float (&d)[8][4], const unsigned (&a)[4], Panel b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
        : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

__device__ __forceinline__ void multiply(float (&d)[16][4], const unsigned (&a)[4], Panel b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, "
        "%33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "
        "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
        : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6), EIGHT(d, 8), EIGHT(d, 10), EIGHT(d, 12), EIGHT(d, 14)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

#undef EIGHT
#undef FOUR
