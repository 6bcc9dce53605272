// Router (model spec 6.1):
//     l = x W^T (fp32);  s = sqrt(softplus(l));  ids = top-k of s + bias, ties to the lower id;
//     w = s[ids] / (sum + 1e-20) * scaling, the sum in the order of selection; written with ids ascending
// x and W are bf16, their products exact in fp32. The logits of a token are summed in one fixed order, whatever T is:
// 64 columns in the tensor core, those partial sums added with fp32 rounding, columns ascending; no split over K.
//
// A block of 8 warps takes 32 tokens and all experts; warp w computes 32 x (kExperts / 8) logits with mma.sync
// m16n8k16, operands come through a three-stage cp.async ring (rows of 64 columns, 16-byte chunk c of row r at
// c ^ (r % 8)). The logits then replace the ring in shared memory and each warp selects for 4 tokens: k rounds of a
// warp-wide maximum over order-preserving keys, then a warp-wide minimum over the ids that reach it.
// A NaN score counts as the largest, as in a sort: the token's weights become NaN instead of hiding it.
// SASS: HMMA
// Shared memory: 3 x (32 + kExperts) x 128 bytes: 156 KiB for 384 experts. Limits: E <= 512, k <= min(32, E), N a
// multiple of 32.
#include "common/launch.h"
#include "common/ptx_sm80.cuh"
#include "moe/moe.h"
#include "moe/route.cuh"

namespace mdi::moe {
namespace {

constexpr int kTokens = 32;  // of a block
constexpr int kBlockK = 64;
constexpr int kStages = 3;
constexpr int kThreads = 256, kWarps = kThreads / 32;

template <int kExperts>
struct Traits {
    static constexpr int kColumnTiles = kExperts / kWarps / 8;  // 8-expert fragments of a warp
    static constexpr int kStageBytes = (kTokens + kExperts) * kBlockK * 2;
    static constexpr int kScoreStride = kExperts + 4;
    static constexpr int kSmemBytes = kStages * kStageBytes;
    static_assert(kColumnTiles % 2 == 0, "ldmatrix_x4 loads two column tiles");
    static_assert(kTokens * kScoreStride * 4 <= kSmemBytes && kSmemBytes <= 227 * 1024, "shared memory");
};

// One stage: rows 0 .. 31 are tokens, then kExperts rows of W; rows and columns that do not exist become zero.
template <int kExperts>
__device__ __forceinline__ void load_stage(const RouteParams& p, uint32_t stage, int64_t first_token, int step) {
    const int thread = static_cast<int>(threadIdx.x), chunk = thread % 8;
    const int column = step * kBlockK + chunk * 8;
    const bool column_valid = column < p.hidden;
    const uint32_t target = stage + thread / 8 * 128 + (chunk ^ (thread / 8 % 8)) * 16;  // repeats every 32 rows
    {
        const int64_t token = first_token + thread / 8;
        const bool valid = column_valid && token < p.num_tokens;
        ptx::cp_async_16_zfill(target, valid ? p.x + token * p.hidden + column : p.x, valid ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < kExperts / 32; ++i) {
        const int expert = thread / 8 + 32 * i;
        const bool valid = column_valid && expert < p.num_experts;
        ptx::cp_async_16_zfill(target + (i + 1) * 32 * 128,
                               valid ? p.weight + static_cast<int64_t>(expert) * p.hidden + column : p.weight,
                               valid ? 16 : 0);
    }
}

// sums += the 64 columns of one stage
template <int kColumnTiles>
__device__ __forceinline__ void multiply_stage(uint32_t stage, float (&sums)[2][kColumnTiles][4]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t a_base = stage + lane % 16 * 128;
    const uint32_t b_base = stage + (kTokens + warp * kColumnTiles * 8 + lane % 8 + lane / 16 * 8) * 128;
    float part[2][kColumnTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kBlockK / 16; ++k) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            ptx::ldmatrix_x4(a[i], a_base + i * 16 * 128 + ((2 * k + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
        for (int n = 0; n < kColumnTiles; n += 2) {
            uint32_t b[4];  // k and k + 8 of column tile n, then of n + 1
            ptx::ldmatrix_x4(b, b_base + n * 8 * 128 + ((2 * k + lane / 8 % 2) ^ (lane % 8)) * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                ptx::mma_bf16_m16n8k16(part[i][n], a[i], b[0], b[1]);
                ptx::mma_bf16_m16n8k16(part[i][n + 1], a[i], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][n][j] += part[i][n][j];
}

template <int kExperts>
__global__ void __launch_bounds__(kThreads, 1) route_kernel(const __grid_constant__ RouteParams params) {
    using T = Traits<kExperts>;
    extern __shared__ __align__(128) uint8_t smem[];
    const uint32_t ring = ptx::smem_address(smem);
    const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kTokens;
    const int num_steps = ceil_div(params.hidden, kBlockK);
    float sums[2][T::kColumnTiles][4] = {};

#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
        if (step < num_steps) load_stage<kExperts>(params, ring + step * T::kStageBytes, first_token, step);
        ptx::cp_async_commit();
    }
    for (int step = 0; step < num_steps; ++step) {
        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();  // `step` has landed for everyone, and step - 1 is finished: its stage is free
        const int ahead = step + kStages - 1;
        if (ahead < num_steps)
            load_stage<kExperts>(params, ring + ahead % kStages * T::kStageBytes, first_token, ahead);
        ptx::cp_async_commit();
        multiply_stage<T::kColumnTiles>(ring + step % kStages * T::kStageBytes, sums);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the logits overwrite the ring

    float* logits = reinterpret_cast<float*>(smem);  // [32][kScoreStride]
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < T::kColumnTiles; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = i * 16 + half * 8 + lane / 4;
                const int expert = (warp * T::kColumnTiles + n) * 8 + lane % 4 * 2;
                *reinterpret_cast<float2*>(logits + token * T::kScoreStride + expert) =
                    make_float2(sums[i][n][2 * half], sums[i][n][2 * half + 1]);
            }
    float bias[kExperts / 32];
    load_bias<kExperts>(params, bias);
    __syncthreads();
    for (int token = warp; token < kTokens; token += kWarps)
        if (first_token + token < params.num_tokens)
            select_experts<kExperts>(params, logits + token * T::kScoreStride, bias, first_token + token);
}

template <int kExperts>
void launch_experts(const RouteParams& params) {
    launch("moe.route", route_kernel<kExperts>,
           {dim3(static_cast<unsigned>(ceil_div<int64_t>(params.num_tokens, kTokens))), dim3(kThreads),
            Traits<kExperts>::kSmemBytes, params.stream},
           params);
}

}  // namespace

void launch_route(const RouteParams& params) {
    if (params.num_experts <= 128) launch_experts<128>(params);
    else if (params.num_experts <= 256) launch_experts<256>(params);
    else if (params.num_experts <= 384) launch_experts<384>(params);
    else launch_experts<512>(params);
}

}  // namespace mdi::moe
