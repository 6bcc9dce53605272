// Hyper-connection coefficients (model spec 3.3, 3.4). With f = the n*N stream values of a token:
//     raw[k] = sum_i fn[k, i] * f[i],   rstd = 1 / sqrt(mean(f^2) + norm_eps),   m[k] = raw[k] * rstd
//     l[k]   = fma(m[k], scale[group of k], base[k])
//     pre    = sigmoid(l[0..n)) + hc_eps,   post = 2 sigmoid(l[n..2n)),   comb = sinkhorn(l[2n..2n+n*n))
//
// Projection on tensor cores with float32 quality: fn is split into three bf16 terms (hi + mid + lo hold all 24 bits, the
// streams are bf16 already), so every product is exact; a term accumulates in the tensor core over 16 columns of n streams,
// the sums of the warps and slices are added in float32 on the CUDA cores, because the tensor core truncates.
//
// Kernel 1, grid (token blocks, column slices), one persistent block a multiprocessor: ten warps move tiles and multiply, two
// add up. A multiplying warp owns 16 columns of all n streams and keeps its part of fn, split, in registers as mma operands
// (72 at n = 4): fn takes no shared memory and is read once a block. Tiles of 16 tokens x 160 columns come through a cp.async
// pipeline, 320 contiguous bytes a row and stream, six tiles = 120 KiB in flight at n = 4. The mma's K index is permuted alike
// in both operands so that a lane's four consecutive columns are its fragment. The sum of squares rides along. The warps'
// sums go through shared memory and are added by the last two warps, in order, one tile later: one barrier a tile. Half of
// the multiplying warps move their share of the tiles before they multiply, half after, so that both kinds of work overlap.
// Kernel 2, half a warp per token: adds the slices in order, then the coefficients; lane j*n + i holds comb[j, i].
//
// The order of every sum is a function of N and n alone: coefficients do not depend on T or on the other tokens.
// Memory-bound: the streams are read once (2 n N bytes a token), partial sums are 2 * 4 * 28 bytes a slice and token.
// Limits: n <= 4, N % 8 == 0. NaN or Inf in a token's streams makes that token's coefficients NaN.
// SASS: HMMA
#include "elementwise/hc_mix.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kFinishThreads = 128;

template <int kStreams>
__global__ void __launch_bounds__(kFinishThreads) hc_coefficients_kernel(HcMixParams p, int num_slices) {
    const int token = static_cast<int>(blockIdx.x * (kFinishThreads / 32) + threadIdx.x / 32) * kTokensPerWarp;
    if (token < p.num_tokens) make_coefficients<kStreams>(p, num_slices, token);  // whole warps
}

template <int kStreams>
void launch_coefficients(const HcMixParams& p) {
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.num_tokens, kFinishThreads / 32 * kTokensPerWarp));
    launch("elementwise.hc_mix coefficients", hc_coefficients_kernel<kStreams>,
           {dim3(blocks), dim3(kFinishThreads), 0, p.stream}, p, ceil_div(p.width, kSlice));
}

template <int kStreams>
void launch_streams(const HcMixParams& p) {
    HcExpandMixParams pass = {};
    pass.mix = p;
    launch_hc_pass<kStreams, false>("elementwise.hc_mix", pass);
    launch_coefficients<kStreams>(p);
}

}  // namespace

int64_t hc_mix_workspace_floats(int64_t num_tokens, int num_streams, int width) {
    const int num_mixes = 2 * num_streams + num_streams * num_streams;
    return num_tokens * ceil_div(width, kSlice) * (align_up(num_mixes, 8) + 4);
}

void launch_hc_coefficients(const HcMixParams& p) {
    switch (p.num_streams) {
        case 1: return launch_coefficients<1>(p);
        case 2: return launch_coefficients<2>(p);
        case 3: return launch_coefficients<3>(p);
        default: return launch_coefficients<4>(p);
    }
}

void launch_hc_mix(const HcMixParams& p) {
    switch (p.num_streams) {
        case 1: return launch_streams<1>(p);
        case 2: return launch_streams<2>(p);
        case 3: return launch_streams<3>(p);
        default: return launch_streams<4>(p);
    }
}

}  // namespace mdi::elementwise
