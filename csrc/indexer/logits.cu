// Index scores of every visible entry (model spec 5.3), one launch for the whole batch:
//
//   out[t, j] = bf16( sum_h f32( bf16( relu(bf16(q[t,h] . k[j])) * w[t,h] ) ) ),   -inf at or past visible[t]
//
// Entry j of token t is row page_table[seq, j / epp] * epp + j % epp of the key pool. Dot, both roundings, head sum and the
// last rounding happen in registers; each score is written once and no [T, Hi, n] array exists. Roundings, dot and sum
// order are those of score_tile.cuh; the result does not depend on the batch a token is in, nor on the split of the work.
//
// A block scores 8 * 64 / Hi tokens (16 at 32 heads) against a chunk of the columns. Its 8 warps each keep 64 query rows
// (2 tokens at 32 heads) as B fragments in registers for the whole chunk; keys come in tiles of 64 rows, packed, by
// cp.async (two staging buffers), are expanded to bf16 once per block (two buffers), and are the A operand (ldmatrix). One
// barrier per tile: between two barriers a warp fetches tile i+2, expands tile i+1 and multiplies tile i.
//
// Sequences: a block walks over the runs of equal seq_of_token among its tokens (one run in a long prefill), each run up to
// its own largest visible count, so a mixed block costs one pass per run and is right in every case. Tiles at or
// past that count are not loaded, not scored, and filled with -inf. A tile inside one page is fetched with 16-byte
// cp.async; otherwise row by row, each with its own page look-up.
//
// Shared memory at Di = 128: 2 x 4.25 KiB packed + 2 x 17 KiB expanded (rows padded by 16 B: conflict-free) + 1 KiB per 4 tokens
// of output staging = 42.5 + 4 KiB (Hi = 32). Registers: 128 of B fragments, 32 of accumulators; one block an SM.
// Limits: Hi <= 64, Di 64 or 128, any T, any num_cols, any page size; a token with seq < 0 is all -inf. Rows of the pool
// that no query can see may hold anything.
// SASS: HMMA
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "indexer/indexer.h"
#include "indexer/score_tile.cuh"

namespace mdi::indexer {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kTileKeys = 64;
constexpr int kWarpColumns = 64;                   // query rows (token, head) of a warp
constexpr int kColumnTiles = kWarpColumns / 8;

template <int kHeads, int kDim>
struct Traits {
    static constexpr int kWarpTokens = kWarpColumns / kHeads;
    static constexpr int kBlockTokens = kWarps * kWarpTokens;
    static constexpr int kTilesPerToken = kHeads / 8;
    static constexpr int kRowBytes = KeyRow<kDim>::kBytes;
    static constexpr int kPitch = 2 * kDim + 16;   // 16-byte units: odd, so 8 rows of an ldmatrix hit all banks once
    struct SharedStorage {
        alignas(16) uint8_t packed[2][kTileKeys * kRowBytes];
        alignas(16) uint8_t keys[2][kTileKeys * kPitch];
        alignas(16) uint16_t out[kWarps][kWarpTokens][kTileKeys];
        int seq[kBlockTokens];
        int visible[kBlockTokens];
    };
    static_assert((kPitch / 16) % 2 == 1, "ldmatrix rows must spread over the banks");
    static_assert(sizeof(SharedStorage) <= 100 * 1024, "shared memory");
};

// Packed rows first_key .. first_key + 63 of one sequence -> staging. Rows at or past `limit` are not read (a whole
// tile inside a page is: its rows exist, whatever they hold).
template <int kDim>
__device__ __forceinline__ void fetch_tile(const LogitsParams& p, const int32_t* pages, bool whole_tiles, int first_key, int limit,
                                           uint8_t* staging) {
    constexpr int kRowBytes = KeyRow<kDim>::kBytes;
    if (whole_tiles) {
        const int page = pages[first_key / p.entries_per_page];
        const int64_t row = static_cast<int64_t>(page) * p.entries_per_page + first_key % p.entries_per_page;
        const uint8_t* source = p.keys + row * kRowBytes;
        for (int i = threadIdx.x; i < kTileKeys * kRowBytes / 16; i += kThreads)
            ptx::cp_async_16(ptx::smem_address(staging + 16 * i), source + 16 * i);
    } else {
        for (int i = threadIdx.x; i < kTileKeys * (kRowBytes / 2); i += kThreads) {
            const int key = i / (kRowBytes / 2), entry = first_key + key;
            if (entry >= limit) continue;
            const int64_t row =
                static_cast<int64_t>(pages[entry / p.entries_per_page]) * p.entries_per_page + entry % p.entries_per_page;
            reinterpret_cast<uint16_t*>(staging)[i] =
                reinterpret_cast<const uint16_t*>(p.keys + row * kRowBytes)[i - key * (kRowBytes / 2)];
        }
    }
    ptx::cp_async_commit();
}

// Thread (key, quarter) expands its quarter; pair P of quarter t goes to words 4P + t of the row: what ldmatrix hands to
// lane t in step P / 2, half P % 2.
template <int kHeads, int kDim>
__device__ __forceinline__ void expand_tile(const uint8_t* staging, uint8_t* keys) {
    using Row = KeyRow<kDim>;
    const int key = threadIdx.x / 4, t = threadIdx.x % 4;
    static_assert(kThreads == 4 * kTileKeys, "one thread per key and quarter");
    const uint8_t* source = staging + key * Row::kBytes;
    Quarter<kDim> quarter;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(source) + t * Row::kWords * 2;
#pragma unroll
    for (int w = 0; w < Row::kWords; ++w) {
        if constexpr (kDim == 128) quarter.word[w] = reinterpret_cast<const uint32_t*>(halves)[w];
        else quarter.word[w] = halves[2 * w] | static_cast<uint32_t>(halves[2 * w + 1]) << 16;
    }
    quarter.scale = source[Row::kCodeBytes + Row::scale_of_lane(t)];
    uint32_t pairs[Row::kPairs];
    expand_quarter<kDim>(quarter, pairs);
    uint32_t* out = reinterpret_cast<uint32_t*>(keys + key * Traits<kHeads, kDim>::kPitch) + t;
#pragma unroll
    for (int i = 0; i < Row::kPairs; ++i) out[4 * i] = pairs[i];
}

// 64 keys x the warp's 64 query rows -> 64 scores per token in `out`.
template <int kHeads, int kDim>
__device__ __forceinline__ void score_tile(const uint8_t* keys, const uint32_t (&b)[kColumnTiles][KeyRow<kDim>::kPairs],
                                           const uint32_t (&weight)[kColumnTiles], int num_keys, uint16_t (*out)[kTileKeys]) {
    using T = Traits<kHeads, kDim>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // ldmatrix: matrices 0..3 are rows 0-7 | rows 8-15 | rows 0-7, k + 8 | rows 8-15, k + 8
    const uint32_t address = ptx::smem_address(keys + (lane % 16) * T::kPitch + (lane / 16) * 16);
#pragma unroll 1
    for (int m = 0; m < kTileKeys / 16; ++m) {
        if (m * 16 >= num_keys) break;
        float acc[kColumnTiles][4];
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
#pragma unroll
        for (int s = 0; s < KeyRow<kDim>::kSteps; ++s) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, address + m * 16 * T::kPitch + s * 32);
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n) ptx::mma_bf16_m16n8k16(acc[n], a, b[n][2 * s], b[n][2 * s + 1]);
        }
#pragma unroll
        for (int q = 0; q < T::kWarpTokens; ++q) {
            float low = 0.0f, high = 0.0f;  // keys g and g + 8
            sum_heads<T::kTilesPerToken>(acc + q * T::kTilesPerToken, weight + q * T::kTilesPerToken, low, high);
            if (t == 0) out[q][m * 16 + g] = to_bf16_bits(low);
            if (t == 1) out[q][m * 16 + g + 8] = to_bf16_bits(high);
        }
    }
}

// Columns first .. first + 63 of one token from the staging row, -inf at or past `visible`, nothing at or past num_cols.
__device__ __forceinline__ void store_scores(const uint16_t* scores, uint16_t* row, int first, int visible, int num_cols) {
    const int lane = threadIdx.x % 32, column = first + 2 * lane;
    const uint32_t both = reinterpret_cast<const uint32_t*>(scores)[lane];
    const uint16_t even = column < visible ? static_cast<uint16_t>(both) : kNegInfBf16;
    const uint16_t odd = column + 1 < visible ? static_cast<uint16_t>(both >> 16) : kNegInfBf16;
    uint16_t* out = row + column;
    if ((reinterpret_cast<uintptr_t>(row) & 3) == 0 && column + 1 < num_cols) {  // `first` is even
        *reinterpret_cast<uint32_t*>(out) = even | static_cast<uint32_t>(odd) << 16;
    } else {
        if (column < num_cols) out[0] = even;
        if (column + 1 < num_cols) out[1] = odd;
    }
}

__device__ __forceinline__ void fill_neg_inf(uint16_t* row, int begin, int end) {
    const uint32_t pair = kNegInfBf16 * 0x10001u;
    int i = begin;
    if ((reinterpret_cast<uintptr_t>(row + begin) & 15) == 0) {
        const int vectors = max_of(0, end - begin) / 8;
        for (int v = threadIdx.x; v < vectors; v += kThreads)
            reinterpret_cast<uint4*>(row + begin)[v] = make_uint4(pair, pair, pair, pair);
        i = begin + vectors * 8;
    }
    for (i += threadIdx.x; i < end; i += kThreads) row[i] = kNegInfBf16;
}

template <int kHeads, int kDim>
__device__ __forceinline__ void score_unit(const LogitsParams& p, int token_block, int chunk, int chunk_cols,
                                           typename Traits<kHeads, kDim>::SharedStorage& shared) {
    using T = Traits<kHeads, kDim>;
    const int first_col = chunk * chunk_cols, end_col = min_of(first_col + chunk_cols, p.num_cols);
    const int first_token = token_block * T::kBlockTokens;
    const int num_tokens = min_of(T::kBlockTokens, p.num_tokens - first_token);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    // no key past the page table exists; visible counts beyond it would read outside
    const int64_t held = static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page;
    for (int i = threadIdx.x; i < num_tokens; i += kThreads) {
        const int seq = p.seq_of_token[first_token + i];
        const int visible = static_cast<int>(min_of<int64_t>(min_of(p.visible[first_token + i], p.num_cols), held));
        shared.seq[i] = seq;
        shared.visible[i] = seq >= 0 && seq < p.num_seqs ? max_of(visible, 0) : 0;
    }

    const int warp_token = warp * T::kWarpTokens;  // within the block
    uint32_t b[kColumnTiles][KeyRow<kDim>::kPairs], weight[kColumnTiles];
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
        const int token = warp_token + n / T::kTilesPerToken, head = n % T::kTilesPerToken * 8;
        const bool valid = token < num_tokens;
        load_query_fragment<kDim>(p.q_codes, p.q_scale, first_token + token, p.num_heads, head + g, t, valid, b[n]);
        weight[n] = load_weight_pair(p.weights, first_token + token, p.num_heads, head + 2 * t, valid);
    }
    __syncthreads();

    const bool whole_tiles = p.entries_per_page % kTileKeys == 0 && (reinterpret_cast<uintptr_t>(p.keys) & 15) == 0;
    for (int run = 0; run < num_tokens;) {
        const int seq = shared.seq[run];
        int run_end = run + 1, limit = shared.visible[run];
        while (run_end < num_tokens && shared.seq[run_end] == seq) limit = max_of(limit, shared.visible[run_end++]);
        limit = min_of(limit, end_col);
        const int num_tiles = limit > first_col ? ceil_div(limit - first_col, kTileKeys) : 0;
        const int32_t* pages = p.page_table + static_cast<int64_t>(seq) * p.pages_per_seq;

        int warp_limit = 0;  // most columns any of this warp's tokens of the run sees
#pragma unroll
        for (int q = 0; q < T::kWarpTokens; ++q)
            if (warp_token + q >= run && warp_token + q < run_end) warp_limit = max_of(warp_limit, shared.visible[warp_token + q]);

        if (num_tiles > 0) {
            fetch_tile<kDim>(p, pages, whole_tiles, first_col, limit, shared.packed[0]);
            ptx::cp_async_wait<0>();
            __syncthreads();
            if (num_tiles > 1) fetch_tile<kDim>(p, pages, whole_tiles, first_col + kTileKeys, limit, shared.packed[1]);
            expand_tile<kHeads, kDim>(shared.packed[0], shared.keys[0]);
        }
        for (int i = 0; i < num_tiles; ++i) {
            const int first_key = first_col + i * kTileKeys;
            ptx::cp_async_wait<0>();
            __syncthreads();  // tile i expanded, tile i+1 arrived, everyone done with tile i-1
            if (i + 2 < num_tiles)
                fetch_tile<kDim>(p, pages, whole_tiles, first_key + 2 * kTileKeys, limit, shared.packed[i % 2]);
            if (i + 1 < num_tiles) expand_tile<kHeads, kDim>(shared.packed[(i + 1) % 2], shared.keys[(i + 1) % 2]);
            if (warp_token >= run_end || warp_token + T::kWarpTokens <= run) continue;  // the warp has no token in this run
            score_tile<kHeads, kDim>(shared.keys[i % 2], b, weight, warp_limit - first_key, shared.out[warp]);
            __syncwarp();
#pragma unroll
            for (int q = 0; q < T::kWarpTokens; ++q) {
                const int token = warp_token + q;
                if (token < run || token >= run_end) continue;
                store_scores(shared.out[warp][q], p.out + (first_token + token) * p.out_stride, first_key, shared.visible[token],
                             p.num_cols);
            }
            __syncwarp();  // the staging rows are written again in the next tile
        }
        for (int token = run; token < run_end; ++token)
            fill_neg_inf(p.out + (first_token + token) * p.out_stride, first_col + num_tiles * kTileKeys, end_col);
        run = run_end;
        __syncthreads();  // the buffers are free for the next run
    }
}

// True when a unit of the second pass (see LogitsParams) holds a marked token block or key tile.
template <int kHeads, int kDim>
__device__ __forceinline__ bool is_marked(const LogitsParams& p, int token_block, int chunk, int chunk_cols) {
    using T = Traits<kHeads, kDim>;
    bool marked = p.marked_tokens[token_block] != 0;
    const int first_token = token_block * T::kBlockTokens, end_token = min_of(first_token + T::kBlockTokens, p.num_tokens);
    const int first_tile = chunk * (chunk_cols / kTileKeys);
    for (int i = threadIdx.x; i < T::kBlockTokens * (chunk_cols / kTileKeys); i += kThreads) {
        const int token = first_token + i % T::kBlockTokens, tile = first_tile + i / T::kBlockTokens;
        if (token >= end_token || tile * kTileKeys >= min_of(p.visible[token], p.num_cols)) continue;
        const int seq = p.seq_of_token[token];
        if (seq >= 0 && seq < p.num_seqs) marked |= p.marked_tiles[static_cast<int64_t>(seq) * p.marked_stride + tile] != 0;
    }
    return __syncthreads_or(marked) != 0;
}

template <int kHeads, int kDim>
__global__ void __launch_bounds__(kThreads, 1) logits_kernel(LogitsParams p, int num_token_blocks, int chunk_cols, int64_t num_units) {
    using T = Traits<kHeads, kDim>;
    extern __shared__ __align__(16) uint8_t shared_bytes[];
    auto& shared = *reinterpret_cast<typename T::SharedStorage*>(shared_bytes);
    const bool second_pass = p.any_marked != nullptr;
    if (second_pass && *p.any_marked == 0) return;
    for (int64_t unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        // token blocks vary fastest: blocks that run together read the same keys
        const int token_block = static_cast<int>(unit % num_token_blocks), chunk = static_cast<int>(unit / num_token_blocks);
        if (second_pass && !is_marked<kHeads, kDim>(p, token_block, chunk, chunk_cols)) continue;
        score_unit<kHeads, kDim>(p, token_block, chunk, chunk_cols, shared);
    }
}

template <int kHeads, int kDim>
void launch_one(const LogitsParams& p) {
    using T = Traits<kHeads, kDim>;
    constexpr int kMaxTiles = 32, kMinTiles = 4, kEnoughBlocks = 1024;
    const int token_blocks = ceil_div(p.num_tokens, T::kBlockTokens), tiles = ceil_div(p.num_cols, kTileKeys);
    int chunk_tiles = kMaxTiles;  // shorter chunks when few tokens would leave SMs idle
    while (chunk_tiles > kMinTiles && static_cast<int64_t>(token_blocks) * ceil_div(tiles, chunk_tiles) < kEnoughBlocks)
        chunk_tiles /= 2;
    const int64_t blocks = static_cast<int64_t>(token_blocks) * ceil_div(tiles, chunk_tiles);
    launch("indexer.logits", logits_kernel<kHeads, kDim>,
           {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), sizeof(typename T::SharedStorage), p.stream}, p, token_blocks,
           chunk_tiles * kTileKeys, blocks);
}

template <int kDim>
void launch_heads(const LogitsParams& p) {
    if (p.num_heads <= 8) launch_one<8, kDim>(p);
    else if (p.num_heads <= 16) launch_one<16, kDim>(p);
    else if (p.num_heads <= 32) launch_one<32, kDim>(p);
    else launch_one<64, kDim>(p);
}

}  // namespace

void launch_logits(const LogitsParams& params) {
    if (params.head_dim == 128) launch_heads<128>(params);
    else launch_heads<64>(params);
}

void launch_logits_marked(const LogitsParams& params, int num_blocks) {
    using T = Traits<32, 128>;
    static_assert(T::kBlockTokens == 16, "marked_tokens holds one byte per 16 tokens");
    constexpr int kChunkTiles = 8;
    const int token_blocks = ceil_div(params.num_tokens, T::kBlockTokens), tiles = ceil_div(params.num_cols, kTileKeys);
    const int64_t units = static_cast<int64_t>(token_blocks) * ceil_div(tiles, kChunkTiles);
    launch("indexer.logits", logits_kernel<32, 128>,
           {dim3(static_cast<unsigned>(min_of<int64_t>(units, num_blocks))), dim3(kThreads), sizeof(T::SharedStorage), params.stream},
           params, token_blocks, kChunkTiles * kTileKeys, units);
}

}  // namespace mdi::indexer
