// Integer helpers for host and device code.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define MDI_HOST_DEVICE __host__ __device__ __forceinline__
#define MDI_DEVICE __device__ __forceinline__
#else
#define MDI_HOST_DEVICE inline
#define MDI_DEVICE inline
#endif

namespace mdi {

template <class T>
MDI_HOST_DEVICE constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <class T>
MDI_HOST_DEVICE constexpr T align_up(T a, T b) {
    return ceil_div(a, b) * b;
}

template <class T>
MDI_HOST_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

template <class T>
MDI_HOST_DEVICE constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

MDI_HOST_DEVICE constexpr bool is_power_of_two(int64_t x) {
    return x > 0 && (x & (x - 1)) == 0;
}

}  // namespace mdi
