// Sum of a token's expert rows, then the shared expert, then one rounding (model spec 6.2):
//     out[t] = round( ( sum over slots j ascending with row_of_slot[t, j] >= 0 of f32(y[row_of_slot[t, j]]) ) + f32(shared[t]) )
// Slots of other ranks are -1: their rows are never read, whatever the buffer holds. fp32 adds in slot order, so the
// result is the same bits in every run. A token without a local slot gets shared[t], or 0.
// With the other ranks' sums of these tokens (combine_parts) this rank's own sum is rounded to bf16 as theirs were and all are added
// in rank order before the shared expert: the bits of a pass that writes the own sum and one that reads it again, without either.
//
// One block per token (gridDim.x) and up to 5,120 columns (gridDim.y), a thread takes two chunks of 8 columns and has all rows of
// most tokens in flight at once; the slots of the token sit in the lanes of every warp. Memory-bound. No shared memory.
// Limits: N a multiple of 8, k <= 32.
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
constexpr int kFewRows = 2;   // rows of a chunk in flight, for tokens with no more than these: most on one rank of four
constexpr int kManyRows = 3;

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

// A thread's chunks of what is added after the slots: part `index` of another rank, then the shared expert's row.
__device__ __forceinline__ void load_extra(const CombineParams& p, int index, int64_t offset, int step, const bool (&valid)[kChunks],
                                           uint4 (&row)[kChunks]) {
    const uint16_t* source = index < p.num_parts ? p.parts + index * p.num_tokens * p.hidden : p.shared;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
        if (valid[c]) row[c] = ptx::load_streaming(source + offset + c * step * kColumns);
}

// Adds the rows of the next slots in `left`, up to kRows that are in flight together. All lanes of the warp call it.
template <int kRows>
__device__ __forceinline__ void add_slots(const CombineParams& p, int mine, uint32_t& left, int first, int step,
                                          const bool (&valid)[kChunks], float (&sum)[kChunks][kColumns]) {
    uint4 rows[kRows][kChunks];
    bool taken[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        taken[i] = left != 0;
        const int64_t row = __shfl_sync(kFullWarp, mine, taken[i] ? __ffs(static_cast<int>(left)) - 1 : 0);
        left &= left - 1;  // 0 stays 0
        const uint16_t* source = p.y + row * p.hidden + first * kColumns;
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
            if (taken[i] && valid[c]) rows[i][c] = ptx::load_streaming(source + c * step * kColumns);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
            if (taken[i] && valid[c]) add_row(sum[c], rows[i][c]);
}

template <bool kFloatOut, bool kParts>
__global__ void __launch_bounds__(kMaxThreads, 3) combine_kernel(const __grid_constant__ CombineParams params) {
    const int64_t token = blockIdx.x;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int step = static_cast<int>(blockDim.x);
    const int first = static_cast<int>(blockIdx.y) * kChunks * step + static_cast<int>(threadIdx.x);
    const int64_t offset = token * params.hidden + first * kColumns;
    float sum[kChunks][kColumns] = {};
    bool valid[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) valid[c] = first + c * step < params.hidden / kColumns;
    const int num_extra = params.num_parts + (params.shared ? 1 : 0);
    uint4 next[kChunks] = {};
    if (num_extra > 0) load_extra(params, 0, offset, step, valid, next);

    const int mine = lane < params.k ? params.row_of_slot[token * params.k + lane] : -1;
    uint32_t left = __ballot_sync(kFullWarp, mine >= 0);
    if (__popc(left) <= kFewRows)
        add_slots<kFewRows>(params, mine, left, first, step, valid, sum);
    else
        while (left != 0) add_slots<kManyRows>(params, mine, left, first, step, valid, sum);

    uint4 own[kChunks];
    if constexpr (kParts) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            own[c] = rounded(sum[c]);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) sum[c][i] = 0.0f;
        }
    }
    for (int extra = 0; extra <= num_extra; ++extra) {
        if (kParts && extra == params.own_part) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) add_row(sum[c], own[c]);
        }
        if (extra == num_extra) break;
        uint4 row[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) row[c] = next[c];
        if (extra + 1 < num_extra) load_extra(params, extra + 1, offset, step, valid, next);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) add_row(sum[c], row[c]);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
        if (valid[c]) store<kFloatOut>(params, offset + c * step * kColumns, sum[c]);
}

}  // namespace

void launch_combine(const CombineParams& params) {
    if (params.num_tokens == 0) return;
    const int chunks = params.hidden / kColumns;
    const int threads = min_of(align_up(ceil_div(chunks, kChunks), 32), kMaxThreads);
    const dim3 grid(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(ceil_div(chunks, kChunks * threads)));
    const LaunchConfig config{grid, dim3(static_cast<unsigned>(threads)), 0, params.stream};
    if (params.has_parts) launch("moe.combine_parts", combine_kernel<false, true>, config, params);
    else if (params.out_float) launch("moe.combine", combine_kernel<true, false>, config, params);
    else launch("moe.combine", combine_kernel<false, false>, config, params);
}

}  // namespace mdi::moe
