// The pass of hc_expand_mix.cu for sm_90a and n = 4 (other n take the pass there): the same arithmetic in the same order, so the same
// bits, with the tiles moved by TMA. The portable pass is bound by its multiprocessors as much as by memory: the warps that multiply
// also copy, and all of them meet at a barrier a tile. Here a warp waits for a tile's bytes, works in place and goes on.
//
// Grid (token blocks, column slices) as there, one persistent block a multiprocessor, 384 threads:
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
// Shared memory: 7 stages x 27 KiB, 2 buffers x 16 KiB.
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
constexpr int kStages = (227 * 1024 - kBarrierBytes - kBuffers * T::kBufferFloats * 4) / kStageBytes;
constexpr int kBuffersAt = kStages * kStageBytes;
constexpr int kBarriersAt = kBuffersAt + kBuffers * T::kBufferFloats * 4;
constexpr int kSmemBytes = kBarriersAt + kBarrierBytes;
static_assert(kPlaneBytes % 128 == 0 && (2 * kStages + kBuffers) * 8 <= kBarrierBytes, "where TMA writes; barriers");

using Layout = TileLayout<kPlaneBytes / 2, kSlice, kTileBytes>;

// streams and out [T, n, N] as (N, T, n), y and x [T, N]
struct PassMaps {
    CUtensorMap streams, y, out, x;
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

MDI_DEVICE void load_tile(const PassMaps& maps, int tile, uint32_t stage, uint32_t full) {
    const int column = static_cast<int>(blockIdx.y) * kSlice, token = tile * kTileTokens;
    ptx::mbarrier_arrive_expect_tx(full, kTileBytes);
    ptx::tma_load_3d(stage, &maps.streams, full, column, token, 0);
    ptx::tma_load_2d(stage + kStreams * kPlaneBytes, &maps.y, full, column, token);
}

MDI_DEVICE void store_tile(const PassMaps& maps, int tile, uint32_t stage) {
    const int column = static_cast<int>(blockIdx.y) * kSlice, token = tile * kTileTokens;
    ptx::tma_store_3d(&maps.out, stage, column, token, 0);
    ptx::tma_store_2d(&maps.x, stage + kStreams * kPlaneBytes, column, token);
    ptx::bulk_commit();
}

MDI_DEVICE void multiply_tiles(const HcMixParams& p, char* smem, Barriers barriers, int count) {
    const int warp = static_cast<int>(threadIdx.x) / 32, t = static_cast<int>(threadIdx.x) % 4;
    Fragments<kStreams> fn;
    load_fragments<kStreams>(p, static_cast<int>(blockIdx.y) * kSlice + warp * kWarpColumns + t * 4, fn);
    Ring<kStages> ring;
    Ring<kBuffers> buffer;
    buffer.parity = 1;  // free at first
    for (int i = 0; i < count; ++i) {
        ptx::mbarrier_wait(barriers.full(ring.index), ring.parity);
        ptx::mbarrier_wait(barriers.free(buffer.index), buffer.parity);
        compute_tile<kStreams, true, Layout>(smem + ring.index * kStageBytes, fn,
                                              reinterpret_cast<float*>(smem + kBuffersAt) + buffer.index * T::kBufferFloats);
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(barriers.done(ring.index));
        ring.next();
        buffer.next();
    }
}

MDI_DEVICE void move_tiles(const HcExpandMixParams& p, const PassMaps& maps, char* smem, Barriers barriers, int first_tile, int count) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t stages = ptx::smem_address(smem);
    const auto load = [&](int i, int stage) {
        if (lane == 0) load_tile(maps, first_tile + i, stages + stage * kStageBytes, barriers.full(stage));
        fetch_coefficients<kStreams, 32>(p, lane, first_tile + i,
                                         reinterpret_cast<float*>(smem + stage * kStageBytes + kTileBytes));
        ptx::cp_async_mbarrier_arrive(barriers.full(stage));
        __syncwarp();
    };
    for (int i = 0; i < min_of(kStages, count); ++i) load(i, i);
    Ring<kStages> ring;
    int last = 0;  // stage of the tile before
    for (int i = 0; i < count; ++i) {
        ptx::mbarrier_wait(barriers.done(ring.index), ring.parity);
        if (lane == 0) {
            store_tile(maps, first_tile + i, stages + ring.index * kStageBytes);
            ptx::bulk_wait_read<1>();  // the tile before has left its stage
        }
        if (i > 0 && i - 1 + kStages < count) load(i - 1 + kStages, last);
        last = ring.index;
        ring.next();
    }
    if (lane == 0) ptx::bulk_wait_read<0>();  // the block's shared memory lives as long as the block
}

MDI_DEVICE void add_tiles(const HcMixParams& p, const char* smem, Barriers barriers, int first_tile, int count) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Ring<kStages> ring;
    Ring<kBuffers> buffer;
    for (int i = 0; i < count; ++i) {
        ptx::mbarrier_wait(barriers.done(ring.index), ring.parity);
        const float* sums = reinterpret_cast<const float*>(smem + kBuffersAt) + buffer.index * T::kBufferFloats;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) add_warps<kStreams, true>(p, lane + 32 * half, first_tile + i, sums);
        ptx::mbarrier_arrive(barriers.free(buffer.index));
        ring.next();
        buffer.next();
    }
}

__global__ void __launch_bounds__(kPassThreads, 1)
hc_pass_sm90_kernel(const __grid_constant__ HcExpandMixParams p, const __grid_constant__ PassMaps maps, int block_tiles) {
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
    const int first_tile = static_cast<int>(blockIdx.x) * block_tiles;
    const int count = min_of(static_cast<int>(ceil_div<int64_t>(p.mix.num_tokens, kTileTokens)) - first_tile, block_tiles);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kMixWarps) multiply_tiles(p.mix, smem, barriers, count);
    else if (warp == kMoveWarp) move_tiles(p, maps, smem, barriers, first_tile, count);
    else add_tiles(p.mix, smem, barriers, first_tile, count);
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
    const int block_tiles = pass_block_tiles(p.mix.num_tokens, p.mix.width);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(ceil_div<int64_t>(p.mix.num_tokens, kTileTokens), block_tiles));
    launch("elementwise.hc_expand_mix", hc_pass_sm90_kernel,
           {dim3(blocks, static_cast<unsigned>(ceil_div(p.mix.width, kSlice))), dim3(kPassThreads), kSmemBytes, p.mix.stream}, p, maps,
           block_tiles);
    launch_hc_finish(p, row);
}

}  // namespace mdi::elementwise
