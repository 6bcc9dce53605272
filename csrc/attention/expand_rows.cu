// Packed KV rows -> expanded rows: the values over the key factor (row_codec.cuh) in bf16, as sparse_sm90.cu's K tiles have them, but in
// their natural order. Where many queries read the same rows, expanding them once and gathering 1,024 bytes a row instead of 528 or
// 288 is faster.
//
// A warp takes two rows; lane l has chunks l and l + 32 of each, so that loads and stores of a warp are contiguous. Bound by memory.
#include "attention/attention.h"
#include "attention/row_codec.cuh"
#include "common/launch.h"

namespace mdi::attention {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpRows = 2, kLaneChunks = kHeadDim / kChunkElems / 32;

template <bool kWindow>
struct PackedChunks {
    static constexpr int kRowBytes = kWindow ? kWindowRowBytes : kCompressedRowBytes;
    static constexpr int kScaleColumns = kWindow ? 32 : 16;  // columns of a scale
    static constexpr int kCodeBytes = kWindow ? 8 : 4;       // of a chunk
    uint2 codes[kLaneChunks];                                // FP4: x only
    uint32_t scale[kLaneChunks];

    MDI_DEVICE void load(const uint8_t* row, int lane) {
#pragma unroll
        for (int i = 0; i < kLaneChunks; ++i) {
            const int chunk = lane + 32 * i;
            const uint8_t* from = row + chunk * kCodeBytes;
            if constexpr (kWindow) {
                codes[i] = __ldg(reinterpret_cast<const uint2*>(from));
            } else {
                codes[i].x = __ldg(reinterpret_cast<const uint32_t*>(from));
            }
            scale[i] = __ldg(row + kHeadDim / kChunkElems * kCodeBytes + chunk * kChunkElems / kScaleColumns);
        }
    }
    MDI_DEVICE uint4 chunk(int i) const {
        if constexpr (kWindow) return expand_fp8(codes[i].x, codes[i].y, fp8_factor(scale[i]));
        uint32_t factor[2];
        fp4_factors(scale[i], factor);
        return expand_fp4(codes[i].x, factor[0]);
    }
};

template <bool kWindow>
__global__ void __launch_bounds__(kThreads) expand_rows_kernel(const ExpandRowsParams params) {
    const int lane = threadIdx.x % 32;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * kWarpRows;
    PackedChunks<kWindow> rows[kWarpRows];
    bool there[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
        int64_t row = first + i;
        there[i] = row < params.num_rows;
        if (there[i] && params.pages != nullptr) {
            row = static_cast<int64_t>(__ldg(params.pages + row / params.page_rows)) * params.page_rows + row % params.page_rows;
        }
        there[i] = there[i] && static_cast<uint64_t>(row) < static_cast<uint64_t>(params.num_packed_rows);
        if (there[i]) rows[i].load(params.packed + row * PackedChunks<kWindow>::kRowBytes, lane);
    }
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
        if (!there[i]) continue;
        uint4* to = reinterpret_cast<uint4*>(params.out + (first + i) * kExpandedRowBytes) + lane;
#pragma unroll
        for (int j = 0; j < kLaneChunks; ++j) to[32 * j] = from_key_order(rows[i].chunk(j));
    }
}

}  // namespace

void launch_expand_rows(const ExpandRowsParams& params) {
    if (params.num_rows == 0) return;
    const dim3 blocks(static_cast<unsigned>(ceil_div<int64_t>(params.num_rows, kThreads / 32 * kWarpRows)));
    const auto kernel = params.window ? expand_rows_kernel<true> : expand_rows_kernel<false>;
    launch("attention.expand_rows", kernel, {blocks, dim3(kThreads), 0, params.stream}, params);
}

}  // namespace mdi::attention
