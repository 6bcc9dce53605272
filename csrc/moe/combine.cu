// Sum of a token's expert rows, then the shared expert, then one rounding (model spec 6.2):
//     out[t] = round( ( sum over slots j ascending with row_of_slot[t, j] >= 0 of f32(y[row_of_slot[t, j]]) ) + f32(shared[t]) )
// Slots of other ranks are -1: their rows are never read, whatever the buffer holds. fp32 adds in slot order, so the
// result is the same bits in every run. A token without a local slot gets shared[t], or 0.
// With the other ranks' sums of these tokens (combine_parts) this rank's own sum is rounded to bf16 as theirs were and all are added
// in rank order before the shared expert: the bits of a pass that writes the own sum and one that reads it again, without either.
//
// One block per token (gridDim.x), a thread takes two chunks of 8 columns and has two rows of each in flight; the
// slots of the token sit in the lanes of every warp. Memory-bound. No shared memory. Limits: N a multiple of 8, k <= 32.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

constexpr int kColumns = 8;
constexpr int kMaxThreads = 320;
constexpr int kChunks = 2;    // of a thread at a time
constexpr int kInFlight = 2;  // rows of each chunk

__device__ __forceinline__ void add_row(float (&sum)[kColumns], uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += bits_float(words[i] << 16);
        sum[2 * i + 1] += bits_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint4 rounded(const float (&sum)[kColumns]) {
    return make_uint4(ptx::pack_bf16x2(sum[0], sum[1]), ptx::pack_bf16x2(sum[2], sum[3]), ptx::pack_bf16x2(sum[4], sum[5]),
                      ptx::pack_bf16x2(sum[6], sum[7]));
}

template <bool kFloatOut>
__device__ __forceinline__ void store(const CombineParams& p, int64_t offset, const float (&sum)[kColumns]) {
    if constexpr (kFloatOut) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(p.out) + offset);
        out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + offset) = rounded(sum);
    }
}

// The sums of all ranks for a thread's chunks, in rank order; on entry `sum` is this rank's.
__device__ __forceinline__ void add_parts(const CombineParams& p, int64_t token, int first, int step, const bool (&valid)[kChunks],
                                          float (&sum)[kChunks][kColumns]) {
    uint4 own[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        own[c] = rounded(sum[c]);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum[c][i] = 0.0f;
    }
    for (int part = 0; part <= p.num_parts; part += kInFlight) {
        uint4 rows[kInFlight][kChunks];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
#pragma unroll
            for (int c = 0; c < kChunks; ++c)
                if (part + i < p.num_parts && valid[c])
                    rows[i][c] = ptx::load_streaming(p.parts + ((part + i) * p.num_tokens + token) * p.hidden +
                                                     (first + c * step) * kColumns);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                if (part + i == p.own_part) add_row(sum[c], own[c]);
                if (part + i < p.num_parts && valid[c]) add_row(sum[c], rows[i][c]);
            }
    }
}

template <bool kFloatOut, bool kParts>
__global__ void __launch_bounds__(kMaxThreads, 3) combine_kernel(const __grid_constant__ CombineParams params) {
    const int64_t token = blockIdx.x;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int mine = lane < params.k ? params.row_of_slot[token * params.k + lane] : -1;
    const uint32_t live = __ballot_sync(kFullWarp, mine >= 0);
    const int num_chunks = params.hidden / kColumns;
    const int step = static_cast<int>(blockDim.x);
    // the first chunk of a warp decides for all its lanes: the shuffles need whole warps
    for (int first = static_cast<int>(threadIdx.x); first - lane < num_chunks; first += kChunks * step) {
        float sum[kChunks][kColumns] = {};
        uint4 shared[kChunks];
        bool valid[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            valid[c] = first + c * step < num_chunks;
            shared[c] = make_uint4(0, 0, 0, 0);
            if (valid[c] && params.shared)
                shared[c] = ptx::load_streaming(params.shared + token * params.hidden + (first + c * step) * kColumns);
        }
        for (uint32_t left = live; left != 0;) {
            uint4 rows[kInFlight][kChunks];
            bool taken[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                taken[i] = left != 0;
                const int slot = taken[i] ? __ffs(static_cast<int>(left)) - 1 : 0;
                left &= left - 1;  // 0 stays 0
                const int64_t row = __shfl_sync(kFullWarp, mine, slot);
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
                    if (taken[i] && valid[c])
                        rows[i][c] = ptx::load_streaming(params.y + row * params.hidden + (first + c * step) * kColumns);
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i)
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
                    if (taken[i] && valid[c]) add_row(sum[c], rows[i][c]);
        }
        if constexpr (kParts) add_parts(params, token, first, step, valid, sum);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if (!valid[c]) continue;
            if (params.shared) add_row(sum[c], shared[c]);
            store<kFloatOut>(params, token * params.hidden + (first + c * step) * kColumns, sum[c]);
        }
    }
}

}  // namespace

void launch_combine(const CombineParams& params) {
    if (params.num_tokens == 0) return;
    const int threads = min_of(align_up(ceil_div(params.hidden / kColumns, kChunks), 32), kMaxThreads);
    const LaunchConfig config{dim3(static_cast<unsigned>(params.num_tokens)), dim3(static_cast<unsigned>(threads)), 0,
                              params.stream};
    if (params.has_parts) launch("moe.combine_parts", combine_kernel<false, true>, config, params);
    else if (params.out_float) launch("moe.combine", combine_kernel<true, false>, config, params);
    else launch("moe.combine", combine_kernel<false, false>, config, params);
}

}  // namespace mdi::moe
