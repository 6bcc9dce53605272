// Index rows as int8 ("folded"): E2M1 codes are multiples of 1/2 up to 6, so a row whose four scale groups lie within 3
// binades is a row of int8 numbers (2 * value * 2^shift, at most 96) times one power of two. Dots of folded rows are exact
// int32 numbers below 128 * 96 * 96 < 2^21. See logits_sm90.cu. Di = 128.
#pragma once
#include "common/math.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "indexer/score_tile.cuh"

namespace mdi::indexer {

constexpr int kMaxShift = 3;
constexpr int kMaxExponent = 30;  // of a row's factor and of a weight, either sign

// Four bytes 0..128, negated
__device__ __forceinline__ uint32_t negate(uint32_t bytes) { return (0x80808080u - bytes) ^ 0x80808080u; }

// One quarter (scale group) of a row per lane, the four lanes of a quad together: 32 int8 values = code * 2 << shift,
// and the exponent of the row: value = int8 * 2^exponent. `ok` is false where the row does not fold.
struct Folded {
    uint32_t bytes[8];
    int exponent;
    bool ok;
    __device__ __forceinline__ float factor() const { return bits_float(static_cast<uint32_t>(exponent + 127) << 23); }
};

__device__ __forceinline__ Folded fold_quarter(const uint32_t (&word)[4], uint32_t scale) {
    const bool zero = ((word[0] | word[1] | word[2] | word[3]) & 0x77777777u) == 0;
    int lowest = zero ? 1 << 20 : static_cast<int>(scale);  // a group of zeros fits any exponent
    lowest = min_of(lowest, __shfl_xor_sync(0xffffffffu, lowest, 1));
    lowest = min_of(lowest, __shfl_xor_sync(0xffffffffu, lowest, 2));
    const bool all_zero = lowest == 1 << 20;
    const int shift = zero ? 0 : static_cast<int>(scale) - lowest;
    Folded out;
    out.exponent = all_zero ? 0 : lowest - 127 - 1;
    int ok = scale != 255 && shift <= kMaxShift && out.exponent >= -kMaxExponent && out.exponent <= kMaxExponent;
    ok &= __shfl_xor_sync(0xffffffffu, ok, 1);  // never behind a condition: all lanes take part
    ok &= __shfl_xor_sync(0xffffffffu, ok, 2);
    out.ok = ok != 0;
    const int s = min_of(shift, kMaxShift);
    // magnitudes 0 1 2 3 | 4 6 8 12 of the eight codes, and their negatives, one byte each
    const uint32_t low = 0x03020100u << s, high = 0x0c080604u << s;
    const uint32_t minus_low = negate(low), minus_high = negate(high);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t codes = word[i / 2] >> (16 * (i % 2)) & 0xffffu;
        const uint32_t plus = __byte_perm(low, high, codes & 0x7777u);
        const uint32_t minus = __byte_perm(minus_low, minus_high, codes & 0x7777u);
        const uint32_t negative = __byte_perm(0x0000ff00u, 0, codes >> 3 & 0x1111u);  // ff where the sign bit is set
        out.bytes[i] = (plus & ~negative) | (minus & negative);
    }
    return out;
}

// A weight goes with any row factor: weight * 2^exponent is exact, as both exponents are small.
__device__ __forceinline__ bool weight_folds(uint16_t weight) {
    const int exponent = (weight >> 7 & 0xff) - 127;
    return (weight & 0x7fff) == 0 || (exponent >= -kMaxExponent && exponent <= kMaxExponent);
}
__device__ __forceinline__ uint16_t scaled_weight(uint16_t weight, int exponent) {
    return (weight & 0x7fff) == 0 ? weight : static_cast<uint16_t>(weight + exponent * 128);
}

// max(dot, 0) of two integer dots as a bf16 pair, rounded once: |dot| < 2^21 is exact in fp32. Conversions of integers (I2FP) and
// packing leave the FMA pipe to the multiplies and sums, which need all of it.
__device__ __forceinline__ uint32_t relu_dots(uint32_t even, uint32_t odd) {
    return relu_bf16x2(static_cast<float>(static_cast<int32_t>(even)), static_cast<float>(static_cast<int32_t>(odd)));
}

// mul_bf16x2 of the low half of `a`, twice, and b; the instruction selects the half itself
__device__ __forceinline__ uint32_t mul_low_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("{\n.reg .b16 low, high;\n.reg .b32 twice;\nmov.b32 {low, high}, %1;\nmov.b32 twice, {low, low};\n"
        "fma.rn.bf16x2 %0, twice, %2, %3;\n}\n"
        : "=r"(d)
        : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
#else
    return ptx::mul_bf16x2((a & 0xffffu) * 0x10001u, b);
#endif
}

// sum += bf16(bf16(relu(dot)) * weight) of two neighbouring heads, lower head first; the weights are bf16 in the upper half with a
// zero lower half, so that the upper half of a product is the product as fp32
__device__ __forceinline__ void add_folded_heads(float& sum, uint32_t dot_even, uint32_t dot_odd, uint32_t weight_even,
                                                 uint32_t weight_odd) {
    const uint32_t pair = relu_dots(dot_even, dot_odd);
    sum += bits_float(mul_low_bf16x2(pair, weight_even));
    sum += bits_float(ptx::mul_bf16x2(pair, weight_odd));
}

}  // namespace mdi::indexer
