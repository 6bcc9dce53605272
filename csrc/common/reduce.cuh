// Warp and block reductions in a fixed order: every thread gets the result, and the same input gives the same bits.
#pragma once
#include <cstdint>

#include "common/math.h"

namespace mdi {

constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
    template <class T>
    MDI_DEVICE T operator()(T a, T b) const { return a + b; }
};

struct Max {  // for floats: drops NaN; take the maximum over abs_bits (number_formats.cuh) to keep it
    template <class T>
    MDI_DEVICE T operator()(T a, T b) const { return a > b ? a : b; }
};

// Butterfly over kLanes neighbouring lanes (a power of two <= 32); all 32 lanes of the warp must call it.
template <int kLanes = 32, class T, class Op>
MDI_DEVICE T warp_reduce(T value, Op op) {
    static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "lanes: a power of two up to 32");
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) value = op(value, __shfl_xor_sync(kFullWarp, value, mask));
    return value;
}

template <int kLanes = 32, class T>
MDI_DEVICE T warp_sum(T value) { return warp_reduce<kLanes>(value, Sum{}); }

template <int kLanes = 32, class T>
MDI_DEVICE T warp_max(T value) { return warp_reduce<kLanes>(value, Max{}); }

// Whole block, one dimension of kThreads threads (a multiple of 32, up to 1024). `scratch` is shared memory of
// kThreads / 32 elements; it may be reused after the call (the function ends with a barrier).
template <int kThreads, class T, class Op>
MDI_DEVICE T block_reduce(T value, Op op, T* scratch) {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "threads: a multiple of 32 up to 1024");
    constexpr int kWarps = kThreads / 32;
    value = warp_reduce(value, op);
    if (kWarps == 1) return value;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    T result = scratch[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) result = op(result, scratch[warp]);
    __syncthreads();
    return result;
}

template <int kThreads, class T>
MDI_DEVICE T block_sum(T value, T* scratch) { return block_reduce<kThreads>(value, Sum{}, scratch); }

template <int kThreads, class T>
MDI_DEVICE T block_max(T value, T* scratch) { return block_reduce<kThreads>(value, Max{}, scratch); }

}  // namespace mdi
