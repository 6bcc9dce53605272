// Hyper-connection coefficients (model spec 3.3, 3.4). With f = the n*N stream values of a token:
//     raw[k] = sum_i fn[k, i] * f[i],   rstd = 1 / sqrt(mean(f^2) + norm_eps),   m[k] = raw[k] * rstd
//     l[k]   = fma(m[k], scale[group of k], base[k])
//     pre    = sigmoid(l[0..n)) + hc_eps,   post = 2 sigmoid(l[n..2n)),   comb = sinkhorn(l[2n..2n+n*n))
//
// Projection on tensor cores with float32 quality: fn is split into three bf16 terms (hi + mid + lo hold all 24 bits, the
// streams are bf16 already), so every product is exact; hi accumulates in the tensor core over 32 columns of n streams at
// most and is then added in float32 on the CUDA cores, because the tensor core truncates; mid and lo are 2^-8 smaller and
// stay in one accumulator.
//
// Kernel 1, grid (token blocks, column slices): a block owns kSlice = 320 columns of all n streams. It splits its part of fn
// into shared memory once (3 x 8 ceil(k/8) rows of n * 320 + 32 bf16: 184.5 KiB at n = 4; the 64 bytes of padding keep the
// 16-byte fragment loads free of bank conflicts), then every warp streams tiles of 32 tokens through it with no further
// barrier: 16-byte loads straight into mma fragments, one 32-column step of all streams ahead. The mma's K index is permuted
// alike in both operands so that a lane's eight consecutive columns are its fragment. The sum of squares rides along.
// Kernel 2, a warp per token: adds the slices in order, then the coefficients; lane 2n + j*n + i holds comb[j, i].
//
// The order of every sum is a function of N and n alone: coefficients do not depend on T or on the other tokens.
// Memory-bound: the streams are read once (2 n N bytes a token), partial sums are 2 * 4 * 32 bytes a slice and token.
// Limits: n <= 4, N % 8 == 0. NaN or Inf in a token's streams makes that token's coefficients NaN.
// SASS: HMMA
#include "elementwise/hc_mix.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kMixRowTiles = 2;  // mma row tiles of a warp tile
constexpr int kMixTokens = 16 * kMixRowTiles;

template <int kStreams>
MDI_DEVICE void load_rows(const HcMixParams& p, int64_t first_token, int stream, int column, Rows<kMixRowTiles>& rows) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const bf16* source = p.streams + ((first_token + g) * kStreams + stream) * p.width + column;
#pragma unroll
    for (int r = 0; r < 2 * kMixRowTiles; ++r) {
        rows[r] = make_uint4(0, 0, 0, 0);
        if (column < p.width && first_token + g + 8 * r < p.num_tokens)
            rows[r] = load_of_line(source + static_cast<int64_t>(8 * r) * kStreams * p.width);
    }
}

template <int kStreams>
__global__ void __launch_bounds__(kMixThreads, 1) hc_mix_kernel(HcMixParams p, int block_tiles) {
    using T = MixTraits<kStreams>;
    bf16* planes = reinterpret_cast<bf16*>(dynamic_smem());
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int first_column = static_cast<int>(blockIdx.y) * kSlice;
    const int steps = ceil_div(min_of(kSlice, p.width - first_column), kStep);
    const int64_t num_tiles = ceil_div<int64_t>(p.num_tokens, kMixTokens);
    const int64_t end_tile = min_of<int64_t>(num_tiles, (static_cast<int64_t>(blockIdx.x) + 1) * block_tiles);
    int64_t tile = static_cast<int64_t>(blockIdx.x) * block_tiles + warp;
    const int lane_column = first_column + lane % 4 * kVector;

    Rows<kMixRowTiles> rows[kStreams];  // in flight: one step of every stream; the first loads overlap the splitting of fn
    if (tile < end_tile)
#pragma unroll
        for (int s = 0; s < kStreams; ++s) load_rows<kStreams>(p, tile * kMixTokens, s, lane_column, rows[s]);
    load_planes<kStreams>(p, first_column, planes);
    __syncthreads();

    const bf16* fragment = planes + (lane / 4) * T::kPitch + lane % 4 * kVector;
    while (tile < end_tile) {
        const int64_t next_tile = tile + kMixWarps;
        Accumulators<kStreams, kMixRowTiles> acc = {};
        for (int step = 0; step < steps; ++step) {
            const bool last = step + 1 == steps;
            const int64_t next_token = (last ? next_tile : tile) * kMixTokens;
            const int next_column = lane_column + (last ? 0 : (step + 1) * kStep);
#pragma unroll
            for (int s = 0; s < kStreams; ++s) {
                add_step(rows[s], fragment + s * kSlice + step * kStep, acc);
                if (!last || next_tile < end_tile) load_rows<kStreams>(p, next_token, s, next_column, rows[s]);
            }
            promote(acc);
        }
        store_partial(p, tile * kMixTokens, acc);
        tile = next_tile;
    }
}

constexpr int kFinishThreads = 128;

template <int kStreams>
__global__ void __launch_bounds__(kFinishThreads) hc_coefficients_kernel(HcMixParams p, int num_slices) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (kFinishThreads / 32) + threadIdx.x / 32;
    if (token < p.num_tokens) make_coefficients<kStreams>(p, num_slices, token);  // whole warps
}

template <int kStreams>
void launch_coefficients(const HcMixParams& p) {
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.num_tokens, kFinishThreads / 32));
    launch("elementwise.hc_mix coefficients", hc_coefficients_kernel<kStreams>,
           {dim3(blocks), dim3(kFinishThreads), 0, p.stream}, p, ceil_div(p.width, kSlice));
}

template <int kStreams>
void launch_streams(const HcMixParams& p) {
    const int num_slices = ceil_div(p.width, kSlice);
    const int64_t num_tiles = ceil_div<int64_t>(p.num_tokens, kMixTokens);
    const int block_tiles = tiles_per_block(num_tiles, num_slices);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(num_tiles, block_tiles));
    launch("elementwise.hc_mix", hc_mix_kernel<kStreams>,
           {dim3(blocks, static_cast<unsigned>(num_slices)), dim3(kMixThreads), MixTraits<kStreams>::kSmemBytes, p.stream},
           p, block_tiles);
    launch_coefficients<kStreams>(p);
}

}  // namespace

int64_t hc_mix_workspace_floats(int64_t num_tokens, int num_streams, int width) {
    const int num_mixes = 2 * num_streams + num_streams * num_streams;
    return num_tokens * ceil_div(width, kSlice) * (align_up(num_mixes, 8) + 8);
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
