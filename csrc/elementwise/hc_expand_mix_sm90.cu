// The pass of hc_expand_mix.cu for sm_90a and n = 4 (other n take the pass there): the same arithmetic in the same order, so the same
// bits, with the tiles moved by TMA. The portable pass is bound by its multiprocessors as much as by memory: the warps that multiply
// also copy, and all of them meet at a barrier a tile. Here a warp waits for a tile's bytes, works in place and goes on.
//
// Grid (column slices, token blocks), one persistent block a multiprocessor; of g token blocks, block b takes tiles b, b + g, ... At any
// time all blocks then work on neighbouring rows and columns of memory, which moves faster (H200: 7 us at T = 4096), and so do four tiles
// in flight instead of seven (4 us; with three the multiplying warps wait). 384 threads:
//   warps 0..9   16 columns of all n streams each; their part of fn, split in three bf16 planes, stays in registers
//   warp 10      TMA in and out (one lane) and the coefficients of a tile's tokens (all lanes)
//   warp 11      adds the warps' sums of a tile, in order, to the partial sums
// A tile is [n streams, then y][16 tokens][160 columns]. R' is written over the streams and x over y; TMA stores the tile from where
// it lies. Rows of 320 bytes put every other token on the same banks, so that a warp's accesses take two turns: boxes of 32 columns with
// a swizzle avoid that, but move more slowly (H200: 2 us at full clock; at 1.3 GHz they win).
//
// Barriers, s = stage, b = buffer of sums:
//   full[s]   all bytes of the tile, and the 32 lanes with the coefficients
//   done[s]   every multiplying lane: the tile's results and sums are in shared memory
//   free[b]   every lane of warp 11 has read the buffer
// Shared memory: 4 stages x 27 KiB, 2 buffers x 16 KiB.
// SASS: HMMA
#include "common/ptx_sm90.cuh"
#include "common/tma_sm90.h"
#include "elementwise/hc_mix.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kStreams = 4;
using T = PassTraits<kStreams, true>;

constexpr int kPlaneBytes = kTileTokens * kSlice * 2;  // of a tile: one stream, or y
constexpr int kTileBytes = (kStreams + 1) * kPlaneBytes;
constexpr int kStageBytes = align_up(kTileBytes + kTileTokens * T::kCoefficientPitch * 4, 128);
constexpr int kMoveWarp = kMixWarps;
constexpr int kPassThreads = 32 * (kMixWarps + 2);
constexpr int kBuffers = 2;  // of sums
constexpr int kBarrierBytes = 256;
constexpr int kStages = 4;
constexpr int kBuffersAt = kStages * kStageBytes;
constexpr int kBarriersAt = kBuffersAt + kBuffers * T::kBufferFloats * 4;
constexpr int kSmemBytes = kBarriersAt + kBarrierBytes;
static_assert(kPlaneBytes % 128 == 0 && (2 * kStages + kBuffers) * 8 <= kBarrierBytes, "where TMA writes; barriers");
static_assert(kSmemBytes <= 227 * 1024, "shared memory");

using Layout = TileLayout<kPlaneBytes / 2, kSlice, kTileBytes>;

// streams and out [T, n, N] as (N, T, n), y and x [T, N]
struct PassMaps {
    CUtensorMap streams, y, out, x;
};

// What this block takes: tile(0), tile(1), ... tile(count - 1) of a column slice.
struct Share {
    int slice, count;
    MDI_DEVICE explicit Share(int64_t num_tokens) {
        const int tiles = static_cast<int>(ceil_div<int64_t>(num_tokens, kTileTokens));
        slice = static_cast<int>(blockIdx.x);
        count = ceil_div(tiles - static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y));
    }
    MDI_DEVICE int tile(int i) const { return static_cast<int>(blockIdx.y) + i * static_cast<int>(gridDim.y); }
};

struct Barriers {
    uint32_t first;
    MDI_DEVICE uint32_t full(int stage) const { return first + 8 * stage; }
    MDI_DEVICE uint32_t done(int stage) const { return first + 8 * (kStages + stage); }
    MDI_DEVICE uint32_t free(int buffer) const { return first + 8 * (2 * kStages + buffer); }
};

// Position in a ring and the parity of the round.
template <int kSize>
struct Ring {
    int index = 0;
    uint32_t parity = 0;
    MDI_DEVICE void next() {
        if (++index == kSize) index = 0, parity ^= 1;
    }
};

MDI_DEVICE void load_tile(const PassMaps& maps, int slice, int tile, uint32_t stage, uint32_t full) {
    const int column = slice * kSlice, token = tile * kTileTokens;
    ptx::mbarrier_arrive_expect_tx(full, kTileBytes);
    ptx::tma_load_3d(stage, &maps.streams, full, column, token, 0);
    ptx::tma_load_2d(stage + kStreams * kPlaneBytes, &maps.y, full, column, token);
}

MDI_DEVICE void store_tile(const PassMaps& maps, int slice, int tile, uint32_t stage) {
    const int column = slice * kSlice, token = tile * kTileTokens;
    ptx::tma_store_3d(&maps.out, stage, column, token, 0);
    ptx::tma_store_2d(&maps.x, stage + kStreams * kPlaneBytes, column, token);
    ptx::bulk_commit();
}

MDI_DEVICE void multiply_tiles(const HcMixParams& p, char* smem, Barriers barriers, Share share) {
    const int thread = static_cast<int>(threadIdx.x);
    Fragments<kStreams> fn;
    load_fragments<kStreams>(p, share.slice * kSlice + thread / 32 * kWarpColumns + thread % 4 * 4, fn);
    Ring<kStages> ring;
    Ring<kBuffers> buffer;
    buffer.parity = 1;  // free at first
    for (int i = 0; i < share.count; ++i) {
        ptx::mbarrier_wait(barriers.full(ring.index), ring.parity);
        ptx::mbarrier_wait(barriers.free(buffer.index), buffer.parity);
        compute_tile<kStreams, true, Layout>(smem + ring.index * kStageBytes, fn,
                                              reinterpret_cast<float*>(smem + kBuffersAt) + buffer.index * T::kBufferFloats, thread);
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(barriers.done(ring.index));
        ring.next();
        buffer.next();
    }
}

MDI_DEVICE void move_tiles(const HcExpandMixParams& p, const PassMaps& maps, char* smem, Barriers barriers, Share share) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t stages = ptx::smem_address(smem);
    const auto load = [&](int i, int stage) {
        if (lane == 0) load_tile(maps, share.slice, share.tile(i), stages + stage * kStageBytes, barriers.full(stage));
        fetch_coefficients<kStreams, 32>(p, lane, share.tile(i),
                                         reinterpret_cast<float*>(smem + stage * kStageBytes + kTileBytes));
        ptx::cp_async_mbarrier_arrive(barriers.full(stage));
        __syncwarp();
    };
    for (int i = 0; i < min_of(kStages, share.count); ++i) load(i, i);
    Ring<kStages> ring;
    int last = 0;  // stage of the tile before
    for (int i = 0; i < share.count; ++i) {
        ptx::mbarrier_wait(barriers.done(ring.index), ring.parity);
        if (lane == 0) {
            store_tile(maps, share.slice, share.tile(i), stages + ring.index * kStageBytes);
            ptx::bulk_wait_read<1>();  // the tile before has left its stage
        }
        if (i > 0 && i - 1 + kStages < share.count) load(i - 1 + kStages, last);
        last = ring.index;
        ring.next();
    }
    if (lane == 0) ptx::bulk_wait_read<0>();  // the block's shared memory lives as long as the block
}

MDI_DEVICE void add_tiles(const HcMixParams& p, const char* smem, Barriers barriers, Share share) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Ring<kStages> ring;
    Ring<kBuffers> buffer;
    for (int i = 0; i < share.count; ++i) {
        ptx::mbarrier_wait(barriers.done(ring.index), ring.parity);
        const float* sums = reinterpret_cast<const float*>(smem + kBuffersAt) + buffer.index * T::kBufferFloats;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) add_warps<kStreams, true>(p, share.slice, lane + 32 * half, share.tile(i), sums);
        ptx::mbarrier_arrive(barriers.free(buffer.index));
        ring.next();
        buffer.next();
    }
}

__global__ void __launch_bounds__(kPassThreads, 1)
hc_pass_sm90_kernel(const __grid_constant__ HcExpandMixParams p, const __grid_constant__ PassMaps maps) {
    char* const smem = dynamic_smem();
    const Barriers barriers{ptx::smem_address(smem + kBarriersAt)};
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(barriers.full(s), 1 + 32);
            ptx::mbarrier_init(barriers.done(s), 32 * kMixWarps);
        }
        for (int b = 0; b < kBuffers; ++b) ptx::mbarrier_init(barriers.free(b), 32);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const Share share(p.mix.num_tokens);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kMixWarps) multiply_tiles(p.mix, smem, barriers, share);
    else if (warp == kMoveWarp) move_tiles(p, maps, smem, barriers, share);
    else add_tiles(p.mix, smem, barriers, share);
}

CUtensorMap stream_map(const char* what, const HcMixParams& p, const bf16* base) {
    const uint64_t row = static_cast<uint64_t>(p.width) * 2;
    return make_tensor_map({what, TmaType::kBf16, base, 3, {static_cast<uint64_t>(p.width), static_cast<uint64_t>(p.num_tokens), kStreams},
                            {row * kStreams, row}, {kSlice, kTileTokens, kStreams}, CU_TENSOR_MAP_SWIZZLE_NONE});
}

CUtensorMap row_map(const char* what, const HcMixParams& p, const bf16* base, int64_t stride) {
    return make_tensor_map({what, TmaType::kBf16, base, 2, {static_cast<uint64_t>(p.width), static_cast<uint64_t>(p.num_tokens)},
                            {static_cast<uint64_t>(stride) * 2}, {kSlice, kTileTokens}, CU_TENSOR_MAP_SWIZZLE_NONE});
}

}  // namespace

void launch_hc_expand_mix_sm90(const HcExpandMixParams& p, const RowParams* row) {
    if (p.mix.num_tokens == 0) return;
    if (p.mix.num_streams != kStreams) return launch_hc_expand_mix(p, row);
    const PassMaps maps = {stream_map("elementwise.hc_expand_mix streams", p.mix, p.mix.streams),
                           row_map("elementwise.hc_expand_mix y", p.mix, p.y, p.y_stride),
                           stream_map("elementwise.hc_expand_mix out", p.mix, p.out),
                           row_map("elementwise.hc_expand_mix x", p.mix, p.x, p.mix.width)};
    const int64_t tiles = ceil_div<int64_t>(p.mix.num_tokens, kTileTokens);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(tiles, pass_block_tiles(p.mix.num_tokens, p.mix.width)));
    launch("elementwise.hc_expand_mix", hc_pass_sm90_kernel,
           {dim3(static_cast<unsigned>(ceil_div(p.mix.width, kSlice)), blocks), dim3(kPassThreads), kSmemBytes, p.mix.stream}, p, maps);
    launch_hc_finish(p, row, tiles * kTileTokens);
}

}  // namespace mdi::elementwise
