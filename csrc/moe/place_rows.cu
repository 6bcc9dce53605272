// The tokens' folded rows to their places in front of the grouped FP8 product (docs/numerics.md, scale folding).
//
// place_rows: row row_of_slot[t, j] of the product is token t, for every slot j that names one. A token is folded before it travels
// (codes with one scale a row), so this is a copy. Its words change places inside every 128 columns (fold.cuh), columns past K are zero.
// One warp per token: the row is read once, all of it in flight for K <= 5120, and written as often as the token has
// experts here; tokens without one are not read. A lane gathers the four words, one of each scale group, that are neighbours in
// the product's order: reads are whole sectors, writes 16 bytes a lane. Rows that no slot names are not written.
// Memory: K bytes in for every token with a slot here, K out for every slot. Limits: K a multiple of 32, k <= 32.
#include "common/launch.h"
#include "common/reduce.cuh"
#include "moe/fold.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kInFlight = 10;                // 16-byte vectors of a lane
constexpr int kGroups = 4, kGroupWords = 8;  // of a block of 128 columns
constexpr int kBlockWords = kGroups * kGroupWords, kBlockVectors = kGroupWords;

__global__ void __launch_bounds__(kThreads) place_rows_kernel(const __grid_constant__ PlaceRowsParams params) {
    const int lane = static_cast<int>(threadIdx.x) % 32, q = lane % kBlockVectors;
    const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (token >= params.num_tokens) return;
    const int mine = lane < params.picks ? params.row_of_slot[token * params.picks + lane] : -1;
    const uint32_t live = __ballot_sync(kFullWarp, mine >= 0);
    if (live == 0) return;
    const int groups = params.k / 32, blocks = ceil_div(params.k, 128);
    const uint32_t* codes = reinterpret_cast<const uint32_t*>(params.codes + token * params.k);
    const float scale = params.code_scale[token];
    for (int first = lane / kBlockVectors; first - lane / kBlockVectors < blocks; first += kInFlight * (32 / kBlockVectors)) {
        uint4 words[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int block = first + i * (32 / kBlockVectors), group = block * kGroups;
            const uint32_t* word = codes + block * kBlockWords + q;
            words[i].x = group < groups ? word[0] : 0u;
            words[i].y = group + 1 < groups ? word[kGroupWords] : 0u;
            words[i].z = group + 2 < groups ? word[2 * kGroupWords] : 0u;
            words[i].w = group + 3 < groups ? word[3 * kGroupWords] : 0u;
        }
        for (uint32_t left = live; left != 0; left &= left - 1) {
            const int64_t row = __shfl_sync(kFullWarp, mine, __ffs(static_cast<int>(left)) - 1);
            uint4* folded = reinterpret_cast<uint4*>(params.folded + row * blocks * 128) + q;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const int block = first + i * (32 / kBlockVectors);
                if (block < blocks) folded[block * kBlockVectors] = words[i];
            }
        }
    }
    if (mine >= 0) params.row_scale[mine] = scale;
}

}  // namespace

void launch_place_rows(const PlaceRowsParams& params) {
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(params.num_tokens, kWarps));
    launch("moe.place_rows", place_rows_kernel, {dim3(blocks), dim3(kThreads), 0, params.stream}, params);
}

}  // namespace mdi::moe
