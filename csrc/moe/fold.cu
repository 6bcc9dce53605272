// Scale folding for the FP8 grouped product (docs/numerics.md): what turns a scale per 32 columns into one per row.
//
// fold_rows: row i of the product takes row r = a_rows ? a_rows[i] : i of a. Its scale is the largest group scale of
// the row, S = 2^(max byte - 127), and every code becomes e4m3_rne(code * 2^(byte - max byte)). Values above rowmax /
// 28,500 stay exact, smaller ones move by at most S * 2^-10. A NaN scale makes the row's scale NaN.
// Columns are reordered inside every 128 (fold.cuh), columns past K are zero. Rows at or past
// offsets[E] are neither read nor written.
// One warp per row, eight loads of 128 bytes in flight. Memory: 1.03 K bytes in, K out.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/reduce.cuh"
#include "moe/fold.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 8;
constexpr int kInFlight = 8;   // 128-column blocks a warp has requested before it waits for the first

// the largest of `count` bytes, in every lane
__device__ __forceinline__ uint32_t warp_max_byte(const uint8_t* __restrict__ bytes, int count) {
    uint32_t largest = 0;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) largest = max(largest, static_cast<uint32_t>(bytes[i]));
    return __reduce_max_sync(kFullWarp, largest);
}

__global__ void __launch_bounds__(kThreads) fold_rows_kernel(const __grid_constant__ FoldRowsParams params) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int t = lane % 4, q = lane / 4;
    const int groups = params.k / 32, blocks = ceil_div(params.k, 128);
    const int64_t rows = min(params.num_rows, static_cast<int64_t>(params.offsets[params.num_experts]));
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
         row += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int64_t source = params.a_rows ? params.a_rows[row] : row;
        const uint8_t* scale = params.a_scale + source * groups;
        const uint32_t* codes = reinterpret_cast<const uint32_t*>(params.a + source * params.k);
        uint32_t* folded = reinterpret_cast<uint32_t*>(params.folded + row * (blocks * 128));
        const uint32_t largest = warp_max_byte(scale, groups);
        if (lane == 0) params.row_scale[row] = e8m0_decode(static_cast<uint8_t>(largest));
        for (int first = 0; first < blocks; first += kInFlight) {
            uint32_t words[kInFlight], bytes[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const int group = 4 * (first + i) + t;
                words[i] = group < groups ? codes[group * 8 + q] : 0;
                bytes[i] = group < groups ? scale[group] : 0;
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i)
                if (first + i < blocks)
                    folded[(first + i) * 32 + lane] =
                        shift_codes(words[i], static_cast<int>(largest) - static_cast<int>(bytes[i]));
        }
    }
}

}  // namespace

void launch_fold_rows(const FoldRowsParams& params) {
    int device = 0, num_sms = 0;
    check_cuda("moe.fold_rows", cudaGetDevice(&device));
    check_cuda("moe.fold_rows", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const auto blocks = static_cast<unsigned>(
        min_of(ceil_div<int64_t>(params.num_rows, kWarps), static_cast<int64_t>(num_sms) * kBlocksPerSm));
    launch("moe.fold_rows", fold_rows_kernel, {dim3(blocks), dim3(kThreads), 0, params.stream}, params);
}

}  // namespace mdi::moe
