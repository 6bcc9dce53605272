// Index scores of the candidate blocks (candidate_logits.cu: same function, same bits) from folded keys: int8 rows (fold.cuh)
// and mma.sync s8, so that nothing is expanded for every token that reads a row.
//
// Passes (one stream, no host synchronisation):
//   most_visible   largest visible count of each sequence
//   fold_rows      the packed key rows of each sequence, in entry order: 1,056 bytes a block of 8 keys, its 8 factors last.
//                  Byte order of a block: 16 bytes at 256 * s + 16 * (4 * (g % 4) + t) are the A fragment of MMA step s of lane
//                  (g, t): words 2s and 2s + 1 of quarter t of key g % 4, interleaved with those of key g % 4 + 4
//   score          a warp owns up to 256 blocks of one token, two at a time (M = 16: lanes g < 4 hold the keys of the first
//                  block, as rows g and g + 8, lanes g >= 4 those of the second); its query rows are folded once into B
//                  fragments; a ring of four pairs of blocks is filled three ahead (cp.async). The four warps of a block take
//                  neighbouring tokens over the same part of their candidates, which overlap in practice
//   second pass    candidate_logits.cu for tokens whose queries and for blocks whose keys do not fold; nothing otherwise
//
// Head sums: score_tile.cuh. Limits: Hi <= 32, Di = 128, blocks of 8, pages of whole blocks; otherwise, or without a workspace,
// candidate_logits.cu does everything. Workspace: candidate_workspace_bytes(), about 132 bytes a sequence and entry.
// SASS: IMMA
#include "common/launch.h"
#include "common/math.h"
#include "common/ptx_sm80.cuh"
#include "indexer/fold.cuh"
#include "indexer/indexer.h"
#include "indexer/score_tile.cuh"

namespace mdi::indexer {
namespace folded {  // its own names: on the CPU it shares a translation unit with candidate_logits.cu

constexpr int kDim = 128;
constexpr int kBlockKeys = 8;
constexpr int kCodeBytes = kBlockKeys * kDim;
constexpr int kBlockBytes = kCodeBytes + kBlockKeys * 4;  // 1,056: codes, then the factors of the 8 keys
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kWarpBlocks = 256;  // most blocks of a warp
constexpr int kRing = 4;          // pairs of blocks

struct Workspace {
    uint8_t* rows;            // [B, blocks, kBlockBytes]
    int32_t* most_visible;    // [B]
    uint8_t* marked_blocks;   // [B, blocks]
    int32_t* any_marked;      // [1], and behind it
    uint8_t* marked_tokens;   // [T]
    int num_blocks;           // of a sequence: all that its page table can hold
};

int64_t place(int64_t num_tokens, int64_t num_seqs, int64_t num_blocks, uint8_t* base, Workspace& w) {
    int64_t offset = 0;
    const auto take = [&](int64_t bytes) {
        uint8_t* at = base + offset;
        offset += align_up<int64_t>(bytes, 256);
        return at;
    };
    w.rows = take(num_seqs * num_blocks * kBlockBytes);
    w.most_visible = reinterpret_cast<int32_t*>(take(num_seqs * 4));
    w.marked_blocks = take(num_seqs * num_blocks);
    uint8_t* marks = take(16 + num_tokens);
    w.any_marked = reinterpret_cast<int32_t*>(marks);
    w.marked_tokens = marks + 16;
    w.num_blocks = static_cast<int>(num_blocks);
    return offset;
}

__device__ __forceinline__ int visible_of(const LogitsParams& p, int64_t token, int seq) {
    if (seq < 0 || seq >= p.num_seqs) return 0;
    const int64_t held = static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page;
    return max_of(0, static_cast<int>(min_of<int64_t>(p.visible[token], held)));
}

constexpr int kFoldThreads = 256;

__global__ void __launch_bounds__(kFoldThreads) most_visible_kernel(LogitsParams p, Workspace w) {
    const int seq = static_cast<int>(blockIdx.x);
    __shared__ int most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    int mine = 0;
    for (int token = threadIdx.x; token < p.num_tokens; token += kFoldThreads)
        if (p.seq_of_token[token] == seq) mine = max_of(mine, visible_of(p, token, seq));
    mine = __reduce_max_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) atomicMax(&most, mine);
    __syncthreads();
    if (threadIdx.x == 0) w.most_visible[seq] = most;
}

// One warp a block of 8 keys.
__global__ void __launch_bounds__(kFoldThreads) fold_rows_kernel(LogitsParams p, Workspace w, int groups_per_seq) {
    const int seq = static_cast<int>(blockIdx.x / groups_per_seq), lane = threadIdx.x % 32;
    const int block = static_cast<int>(blockIdx.x % groups_per_seq) * (kFoldThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    const int most = w.most_visible[seq];
    if (block >= w.num_blocks || block * kBlockKeys >= most) return;
    const int entry = block * kBlockKeys + lane / 4, quarter = lane % 4;
    uint32_t word[4] = {0, 0, 0, 0};
    uint32_t scale = 127;
    if (entry < most) {
        const int page = p.page_table[static_cast<int64_t>(seq) * p.pages_per_seq + entry / p.entries_per_page];
        const int64_t row = static_cast<int64_t>(page) * p.entries_per_page + entry % p.entries_per_page;
        const uint8_t* source = p.keys + row * KeyRow<kDim>::kBytes;
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = reinterpret_cast<const uint32_t*>(source)[4 * quarter + i];
        scale = source[KeyRow<kDim>::kCodeBytes + quarter];
    }
    const Folded folded = fold_quarter(word, scale);
    const int64_t at = static_cast<int64_t>(seq) * w.num_blocks + block;
    // lanes of keys 0..3 write steps 0 and 1 of themselves and the key 4 further on, lanes of keys 4..7 steps 2 and 3
    const bool first = lane < 16;
    uint32_t mine[4], other[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        mine[i] = first ? folded.bytes[i] : folded.bytes[4 + i];
        other[i] = __shfl_xor_sync(0xffffffffu, first ? folded.bytes[4 + i] : folded.bytes[i], 16);
    }
    uint4* target = reinterpret_cast<uint4*>(w.rows + at * kBlockBytes) + (first ? 0 : 32) + lane % 16;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint32_t a0 = first ? mine[2 * j] : other[2 * j], b0 = first ? other[2 * j] : mine[2 * j];
        const uint32_t a1 = first ? mine[2 * j + 1] : other[2 * j + 1], b1 = first ? other[2 * j + 1] : mine[2 * j + 1];
        target[16 * j] = make_uint4(a0, b0, a1, b1);
    }
    if (quarter == 0) reinterpret_cast<float*>(w.rows + at * kBlockBytes + kCodeBytes)[lane / 4] = folded.factor();
    const bool ok = __all_sync(0xffffffffu, folded.ok) != 0;
    if (lane == 0) {
        w.marked_blocks[at] = !ok;
        if (!ok) atomicOr(w.any_marked, 1);
    }
}

// mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32: d += a * b. Lane (g, t): a[0] row g, k 4t..4t+3; a[1] row g + 8;
// a[2], a[3] the same rows, k + 16; b[0] column g, k 4t..4t+3; b[1] k + 16; d as in mma_bf16_m16n8k16.
__device__ __forceinline__ void mma_s8_m16n8k32(uint32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                uint32_t b1) {
#if defined(__CUDA_ARCH__)
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t a[2][2] = {{a0, a2}, {a1, a3}}, b[2] = {b0, b1};
    for (int i = 0; i < 4; ++i)
        for (int source = 0; source < 4; ++source)
            for (int half = 0; half < 2; ++half) {
                const uint32_t x = __shfl_sync(0xffffffffu, a[i / 2][half], 4 * g + source);
                uint32_t y[2];
                for (int column = 0; column < 2; ++column) {
                    // every lane reads the column it needs: 2t + column
                    y[column] = __shfl_sync(0xffffffffu, b[half], 4 * (2 * t + column) + source);
                }
                for (int byte = 0; byte < 4; ++byte)
                    d[i] += static_cast<uint32_t>(static_cast<int8_t>(x >> 8 * byte) * static_cast<int8_t>(y[i % 2] >> 8 * byte));
            }
#endif
}

struct SharedWarp {
    alignas(16) uint8_t ring[kRing][2][kBlockBytes];
    int id[kWarpBlocks + 2 * kRing];  // the warp's candidates; -1 = no visible entry
};
static_assert(sizeof(SharedWarp) * kWarps <= 48 * 1024, "static shared memory");

// Lanes 0..15 copy the first block of a pair, lanes 16..31 the second one.
__device__ __forceinline__ void fetch(const Workspace& w, int64_t first, SharedWarp& shared, int pair, int lane) {
    const int half = lane / 16, part = lane % 16, block = shared.id[2 * pair + half];
    if (block >= 0) {
        const uint8_t* source = w.rows + (first + block) * kBlockBytes + part * 16;
        const uint32_t target = ptx::smem_address(shared.ring[pair % kRing][half]) + part * 16;
#pragma unroll
        for (int s = 0; s < 4; ++s) ptx::cp_async_16(target + 256 * s, source + 256 * s);
        if (part < 2) ptx::cp_async_16(target + kCodeBytes, source + kCodeBytes);
    }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 4) folded_kernel(LogitsParams p, Workspace w, int num_chunks, int warp_blocks) {
    __shared__ SharedWarp shared_warps[kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    SharedWarp& shared = shared_warps[warp];
    const int64_t token = static_cast<int64_t>(blockIdx.x / num_chunks) * kWarps + warp;
    const int first_block = static_cast<int>(blockIdx.x % num_chunks) * warp_blocks;
    const int num_blocks = min_of(warp_blocks, p.num_candidates - first_block);
    if (token >= p.num_tokens || num_blocks <= 0) return;
    const int seq = p.seq_of_token[token];
    const int visible = visible_of(p, token, seq);
    const int limit = ceil_div(visible, kBlockKeys);  // blocks from here on have no visible entry
    const int64_t first = visible > 0 ? static_cast<int64_t>(seq) * w.num_blocks : 0;
    const int32_t* candidates = p.candidates + token * p.num_candidates + first_block;
    uint16_t* out = p.out + token * p.out_stride + static_cast<int64_t>(first_block) * kBlockKeys;

    uint32_t b[kTiles][8], weight[kTiles][2];
    bool ok = true;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const int head = 8 * n + g;
        uint32_t word[4] = {0, 0, 0, 0};
        uint32_t scale = 127;
        uint16_t weight_of_row = 0;
        if (head < p.num_heads) {
            const int64_t row = token * p.num_heads + head;
            const uint4 v = reinterpret_cast<const uint4*>(p.q_codes)[row * 4 + t];
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
            scale = p.q_scale[row * 4 + t];
            weight_of_row = p.weights[row];
        }
        const Folded folded = fold_quarter(word, scale);
        ok = ok && folded.ok && weight_folds(weight_of_row);
#pragma unroll
        for (int i = 0; i < 8; ++i) b[n][i] = folded.bytes[i];
        const uint32_t scaled = scaled_weight(weight_of_row, folded.exponent);  // of head 8n + g; the epilogue wants 8n + 2t, + 1
        weight[n][0] = __shfl_sync(0xffffffffu, scaled, 8 * t) << 16;
        weight[n][1] = __shfl_sync(0xffffffffu, scaled, 8 * t + 4) << 16;
    }
    if (__all_sync(0xffffffffu, ok) == 0) {  // the second pass scores this token
        if (lane == 0) {
            w.marked_tokens[token] = 1;
            atomicOr(w.any_marked, 1);
        }
        return;
    }

    for (int i = lane; i < kWarpBlocks + 2 * kRing; i += 32) {
        const int id = i < num_blocks ? candidates[i] : -1;
        shared.id[i] = id >= 0 && id < limit ? id : -1;
    }
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kRing - 1; ++pair) {
        fetch(w, first, shared, pair, lane);
        ptx::cp_async_commit();
    }
    // lane t == 0 stores key g % 4 of the lane's block, lane t == 1 key g % 4 + 4
    const int key = g % 4 + 4 * (t % 2);
    for (int pair = 0; 2 * pair < num_blocks; ++pair) {
        ptx::cp_async_wait<kRing - 2>();
        __syncwarp();  // the pair's bytes are there for every lane, and nobody reads the slot that is fetched next
        fetch(w, first, shared, pair + kRing - 1, lane);
        ptx::cp_async_commit();
        const uint8_t* block = shared.ring[pair % kRing][lane / 16];
        const int mine = 2 * pair + lane / 16, id = shared.id[mine];
        float sum_low = 0.0f, sum_high = 0.0f;
        if (__any_sync(0xffffffffu, id >= 0)) {
            uint32_t acc[kTiles][4];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint4 a = reinterpret_cast<const uint4*>(block)[16 * step + lane % 16];
#pragma unroll
                for (int n = 0; n < kTiles; ++n) mma_s8_m16n8k32(acc[n], a.x, a.y, a.z, a.w, b[n][2 * step], b[n][2 * step + 1]);
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                add_folded_heads(sum_low, int_relu(acc[n][0]), int_relu(acc[n][1]), weight[n][0], weight[n][1]);
                add_folded_heads(sum_high, int_relu(acc[n][2]), int_relu(acc[n][3]), weight[n][0], weight[n][1]);
            }
            sum_low = quad_sum(sum_low);
            sum_high = quad_sum(sum_high);
        }
        const float factor = reinterpret_cast<const float*>(block + kCodeBytes)[key];
        const bool seen = id >= 0 && id * kBlockKeys + key < visible;
        const uint16_t value = seen ? to_bf16_bits((t == 0 ? sum_low : sum_high) * factor) : kNegInfBf16;
        if (t < 2 && mine < num_blocks) out[mine * kBlockKeys + key] = value;
    }
    ptx::cp_async_wait<0>();
}

template <int kTiles>
void launch_folded(const LogitsParams& p, const Workspace& w) {
    // fewer blocks a warp when few tokens would leave SMs idle
    const int64_t groups = ceil_div(p.num_tokens, kWarps);
    int warp_blocks = kWarpBlocks;
    while (warp_blocks > 16 && groups * ceil_div(p.num_candidates, warp_blocks) < 1024) warp_blocks /= 2;
    const int num_chunks = ceil_div(p.num_candidates, warp_blocks);
    launch("indexer.candidate_logits", folded_kernel<kTiles>,
           {dim3(static_cast<unsigned>(groups * num_chunks)), dim3(kThreads), 0, p.stream}, p, w, num_chunks, warp_blocks);
}

}  // namespace folded

int64_t candidate_workspace_bytes(int64_t num_tokens, int64_t num_seqs, int64_t entries_per_seq) {
    folded::Workspace w;
    return folded::place(num_tokens, num_seqs, ceil_div<int64_t>(entries_per_seq, folded::kBlockKeys), nullptr, w);
}

void launch_candidate_logits_sm90(const LogitsParams& params) {
    LogitsParams p = params;
    const bool folds = p.workspace != nullptr && p.head_dim == folded::kDim && p.num_heads <= 32 && p.block_size == folded::kBlockKeys &&
                       p.entries_per_page % folded::kBlockKeys == 0 && p.pages_per_seq > 0 && reinterpret_cast<uintptr_t>(p.keys) % 16 == 0;
    if (!folds) {
        launch_candidate_logits(p);
        return;
    }
    folded::Workspace w;
    folded::place(p.num_tokens, p.num_seqs, static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page / folded::kBlockKeys, p.workspace, w);
    check_cuda("indexer.candidate_logits", cudaMemsetAsync(w.any_marked, 0, 16 + static_cast<size_t>(p.num_tokens), p.stream));
    launch("indexer.candidate_logits", folded::most_visible_kernel, {dim3(static_cast<unsigned>(p.num_seqs)), dim3(folded::kFoldThreads), 0, p.stream},
           p, w);
    const int groups = ceil_div(w.num_blocks, folded::kFoldThreads / 32);
    launch("indexer.candidate_logits", folded::fold_rows_kernel,
           {dim3(static_cast<unsigned>(static_cast<int64_t>(p.num_seqs) * groups)), dim3(folded::kFoldThreads), 0, p.stream}, p, w, groups);
    if (p.num_heads <= 8) folded::launch_folded<1>(p, w);
    else if (p.num_heads <= 16) folded::launch_folded<2>(p, w);
    else folded::launch_folded<4>(p, w);
    p.any_marked = w.any_marked;
    p.marked_tokens = w.marked_tokens;
    p.marked_tiles = w.marked_blocks;
    p.marked_stride = w.num_blocks;
    launch_candidate_logits(p);
}

}  // namespace mdi::indexer
