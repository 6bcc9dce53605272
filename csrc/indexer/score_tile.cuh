// Pieces shared by the portable score kernels (logits.cu, candidate_logits.cu): FP4 rows -> MMA fragments, and the
// epilogue that turns 16 keys x 8 heads of dot products into part of the head sum.
//
// Order of the dot. mma.m16n8k16 gives lane l (g = l / 4, t = l % 4) the k elements 2t, 2t+1 and 2t+8, 2t+9 of every
// step. A dot product does not care which k is which as long as both operands agree, so lane t of a quad simply owns
// quarter t of the row (at Di = 128: one scale group of 32, 16 bytes of codes, one scale byte): it loads and expands
// what it multiplies, nothing twice. Pair P = 4 * word + p of the quarter holds the nibbles p and p + 4 of that word (the
// cheapest two to bring into a bf16 pair) and is the operand of step P / 2, half P % 2.
//
// Exactness. E2M1 * 2^k is exact in bf16; products have 4 significant bits and the tensor core keeps at least 24 bits
// below the largest term, so the fp32 dot is exact while the scales of a row pair spread over less than about 2^9.
//
// Order of the head sum (model spec 5.3; the same in ops/reference/indexer.py): lane t adds heads 8j + 2t, 8j + 2t + 1 for
// ascending j, starting from +0, in fp32; then (p0 + p1) + (p2 + p3). Heads past Hi are zero and change nothing.
#pragma once
#include "common/math.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"

namespace mdi::indexer {

constexpr uint16_t kNegInfBf16 = 0xff80;

template <int kDim>
struct KeyRow {
    static_assert(kDim == 64 || kDim == 128, "Di: 64 or 128");
    static constexpr int kBytes = kDim / 2 + kDim / 32;   // 34 or 68
    static constexpr int kCodeBytes = kDim / 2;
    static constexpr int kWords = kDim / 32;              // code words of one lane's quarter: 2 or 4
    static constexpr int kPairs = kDim / 8;               // bf16 pairs of one lane's quarter: 8 or 16
    static constexpr int kSteps = kDim / 16;              // k steps of the MMA
    static MDI_DEVICE int scale_of_lane(int t) { return kDim == 128 ? t : t / 2; }
};

// One lane's quarter of a packed row.
template <int kDim>
struct Quarter {
    uint32_t word[KeyRow<kDim>::kWords];
    uint32_t scale;  // E8M0 byte
};

// nibbles p and p + 4 of a word as a bf16 pair times 2^-126 (see fp4x2_raw_bf16x2 in number_formats.cuh)
template <int kPair>
MDI_DEVICE uint32_t raw_pair(uint32_t word) {
    constexpr int kUp = 12 - 4 * kPair, kShift = 6 - 4 * kPair;
    const uint32_t magnitude = kShift >= 0 ? word << (kShift & 31) : word >> (-kShift & 31);
    return (magnitude & 0x01c001c0u) | ((word << kUp) & 0x80008000u);
}

// the scale byte twice as bf16
MDI_DEVICE uint32_t scale_pair(uint32_t byte) { return e8m0_to_bf16_bits(static_cast<uint8_t>(byte)) * 0x10001u; }

template <int kPair>
MDI_DEVICE uint32_t expand_pair(uint32_t word, uint32_t scale) {
    return bf16x2_product(bf16x2_product(raw_pair<kPair>(word), 0x7e807e80u), scale);
}

// All pairs of a quarter: out[P], P = 4 * word + p.
template <int kDim>
MDI_DEVICE void expand_quarter(const Quarter<kDim>& quarter, uint32_t (&out)[KeyRow<kDim>::kPairs]) {
    const uint32_t scale = scale_pair(quarter.scale);
#pragma unroll
    for (int w = 0; w < KeyRow<kDim>::kWords; ++w) {
        out[4 * w] = expand_pair<0>(quarter.word[w], scale);
        out[4 * w + 1] = expand_pair<1>(quarter.word[w], scale);
        out[4 * w + 2] = expand_pair<2>(quarter.word[w], scale);
        out[4 * w + 3] = expand_pair<3>(quarter.word[w], scale);
    }
}

// B fragments of 8 heads of one token: lane (g, t) holds quarter t of head first_head + g; b[P] as in expand_quarter.
template <int kDim>
MDI_DEVICE void load_query_fragment(const uint8_t* q_codes, const uint8_t* q_scale, int64_t token, int num_heads, int head, int t,
                                    bool valid, uint32_t (&b)[KeyRow<kDim>::kPairs]) {
    using Row = KeyRow<kDim>;
    Quarter<kDim> quarter;
#pragma unroll
    for (int w = 0; w < Row::kWords; ++w) quarter.word[w] = 0;
    quarter.scale = 127;
    if (valid && head < num_heads) {
        const int64_t row = token * num_heads + head;
        const uint32_t* source = reinterpret_cast<const uint32_t*>(q_codes + row * Row::kCodeBytes) + t * Row::kWords;
#pragma unroll
        for (int w = 0; w < Row::kWords; ++w) quarter.word[w] = source[w];
        quarter.scale = q_scale[row * (kDim / 32) + Row::scale_of_lane(t)];
    }
    expand_quarter<kDim>(quarter, b);
}

// weights of heads head, head + 1 (head even) as a bf16 pair; zero past num_heads
MDI_DEVICE uint32_t load_weight_pair(const uint16_t* weights, int64_t token, int num_heads, int head, bool valid) {
    uint32_t pair = 0;
    if (valid && head < num_heads) pair = weights[token * num_heads + head];
    if (valid && head + 1 < num_heads) pair |= static_cast<uint32_t>(weights[token * num_heads + head + 1]) << 16;
    return pair;
}

// cvt.rn.relu.bf16x2.f32: max(x, 0) rounded to bf16, low half = `even`; NaN stays NaN
MDI_DEVICE uint32_t relu_bf16x2(float even, float odd) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(odd), "f"(even));
    return d;
#else
    return ptx::pack_bf16x2(even < 0.0f ? 0.0f : even, odd < 0.0f ? 0.0f : odd);
#endif
}

// sum += bf16(relu(bf16(dot)) * weight) of two neighbouring heads, lower head first
MDI_DEVICE void add_heads(float& sum, float dot_even, float dot_odd, uint32_t weight) {
    const uint32_t value = ptx::mul_bf16x2(relu_bf16x2(dot_even, dot_odd), weight);
    sum += bits_float(value << 16);
    sum += bits_float(value & 0xffff0000u);
}

// (p0 + p1) + (p2 + p3) over the four lanes of a quad; every lane gets it
MDI_DEVICE float quad_sum(float sum) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
}

// Scores of keys g (low) and g + 8 (high) from the accumulators and weights of kTiles tiles of eight heads, on every lane of the quad
template <int kTiles>
MDI_DEVICE void sum_heads(const float (*acc)[4], const uint32_t* weight, float& low, float& high) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        add_heads(low, acc[n][0], acc[n][1], weight[n]);
        add_heads(high, acc[n][2], acc[n][3], weight[n]);
    }
    low = quad_sum(low);
    high = quad_sum(high);
}

MDI_DEVICE uint16_t to_bf16_bits(float x) { return static_cast<uint16_t>(ptx::pack_bf16x2(x, 0.0f)); }

}  // namespace mdi::indexer
