// What the router's kernels share: the score of a logit and the selection among a token's scores (model spec 6.1).
#pragma once
#include "common/number_formats.cuh"
#include "common/reduce.cuh"
#include "moe/moe.h"

namespace mdi::moe {

// x <= 20 ? log1p(exp(x)) : x, NaN stays NaN; the argument is bounded so that the compiler needs no branch for it
MDI_DEVICE float softplus(float x) {
    const float y = log1pf(expf(fminf(x, 20.0f)));
    return x <= 20.0f ? y : x;
}

// larger float <=> larger key; NaN is the largest; 0 is below every value
MDI_DEVICE uint32_t order_key(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The bias of a lane's experts, lane + 32 i.
template <int kExperts>
MDI_DEVICE void load_bias(const RouteParams& p, float (&bias)[kExperts / 32]) {
#pragma unroll
    for (int i = 0; i < kExperts / 32; ++i) {
        const int expert = static_cast<int>(threadIdx.x) % 32 + 32 * i;
        bias[i] = expert < p.num_experts ? p.bias[expert] : 0.0f;
    }
}

// One warp, one token: the k best of scores + bias, written with ids ascending. line: the token's kExperts logits in shared
// memory, which become scores.
template <int kExperts>
MDI_DEVICE void select_experts(const RouteParams& p, float* line, const float (&bias)[kExperts / 32], int64_t token) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float scores[kExperts / 32];
    uint32_t keys[kExperts / 32];
#pragma unroll
    for (int i = 0; i < kExperts / 32; ++i) scores[i] = softplus(line[lane + 32 * i]);
#pragma unroll
    for (int i = 0; i < kExperts / 32; ++i) {  // on its own: the root's rare cases are a branch, which would part the steps above
        const int expert = lane + 32 * i;
        scores[i] = __fsqrt_rn(scores[i]);
        line[expert] = scores[i];
        keys[i] = expert < p.num_experts ? order_key(__fadd_rn(scores[i], bias[i])) : 0;
    }
    __syncwarp();
    float total = 0.0f, my_score = 0.0f;
    int my_id = 0;
    for (int j = 0; j < p.k; ++j) {
        uint32_t best = keys[0];
        int best_id = lane;
#pragma unroll
        for (int i = 1; i < kExperts / 32; ++i)
            if (keys[i] > best) best = keys[i], best_id = lane + 32 * i;
        const uint32_t top = __reduce_max_sync(kFullWarp, best);
        const int id = static_cast<int>(__reduce_min_sync(kFullWarp, best == top ? static_cast<uint32_t>(best_id) : 0xffffffffu));
#pragma unroll
        for (int i = 0; i < kExperts / 32; ++i)
            if (lane + 32 * i == id) keys[i] = 0;
        const float score = line[id];
        total = j == 0 ? score : __fadd_rn(total, score);
        if (lane == j) my_id = id, my_score = score;
    }
    const float weight = __fmul_rn(__fdiv_rn(my_score, __fadd_rn(total, 1e-20f)), p.scaling);
    int rank = 0;
    for (int j = 0; j < p.k; ++j) rank += __shfl_sync(kFullWarp, my_id, j) < my_id ? 1 : 0;
    if (lane < p.k) {
        p.ids[token * p.k + rank] = my_id;
        p.weights[token * p.k + rank] = weight;
    }
}

}  // namespace mdi::moe
