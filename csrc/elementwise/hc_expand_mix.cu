// The hyper-connection work between two sublayers in one pass over the streams (model spec 3.2 to 3.5):
//     R'[i] = bf16( post[i] * y + sum_j comb[j, i] * R[j] )      expand the previous sublayer's output
//     x     = bf16( sum_s pre[s] * R'[s] )                       collapse with the previous sublayer's pre
//     raw   = fn . R',  sum of R'^2                              partial sums of the next coefficients
// The coefficients follow from the partial sums in a second kernel (hc_mix.cu); with a norm weight that kernel's other blocks
// do the norm and quantisation of x (the row pass of rmsnorm_quant.cu), which hides the latency of the sinkhorn. pre, post
// and comb of the previous sublayer are known before this pass, so the streams are read once and written once:
// (2n + 2) N * 2 bytes a token, against (4n + 2) N * 2 for the separate ops.
//
// The pass is hc_mix's (hc_mix.cu: fn in registers, tiles of 16 tokens x 160 columns through a cp.async pipeline), with y and
// the tokens' coefficients in the tile: a lane expands four columns of two tokens in place, R' over the streams and x over y,
// and multiplies what it holds. One tile later the warps write it out in 16-byte vectors, 320 contiguous bytes a row.
// Every part does the arithmetic of its own op in the same order: R', x and the coefficients have the bits of hc_expand,
// hc_collapse and hc_mix. out may be streams: a block reads its columns of a token before it writes them, and nobody else
// touches them. Shared memory at n = 4: 223 KiB, 125 KiB of tiles in flight. Limits: those of hc_mix. T-independent and
// deterministic as hc_mix. On Hopper hc_expand_mix_sm90.cu is the pass before a norm.
// SASS: HMMA
#include "elementwise/hc_mix.cuh"
#include "elementwise/row_pass.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kFinishChunks = 2;  // as in launch_row up to kMaxCollapseWidth columns
constexpr int kFinishMaxThreads = kMaxCollapseWidth / kVector / kFinishChunks;
constexpr int kKnownThreads = 160, kKnownWidth = 2 * kKnownThreads * kFinishChunks * kVector;  // N = 5120: see row_pass.cuh
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFinishWarps = 24;  // wanted on a multiprocessor; with 32 the compiler spills for sm_100a
#else
constexpr int kFinishWarps = 32;  // 64 registers a thread
#endif

// x / value for x >= 0 without a division: a factor rounded up gives the quotient or one too many.
struct Divisor {
    int value;
    uint32_t factor;  // ceil(2^32 / value); 0 stands for 2^32
    explicit Divisor(int divisor)
        : value(divisor), factor(static_cast<uint32_t>(ceil_div<uint64_t>(uint64_t{1} << 32, static_cast<uint64_t>(divisor)))) {}
    MDI_DEVICE int quotient(int x) const {
        if (factor == 0) return x;
        const int most = static_cast<int>(static_cast<uint64_t>(x) * factor >> 32);
        return most - (most * value > x ? 1 : 0);
    }
};

// Block b with b % 2^stride_log2 == 0 makes coefficients while there are any left to make, so that they run
// beside the rows from the first to the last wave; the other blocks norm and quantise rows, each group's last ones first:
// those are still in L2. A group is what the pass took in order; the last one may end early.
template <int kStreams, int kParts, int kThreads>
__global__ void __launch_bounds__(kFinishMaxThreads / kParts, kFinishWarps * 32 * kParts / kFinishMaxThreads)
hc_finish_kernel(HcMixParams mix, RowParams row, int num_slices, int coefficient_blocks, int stride_log2, Divisor groups,
                 int group_blocks) {
    __shared__ RowScratch<float> sum_scratch;
    __shared__ RowScratch<uint32_t> max_scratch;
    const int block = static_cast<int>(blockIdx.x), mask = (1 << stride_log2) - 1;
    if ((block & mask) != 0 || block >> stride_log2 >= coefficient_blocks) {
        const int before = min_of(coefficient_blocks, (block + mask) >> stride_log2);  // coefficient blocks before this one
        const int index = block - before, turn = groups.quotient(index), group = index - turn * groups.value;
        return row_pass<kFinishChunks, kParts, false, kThreads>(row, (group + 1) * group_blocks - 1 - turn, sum_scratch,
                                                                max_scratch);
    }
    const int warps = static_cast<int>(blockDim.x * blockDim.y) / 32;
    const int warp = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) / 32;
    const int token = ((block >> stride_log2) * warps + warp) * kTokensPerWarp;
    if (token < mix.num_tokens) make_coefficients<kStreams>(mix, num_slices, token);  // whole warps
}

template <int kStreams, int kParts, int kThreads>
void launch_finish(const HcExpandMixParams& p, const RowParams& row, int64_t group_tokens, int threads) {
    const int rows = rows_per_block(threads), group_blocks = static_cast<int>(group_tokens / rows);
    const auto num_groups = static_cast<int>(ceil_div<int64_t>(p.mix.num_tokens, group_tokens));
    const auto coefficient_blocks = static_cast<int>(ceil_div<int64_t>(p.mix.num_tokens, threads * rows / 32 * kTokensPerWarp));
    const int num_blocks = coefficient_blocks + num_groups * group_blocks;
    int stride_log2 = 0;
    while (num_blocks / coefficient_blocks >> (stride_log2 + 1) > 0) ++stride_log2;
    launch("elementwise.hc_expand_mix finish", hc_finish_kernel<kStreams, kParts, kThreads>,
           {dim3(static_cast<unsigned>(num_blocks)), dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0,
            p.mix.stream},
           p.mix, row, ceil_div(p.mix.width, kSlice), coefficient_blocks, stride_log2, Divisor(num_groups), group_blocks);
}

template <int kStreams>
void launch_streams_finish(const HcExpandMixParams& p, const RowParams& row, int64_t group_tokens) {
    const int threads = row_threads<kFinishChunks>(row.width);
    if (!row_threads_in_halves(threads)) return launch_finish<kStreams, 1, 0>(p, row, group_tokens, threads);
    if (row.width == kKnownWidth) return launch_finish<kStreams, 2, kKnownThreads>(p, row, group_tokens, kKnownThreads);
    launch_finish<kStreams, 2, 0>(p, row, group_tokens, threads / 2);
}

}  // namespace

void launch_hc_finish(const HcExpandMixParams& p, const RowParams* row, int64_t group_tokens) {
    if (p.mix.num_tokens == 0) return;
    if (row == nullptr) return launch_hc_coefficients(p.mix);
    switch (p.mix.num_streams) {
        case 1: return launch_streams_finish<1>(p, *row, group_tokens);
        case 2: return launch_streams_finish<2>(p, *row, group_tokens);
        case 3: return launch_streams_finish<3>(p, *row, group_tokens);
        default: return launch_streams_finish<4>(p, *row, group_tokens);
    }
}

void launch_hc_expand_mix(const HcExpandMixParams& p, const RowParams* row) {
    switch (p.mix.num_streams) {
        case 1: launch_hc_pass<1, true>("elementwise.hc_expand_mix", p); break;
        case 2: launch_hc_pass<2, true>("elementwise.hc_expand_mix", p); break;
        case 3: launch_hc_pass<3, true>("elementwise.hc_expand_mix", p); break;
        default: launch_hc_pass<4, true>("elementwise.hc_expand_mix", p);
    }
    launch_hc_finish(p, row, static_cast<int64_t>(pass_block_tiles(p.mix.num_tokens, p.mix.width)) * kTileTokens);
}

}  // namespace mdi::elementwise
