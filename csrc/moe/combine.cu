// Sum of a token's expert rows, then the shared expert, then one rounding (model spec 6.2):
//     out[t] = round( ( sum over slots j ascending with row_of_slot[t, j] >= 0 of f32(y[row_of_slot[t, j]]) ) + f32(shared[t]) )
// Slots of other ranks are -1: their rows are never read, whatever the buffer holds. fp32 adds in slot order, so the
// result is the same bits in every run. A token without a local slot gets shared[t], or 0.
//
// One block per token (gridDim.x), one thread per 8 columns; the live rows are gathered into registers of each warp
// once and four rows are in flight per thread. Memory-bound. No shared memory. Limits: N a multiple of 8, k <= 32.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

constexpr int kColumns = 8;
constexpr int kMaxThreads = 1024;
constexpr int kInFlight = 4;

__device__ __forceinline__ void add_row(float (&sum)[kColumns], uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += bits_float(words[i] << 16);
        sum[2 * i + 1] += bits_float(words[i] & 0xffff0000u);
    }
}

template <bool kFloatOut>
__global__ void __launch_bounds__(kMaxThreads) combine_kernel(const __grid_constant__ CombineParams params) {
    const int64_t token = blockIdx.x;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int mine = lane < params.k ? params.row_of_slot[token * params.k + lane] : -1;
    const uint32_t live = __ballot_sync(kFullWarp, mine >= 0);
    const int num_chunks = params.hidden / kColumns;
    const int padded = align_up(num_chunks, 32);  // shuffles below need whole warps
    for (int chunk = static_cast<int>(threadIdx.x); chunk < padded; chunk += static_cast<int>(blockDim.x)) {
        const bool valid = chunk < num_chunks;
        const int64_t column = static_cast<int64_t>(chunk) * kColumns;
        uint4 shared = make_uint4(0, 0, 0, 0);
        if (valid && params.shared) shared = ptx::load_streaming(params.shared + token * params.hidden + column);
        float sum[kColumns] = {};
        for (uint32_t left = live; left != 0;) {
            uint4 rows[kInFlight];
            int count = 0;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (left == 0) break;
                const int slot = __ffs(static_cast<int>(left)) - 1;
                left &= left - 1;
                const int64_t row = __shfl_sync(kFullWarp, mine, slot);
                if (valid) rows[i] = ptx::load_streaming(params.y + row * params.hidden + column);
                count = i + 1;
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i)
                if (i < count && valid) add_row(sum, rows[i]);
        }
        if (!valid) continue;
        if (params.shared) add_row(sum, shared);
        if constexpr (kFloatOut) {
            float4* out = reinterpret_cast<float4*>(static_cast<float*>(params.out) + token * params.hidden + column);
            out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
            out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        } else {
            uint4 packed;
            packed.x = ptx::pack_bf16x2(sum[0], sum[1]);
            packed.y = ptx::pack_bf16x2(sum[2], sum[3]);
            packed.z = ptx::pack_bf16x2(sum[4], sum[5]);
            packed.w = ptx::pack_bf16x2(sum[6], sum[7]);
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.out) + token * params.hidden + column) = packed;
        }
    }
}

}  // namespace

void launch_combine(const CombineParams& params) {
    if (params.num_tokens == 0) return;
    const int threads = min_of(align_up(params.hidden / kColumns, 32), kMaxThreads);
    const LaunchConfig config{dim3(static_cast<unsigned>(params.num_tokens)), dim3(static_cast<unsigned>(threads)), 0,
                              params.stream};
    if (params.out_float) launch("moe.combine", combine_kernel<true>, config, params);
    else launch("moe.combine", combine_kernel<false>, config, params);
}

}  // namespace mdi::moe
