// One pass over rows of N columns; which parts run is chosen by the launcher, so that every fusion gives the bits of the
// separate ops:
//     collapse   x[t] = bf16( sum_s pre[t, s] * streams[t, s] )                      (hc_collapse, model spec 3.2)
//     norm       y = bf16( w * (x * rstd) ),  rstd = 1 / sqrt(mean(x^2) + eps)       (rmsnorm, 3.6)
//     group      amax over 32 columns, s = ceilpow2(max(amax, 1e-4) * fp32(1/448)), code = e4m3(y / s)   (act_quant, 8)
//     folded     every code re-expressed at the row's largest s: one scale a row     (act_quant_folded)
// The collapse is rounded to bf16 before the norm and the quantiser reads the rounded norm, as the separate ops would.
//
// Block = blockDim.y rows of blockDim.x threads. A thread owns kChunks vectors of 8 columns, vector c * blockDim.x + x, in
// registers from the load to the store: each row is read once and written once. Four neighbouring lanes hold one group.
// In rows of 256 threads and more without a collapse a thread stands for two of these threads: half the work once a thread.
// Row sums: a thread's own columns in order, a butterfly over the warp, then the warps in order. The shape of the block
// depends on N only, so a row's bits depend neither on T nor on the other parts of the pass.
// Shared memory: at most 256 bytes. Limits: N % 32 == 0, N <= 16384 (rows) or 10240 (streams).
// Non-finite input: a NaN reaches every output of its row through the norm, or of its group (scale byte 255) without one.
#include "common/launch.h"
#include "elementwise/row_pass.cuh"

namespace mdi::elementwise {
namespace {

template <int kChunks, int kParts, bool kCollapse, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) row_kernel(RowParams p) {
    __shared__ RowScratch scratch;
    row_pass<kChunks, kParts, kCollapse>(p, static_cast<int>(blockIdx.x), scratch);
}

// Codes that are quantised already: a block takes one row, reads its scale bytes for the largest, then folds.
constexpr int kFoldThreads = 128;

__global__ void __launch_bounds__(kFoldThreads) fold_scales_kernel(FoldScalesParams p) {
    __shared__ uint32_t scratch[kFoldThreads / 32];
    const int64_t token = blockIdx.x;
    const int num_groups = p.width / kQuantGroup;
    const uint8_t* scale = p.scale + token * num_groups;
    uint32_t largest = 0;
    for (int g = threadIdx.x; g < num_groups; g += kFoldThreads) largest = max_of(largest, static_cast<uint32_t>(scale[g]));
    const int row_byte = static_cast<int>(block_max<kFoldThreads>(largest, scratch));
    const uint4* codes = reinterpret_cast<const uint4*>(p.codes + token * p.width);
    uint4* folded = reinterpret_cast<uint4*>(p.folded + token * p.width);
#pragma unroll 4
    for (int v = threadIdx.x; v < p.width / 16; v += kFoldThreads) {
        const uint4 packed = codes[v];
        const int byte = scale[v / 2];
        const uint2 low = fold_e4m3x8(make_uint2(packed.x, packed.y), byte, row_byte);
        const uint2 high = fold_e4m3x8(make_uint2(packed.z, packed.w), byte, row_byte);
        folded[v] = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (threadIdx.x == 0) p.row_scale[token] = e8m0_decode(static_cast<uint8_t>(row_byte));
}

template <int kChunks, int kParts, bool kCollapse, int kMaxThreads>
void launch_rows(const RowParams& p, int threads) {
    const int rows = rows_per_block(threads);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.num_tokens, rows));
    launch("elementwise.row", row_kernel<kChunks, kParts, kCollapse, kMaxThreads>,
           {dim3(blocks), dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0, p.stream}, p);
}

}  // namespace

void launch_row(const RowParams& p) {
    // Two vectors a thread up to N = 10240 for both sources, so that collapse + norm sums like norm alone.
    const int threads = row_threads<2>(p.width);
    if (p.streams != nullptr)
        launch_rows<2, 1, true, 640>(p, threads);
    else if (p.width > kMaxCollapseWidth)
        launch_rows<4, 1, false, 512>(p, row_threads<4>(p.width));
    else if (row_threads_in_halves(threads))
        launch_rows<2, 2, false, 320>(p, threads / 2);
    else
        launch_rows<2, 1, false, 640>(p, threads);
}

void launch_fold_scales(const FoldScalesParams& p) {
    launch("elementwise.fold_scales", fold_scales_kernel,
           {dim3(static_cast<unsigned>(p.num_tokens)), dim3(kFoldThreads), 0, p.stream}, p);
}

}  // namespace mdi::elementwise
