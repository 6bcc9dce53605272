// Index scores on Hopper: the function of logits.cu (model spec 5.3), bit for bit, on the integer tensor cores.
//
// Why integers. E2M1 codes are multiples of 1/2 up to 6, so a row whose four scale groups lie within 3 binades is a row of
// int8 numbers times one power of two ("folded": 2 * value * 2^shift, at most 96). wgmma s8 runs at the FP8 rate and its
// int32 sums are exact: |dot| <= 128 * 96 * 96 < 2^21, so the conversion to fp32 is exact too. FP8 wgmma would not do:
// its accumulator keeps about 14 bits below the largest term (13 after a carry), while a dot of 128 E2M1 products with
// equal scales already spans log2(128 * 36 / 0.25) = 14.2 bits, and every binade of scale spread adds one on each side; the
// error is 2^-14 of the result, which flips about one bf16 rounding in 30. bf16 wgmma is exact but runs at half the rate.
// Power-of-two factors commute with every rounding of the score: a query row's factor goes into its weight, a key row's is
// applied to the finished head sum. Rows that do not fold (spread above 3 binades, a factor or weight outside 2^+-30, NaN)
// mark their 16 tokens or their tile of 64 keys; what is marked is scored again by the portable kernel right after (exact
// bf16 products, at its speed). With nothing marked that second pass ends at once.
//
// Passes (one stream, no host synchronisation):
//   fold_queries   16 tokens a block: 512 folded rows as they lie in shared memory (128-byte swizzle), scaled weights, the
//                  runs of equal sequence with their largest visible count; the last blocks find each sequence's largest count
//   fold_keys      64 keys a block: the same for a tile of keys and its 64 factors. Key order inside 16: even keys, then odd,
//                  so that a thread's two rows g and g + 8 are neighbouring columns (one 4-byte store)
//   score          persistent, one block an SM; a unit is 16 tokens and a chunk of tiles (chunks_of), token blocks fastest,
//                  so that blocks that run together read the same keys from L2
//   second pass    logits.cu
//
// Roles in `score`: warpgroups 0 to 3 own 4 tokens each and all multiply every key tile of the ring (M = 64, N = 128 = 4 x 32 heads,
// 64 accumulators a thread); warp 16 fetches whole tiles with plain bulk copies (the images need no tensor map). One
// warpgroup's products run beside the others' head sums: four of them, with four warps a scheduler, overlap better than two
// with two accumulator sets each. Query rows are placed so that a lane of a quad holds all heads of one token: column 8j + 2t + e
// is head 2j + e of token t, so head sums need no exchange. Per pair of heads: 2 conversions, 1 packing with relu, 2 bf16x2
// multiplies, 2 additions; the four partial sums are those of score_tile.cuh: (p0 + p1) + (p2 + p3). The tiles go through the ring
// in turns of kStages, each in straight-line code whose shared addresses and descriptors are constants: 243 instructions a tile and
// warp, 222 of them the sums, where a loop over tiles has 272. The last turn of a run is filled up with empty tiles. Measured on an
// H200, 4,096 tokens x 65,536 / 131,072 columns: 1.90 / 3.68 ms (in a loop over tiles 1.97 / 3.88; there products alone 1.29, head
// sums alone 1.37 at 65,536). One multiply for both heads of a pair and two instructions that part the products is slower.
//
// Shared memory: 2 x 65.3 KiB of queries (double-buffered) + 6 x 9 KiB of key tiles = 185 KiB.
// Workspace: logits_workspace_bytes(), about 4.1 KiB a token + 132 bytes a sequence and column.
// Limits: Hi <= 32, Di = 128, row stride of the scores <= kMaxFoldedStride. ops/indexer.py gives to the portable kernel what is past
// them, batches of fewer than 16 tokens a sequence (they would fold more keys than they score) and workspaces of more than 2 GiB.
// SASS: IGMMA
#include "common/launch.h"
#include "common/math.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
#include "indexer/fold.cuh"
#include "indexer/indexer.h"
#include "indexer/score_tile.cuh"

namespace mdi::indexer {
namespace {

constexpr int kHeads = kFoldedHeads;
constexpr int kDim = kFoldedHeadDim;
constexpr int kTokens = 16;                   // of a unit
constexpr int kGroups = 4;                    // warpgroups that score
constexpr int kGroupTokens = kTokens / kGroups;
constexpr int kTileKeys = 64;
constexpr int kStages = 6;
constexpr int kImageBytes = kGroupTokens * kHeads * kDim;  // one warpgroup's queries

struct Run {  // tokens begin..end-1 of the block belong to sequence seq; the most visible of them sees `limit` entries
    int begin, end, seq, limit;
};

struct QueryMeta {
    uint32_t weight[kGroups][4][4][4];        // [warpgroup][j / 4][t][j % 4]: scaled weights of heads 2j, 2j + 1 of its token t
    int visible[kTokens];
    Run run[kTokens];
    int num_runs;
    int pad[3];
};
static_assert(sizeof(QueryMeta) % 16 == 0, "bulk copies move multiples of 16 bytes");

struct QueryRecord {                          // 16 tokens
    uint8_t image[kGroups][kImageBytes];
    QueryMeta meta;
    uint8_t fill[1024 - sizeof(QueryMeta) % 1024];
};

struct KeyRecord {                            // 64 keys, in image order
    uint8_t image[kTileKeys * kDim];
    float factor[kTileKeys];
};
static_assert(sizeof(KeyRecord) == 8448, "one bulk copy");

struct Workspace {
    QueryRecord* queries;     // [ceil(T / 16)]
    KeyRecord* keys;          // [B, tiles]
    int32_t* most_visible;    // [B]
    uint8_t* marked_tokens;   // [ceil(T / 16)]
    uint8_t* marked_tiles;    // [B, tiles]
    int32_t* any_marked;      // [1]
    int num_blocks, num_tiles;
    int num_chunks;           // a unit is a block of tokens and every tile of a chunk
};

int64_t place(int64_t num_tokens, int64_t num_seqs, int64_t num_cols, uint8_t* base, Workspace& w) {
    const int64_t blocks = ceil_div<int64_t>(num_tokens, kTokens), tiles = ceil_div<int64_t>(num_cols, kTileKeys);
    int64_t offset = 0;
    const auto take = [&](int64_t bytes) {
        uint8_t* at = base + offset;
        offset += align_up<int64_t>(bytes, 1024);
        return at;
    };
    w.queries = reinterpret_cast<QueryRecord*>(take(blocks * static_cast<int64_t>(sizeof(QueryRecord))));
    w.keys = reinterpret_cast<KeyRecord*>(take(num_seqs * tiles * static_cast<int64_t>(sizeof(KeyRecord))));
    w.most_visible = reinterpret_cast<int32_t*>(take(num_seqs * 4));
    w.marked_tokens = take(blocks);
    w.marked_tiles = take(num_seqs * tiles);
    w.any_marked = reinterpret_cast<int32_t*>(take(4));
    w.num_blocks = static_cast<int>(blocks);
    w.num_tiles = static_cast<int>(tiles);
    return offset;
}

// ---- folding ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_quarter(uint8_t* image, int row, int quarter, const uint32_t (&bytes)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t offset = swizzle128(static_cast<uint32_t>(row * kDim + quarter * 32 + half * 16));
        *reinterpret_cast<uint4*>(image + offset) =
            make_uint4(bytes[4 * half], bytes[4 * half + 1], bytes[4 * half + 2], bytes[4 * half + 3]);
    }
}

__device__ __forceinline__ int clamped_visible(const LogitsParams& p, int token) {
    const int seq = p.seq_of_token[token];
    if (seq < 0 || seq >= p.num_seqs) return 0;
    const int64_t held = static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page;
    return max_of(0, static_cast<int>(min_of<int64_t>(min_of(p.visible[token], p.num_cols), held)));
}

constexpr int kFoldThreads = 256;
constexpr int kQueryThreads = 1024;

__global__ void __launch_bounds__(kQueryThreads) fold_queries_kernel(LogitsParams p, Workspace w) {
    if (blockIdx.x >= w.num_blocks) {  // largest visible count of one sequence
        const int seq = static_cast<int>(blockIdx.x) - w.num_blocks;
        __shared__ int most;
        if (threadIdx.x == 0) most = 0;
        __syncthreads();
        int mine = 0;
        for (int token = threadIdx.x; token < p.num_tokens; token += kQueryThreads)
            if (p.seq_of_token[token] == seq) mine = max_of(mine, clamped_visible(p, token));
        atomicMax(&most, mine);
        __syncthreads();
        if (threadIdx.x == 0) w.most_visible[seq] = most;
        return;
    }
    QueryRecord& record = w.queries[blockIdx.x];
    const int first_token = static_cast<int>(blockIdx.x) * kTokens;
    const int num_tokens = min_of(kTokens, p.num_tokens - first_token);
    bool ok = true;
    for (int item = threadIdx.x; item < kTokens * kHeads * 4; item += kQueryThreads) {
        const int row = item / 4, quarter = item % 4, token = row / kHeads, head = row % kHeads;
        uint32_t word[4] = {0, 0, 0, 0};
        uint32_t scale = 127;
        uint16_t weight = 0;
        if (token < num_tokens && head < p.num_heads) {
            const int64_t source = static_cast<int64_t>(first_token + token) * p.num_heads + head;
            const uint4 v = reinterpret_cast<const uint4*>(p.q_codes)[source * 4 + quarter];
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
            scale = p.q_scale[source * 4 + quarter];
            weight = p.weights[source];
        }
        const Folded folded = fold_quarter(word, scale);
        const int group = token / kGroupTokens, t = token % kGroupTokens, j = head / 2;
        store_quarter(record.image[group], 8 * j + 2 * t + head % 2, quarter, folded.bytes);
        ok = ok && folded.ok && weight_folds(weight);
        if (quarter == 0)
            reinterpret_cast<uint16_t*>(&record.meta.weight[group][j / 4][t][j % 4])[head % 2] =
                scaled_weight(weight, folded.exponent);
    }
    __shared__ int seqs[kTokens], visible[kTokens];
    if (threadIdx.x < kTokens) {
        const bool there = static_cast<int>(threadIdx.x) < num_tokens;
        seqs[threadIdx.x] = there ? p.seq_of_token[first_token + threadIdx.x] : -1;
        record.meta.visible[threadIdx.x] = visible[threadIdx.x] = there ? clamped_visible(p, first_token + threadIdx.x) : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int num_runs = 0;
        for (int begin = 0; begin < num_tokens;) {
            const int seq = seqs[begin];
            int end = begin, limit = 0;
            for (; end < num_tokens && seqs[end] == seq; ++end) limit = max_of(limit, visible[end]);
            record.meta.run[num_runs++] = {begin, end, seq, limit};
            begin = end;
        }
        record.meta.num_runs = num_runs;
    }
    const int bad = __syncthreads_or(!ok);
    if (threadIdx.x == 0) {
        w.marked_tokens[blockIdx.x] = bad != 0;
        if (bad != 0) atomicOr(w.any_marked, 1);
    }
}

__global__ void __launch_bounds__(kFoldThreads) fold_keys_kernel(LogitsParams p, Workspace w) {
    static_assert(kFoldThreads == 4 * kTileKeys, "one thread per key and quarter");
    const int seq = static_cast<int>(blockIdx.x / w.num_tiles), tile = static_cast<int>(blockIdx.x % w.num_tiles);
    const int most = w.most_visible[seq];
    if (tile * kTileKeys >= most) return;
    const int64_t at = static_cast<int64_t>(seq) * w.num_tiles + tile;
    KeyRecord& record = w.keys[at];
    const int key = threadIdx.x / 4, quarter = threadIdx.x % 4, entry = tile * kTileKeys + key;
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
    const int row = key / 16 * 16 + key % 2 * 8 + key % 16 / 2;  // keys 2g and 2g + 1 of 16 lie in rows g and g + 8
    store_quarter(record.image, row, quarter, folded.bytes);
    if (quarter == 0) record.factor[row] = folded.factor();
    const int bad = __syncthreads_or(!folded.ok);
    if (threadIdx.x == 0) {
        w.marked_tiles[at] = bad != 0;
        if (bad != 0) atomicOr(w.any_marked, 1);
    }
}

// ---- scoring ------------------------------------------------------------------------------------------------------

constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kAccumulators = kTileKeys * kGroupTokens * kHeads / 128;  // a thread: 64 keys x 4 tokens x 32 heads over 128 threads

struct SharedStorage {
    alignas(1024) uint8_t queries[2][kGroups][kImageBytes];
    struct alignas(1024) Stage {
        KeyRecord record;
    } stage[kStages];
    alignas(16) QueryMeta meta[2];
    alignas(8) uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t query_full[2];
    uint64_t query_empty[2];
};
static_assert(sizeof(SharedStorage) + 1024 <= 227 * 1024, "shared memory of one block");

// wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8: d = a * b (+ d when `accumulate`), both operands K-major in shared memory
__device__ __forceinline__ void wgmma_s8_n128(uint32_t (&d)[kAccumulators], uint64_t descriptor_a, uint64_t descriptor_b,
                                              bool accumulate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" MDI_WGMMA_TEXT_64
        "}, %64, %65, p;\n}\n"
        : // clang-format off
          "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
          "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
          "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
          "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
          "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
          "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
          "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]),
          "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
          // clang-format on
        : "l"(descriptor_a), "l"(descriptor_b), "r"(static_cast<uint32_t>(accumulate)));
#else
    __trap();
#endif
}

// ld.shared.v4.u32
__device__ __forceinline__ void load_shared_128(uint32_t (&out)[4], uint32_t smem) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(smem));
}

// ld.shared.f32
__device__ __forceinline__ float load_shared_float(uint32_t smem) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem));
    return x;
}

// Head sums of one token for the thread's two keys; accumulators 4j, 4j + 1 are heads 2j, 2j + 1 of the even key, the next two of
// the odd one. Partial sum r takes heads 8i + 2r, 8i + 2r + 1 for ascending i. They start from their first term, not from +0;
// that can only make a zero negative, see Consumer::finish.
__device__ __forceinline__ void head_sums(const uint32_t (&acc)[kAccumulators], const uint32_t (&weight)[kHeads], float (&sum)[2]) {
#pragma unroll
    for (int key = 0; key < 2; ++key) {
        float part[4];
#pragma unroll
        for (int j = 0; j < kHeads / 2; ++j) {
            const int i = 4 * j + 2 * key;
            const uint32_t pair = relu_dots(acc[i], acc[i + 1]);
            // weights have a zero low half, so that a product's bits are those of an fp32 number
            const float even = bits_float(mul_low_bf16x2(pair, weight[2 * j]));
            const float odd = bits_float(ptx::mul_bf16x2(pair, weight[2 * j + 1]));
            part[j % 4] = j < 4 ? even + odd : (part[j % 4] + even) + odd;
        }
        sum[key] = (part[0] + part[1]) + (part[2] + part[3]);
    }
}

struct Unit {
    int block, first_col, end_col;
};

__device__ __forceinline__ Unit unit_of(const LogitsParams& p, const Workspace& w, int64_t index) {
    const int64_t chunk = index / w.num_blocks;
    Unit unit;
    unit.block = static_cast<int>(index % w.num_blocks);
    unit.first_col = static_cast<int>(chunk * w.num_tiles / w.num_chunks) * kTileKeys;
    unit.end_col = min_of(static_cast<int>((chunk + 1) * w.num_tiles / w.num_chunks) * kTileKeys, p.num_cols);
    return unit;
}

__device__ __forceinline__ int tiles_of(const Unit& unit, int limit) {
    limit = min_of(limit, unit.end_col);
    return limit > unit.first_col ? ceil_div(limit - unit.first_col, kTileKeys) : 0;
}

struct Producer {
    static __device__ __forceinline__ void run(const LogitsParams& p, const Workspace& w, SharedStorage& shared, int64_t num_units) {
        int stage = 0, buffer = 0;
        uint32_t phase = 0, query_phase = 0;
        for (int64_t index = blockIdx.x; index < num_units; index += gridDim.x) {
            const Unit unit = unit_of(p, w, index);
            const QueryRecord& record = w.queries[unit.block];
            ptx::mbarrier_wait(ptx::smem_address(&shared.query_empty[buffer]), query_phase ^ 1);
            const uint32_t query_full = ptx::smem_address(&shared.query_full[buffer]);
            ptx::mbarrier_arrive_expect_tx(query_full, kGroups * kImageBytes + sizeof(QueryMeta));
            ptx::bulk_load(ptx::smem_address(shared.queries[buffer]), record.image, kGroups * kImageBytes, query_full);
            ptx::bulk_load(ptx::smem_address(&shared.meta[buffer]), &record.meta, sizeof(QueryMeta), query_full);
            buffer ^= 1;
            query_phase ^= buffer == 0;
            const int num_runs = record.meta.num_runs;
            for (int r = 0; r < num_runs; ++r) {
                const Run run = record.meta.run[r];
                const int num_tiles = tiles_of(unit, run.limit);
                const KeyRecord* source = w.keys + static_cast<int64_t>(run.seq) * w.num_tiles + unit.first_col / kTileKeys;
                for (int tile = 0; tile < align_up(num_tiles, kStages); ++tile) {
                    ptx::mbarrier_wait(ptx::smem_address(&shared.empty[stage]), phase ^ 1);
                    const uint32_t full = ptx::smem_address(&shared.full[stage]);
                    const bool there = tile < num_tiles;  // the others fill up the last turn
                    ptx::mbarrier_arrive_expect_tx(full, there ? sizeof(KeyRecord) : 0);
                    if (there) ptx::bulk_load(ptx::smem_address(&shared.stage[stage]), source + tile, sizeof(KeyRecord), full);
                    stage = stage + 1 == kStages ? 0 : stage + 1;
                    phase ^= stage == 0;
                }
            }
        }
    }
};

// Columns begin..end-1 of a row become -inf; one warp.
__device__ __forceinline__ void fill_neg_inf(uint16_t* row, int begin, int end, int lane) {
    if ((reinterpret_cast<uintptr_t>(row + begin) & 15) == 0) {
        const uint32_t pair = kNegInfBf16 * 0x10001u;
        for (int i = begin + lane * 8; i + 8 <= end; i += 256)
            *reinterpret_cast<uint4*>(row + i) = make_uint4(pair, pair, pair, pair);
        begin += max_of(0, end - begin) / 8 * 8;
    }
    for (int i = begin + lane; i < end; i += 32) row[i] = kNegInfBf16;
}

struct Consumer {
    // The products of a tile: 64 keys x 4 tokens. Operands as descriptors.
    static __device__ __forceinline__ void issue(uint32_t (&acc)[kAccumulators], uint64_t a, uint64_t b) {
#pragma unroll
        for (int k = 0; k < kDim / 32; ++k) wgmma_s8_n128(acc, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), k > 0);
    }

    // sum * factor + 0: the factor is a power of two, and a sum of nothing but zeros is +0 in the reference
    static __device__ __forceinline__ uint32_t finish(const float (&sum)[2], float factor_even, float factor_odd) {
        return ptx::pack_bf16x2(__fmaf_rn(sum[0], factor_even, 0.0f), __fmaf_rn(sum[1], factor_odd, 0.0f));
    }

    // Columns column and column + 1 of a token that sees `visible` entries, at `out`
    static __device__ __forceinline__ void store(uint16_t* out, int column, int visible, int num_cols, bool aligned, uint32_t pair) {
        if (column >= visible) pair = (pair & 0xffff0000u) | kNegInfBf16;
        if (column + 1 >= visible) pair = (pair & 0xffffu) | static_cast<uint32_t>(kNegInfBf16) << 16;
        if (aligned && column + 1 < num_cols) {
            *reinterpret_cast<uint32_t*>(out) = pair;
        } else {
            if (column < num_cols) out[0] = static_cast<uint16_t>(pair);
            if (column + 1 < num_cols) out[1] = static_cast<uint16_t>(pair >> 16);
        }
    }

    static __device__ __forceinline__ void run(const LogitsParams& p, const Workspace& w, SharedStorage& shared, int group,
                                               int64_t num_units) {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const bool aligned = (reinterpret_cast<uintptr_t>(p.out) & 3) == 0 && p.out_stride % 2 == 0;
        // shared addresses in the tile loop are this one plus a constant
        uint32_t base = ptx::smem_address(&shared);
        asm volatile("" : "+r"(base));
        const auto at = [&](const void* member) {
            return base + static_cast<uint32_t>(reinterpret_cast<uintptr_t>(member) - reinterpret_cast<uintptr_t>(&shared));
        };
        int buffer = 0;
        uint32_t phase = 0, query_phase = 0;
        // of the first tile of a turn
        const uint64_t keys = smem_descriptor_k128(at(&shared.stage));
        const uint32_t full = at(shared.full), factors = at(&shared.stage) + kTileKeys * kDim + (warp * 16 + g) * 4;
        for (int64_t index = blockIdx.x; index < num_units; index += gridDim.x) {
            const Unit unit = unit_of(p, w, index);
            ptx::mbarrier_wait(at(&shared.query_full[buffer]), query_phase);
            const QueryMeta& meta = shared.meta[buffer];
            const uint64_t queries = smem_descriptor_k128(at(shared.queries[buffer][group]));
            uint32_t weight[kHeads];  // bf16 in the upper half
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t four[4];
                load_shared_128(four, at(meta.weight[group][i][t]));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    weight[8 * i + 2 * j] = four[j] << 16;
                    weight[8 * i + 2 * j + 1] = four[j] & 0xffff0000u;
                }
            }
            fence_registers(weight);  // keeps the compiler from unpacking them again for every tile
            const int number = group * kGroupTokens + t;
            for (int r = 0; r < meta.num_runs; ++r) {  // what is rarely wanted stays in shared memory: registers are scarce
                const Run& run = meta.run[r];
                const int num_tiles = tiles_of(unit, run.limit);
                const auto mine = [&](int token) { return token >= run.begin && token < run.end; };
                // the first tiles need no condition in any lane: the run's tokens see all of their columns
                const int plain = __reduce_min_sync(0xffffffffu, aligned && mine(number) ? min_of(p.num_cols, meta.visible[number]) : 0);
                const int plain_tiles = max_of(0, plain - unit.first_col) / kTileKeys;
                const int first_col = unit.first_col + warp * 16 + 2 * g;
                // rows of the unit and a 32-bit offset: one addition a turn
                uint8_t* block_out = reinterpret_cast<uint8_t*>(p.out + static_cast<int64_t>(unit.block) * kTokens * p.out_stride);
                uint32_t offset = (static_cast<uint32_t>(number) * static_cast<uint32_t>(p.out_stride) + first_col) * 2;
                // scores of the thread's two columns of the turn's tile i
                const auto scores = [&](int i) {
                    uint32_t acc[kAccumulators];
                    ptx::mbarrier_wait(full + 8 * i, phase);
                    __syncwarp();
                    fence_registers(acc);
                    wgmma_fence();
                    issue(acc, advance_descriptor(keys, i * sizeof(SharedStorage::Stage)), queries);
                    wgmma_commit();
                    const uint32_t factor = factors + i * sizeof(SharedStorage::Stage);
                    const float factor_even = load_shared_float(factor), factor_odd = load_shared_float(factor + 32);
                    wgmma_wait<0>();  // meanwhile the other warpgroups add up
                    fence_registers(acc);
                    ptx::mbarrier_arrive(full + 8 * (kStages + i));  // empty
                    float sum[2];
                    head_sums(acc, weight, sum);
                    return finish(sum, factor_even, factor_odd);
                };
                for (int turn = 0; turn < num_tiles; turn += kStages, offset += kStages * kTileKeys * 2, phase ^= 1) {
                    if (turn + kStages <= min_of(plain_tiles, num_tiles)) {
#pragma unroll
                        for (int i = 0; i < kStages; ++i)
                            *reinterpret_cast<uint32_t*>(block_out + offset + i * kTileKeys * 2) = scores(i);
                        continue;
                    }
#pragma unroll 1
                    for (int i = 0; i < kStages; ++i) {
                        if (turn + i >= num_tiles) {  // fills up the turn
                            ptx::mbarrier_wait(full + 8 * i, phase);
                            ptx::mbarrier_arrive(full + 8 * (kStages + i));
                            continue;
                        }
                        const uint32_t pair = scores(i);
                        uint16_t* out = reinterpret_cast<uint16_t*>(block_out + offset + i * kTileKeys * 2);
                        const int column = first_col + (turn + i) * kTileKeys;
                        if (mine(number)) store(out, column, meta.visible[number], p.num_cols, aligned, pair);
                    }
                }
                const int filled = unit.first_col + num_tiles * kTileKeys;
                const int other = group * kGroupTokens + warp;  // one token a warp
                if (mine(other))
                    fill_neg_inf(p.out + static_cast<int64_t>(unit.block * kTokens + other) * p.out_stride, filled, unit.end_col, lane);
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(at(&shared.query_empty[buffer]));
            buffer ^= 1;
            query_phase ^= buffer == 0;
        }
    }
};

__global__ void __launch_bounds__(kThreads, 1) score_kernel(LogitsParams p, Workspace w, int64_t num_units) {
    extern __shared__ uint8_t shared_bytes[];
    auto& shared = *reinterpret_cast<SharedStorage*>((reinterpret_cast<uintptr_t>(shared_bytes) + 1023) & ~uintptr_t{1023});
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&shared.full[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&shared.empty[i]), kGroups * 128);   // every lane
        }
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&shared.query_full[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&shared.query_empty[i]), kGroups * 4);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
    if (group == kGroups) {
        ptx::setmaxnreg_dec<24>();
        if (threadIdx.x == kGroups * 128) Producer::run(p, w, shared, num_units);
    } else {
        ptx::setmaxnreg_inc<112>();
        Consumer::run(p, w, shared, group, num_units);
    }
}

// Number of chunks: the SMs should end together, and a unit should be long against its start (about two tiles).
int chunks_of(int64_t num_blocks, int num_tiles, int num_sms) {
    int best = 1;
    int64_t best_cost = 0;
    for (int chunks = ceil_div(num_tiles, 128); chunks <= max_of(1, num_tiles / 16); ++chunks) {
        const int64_t cost = ceil_div<int64_t>(num_blocks * chunks, num_sms) * (ceil_div(num_tiles, chunks) + 2);
        if (best_cost == 0 || cost < best_cost) best = chunks, best_cost = cost;
    }
    return best;
}

}  // namespace

int64_t logits_workspace_bytes(int64_t num_tokens, int64_t num_seqs, int64_t num_cols) {
    Workspace w;
    return place(num_tokens, num_seqs, num_cols, nullptr, w);
}

void launch_logits_sm90(const LogitsParams& params) {
    if (params.num_tokens == 0 || params.num_cols == 0) return;
    LogitsParams p = params;
    Workspace w;
    place(p.num_tokens, p.num_seqs, p.num_cols, p.workspace, w);
    int device = 0, num_sms = 0;
    check_cuda("indexer.logits", cudaGetDevice(&device));
    check_cuda("indexer.logits", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    check_cuda("indexer.logits", cudaMemsetAsync(w.any_marked, 0, sizeof(int32_t), p.stream));
    launch("indexer.logits", fold_queries_kernel,
           {dim3(static_cast<unsigned>(w.num_blocks + p.num_seqs)), dim3(kQueryThreads), 0, p.stream}, p, w);
    launch("indexer.logits", fold_keys_kernel,
           {dim3(static_cast<unsigned>(static_cast<int64_t>(p.num_seqs) * w.num_tiles)), dim3(kFoldThreads), 0, p.stream}, p, w);
    w.num_chunks = chunks_of(w.num_blocks, w.num_tiles, num_sms);
    const int64_t units = static_cast<int64_t>(w.num_blocks) * w.num_chunks;
    launch("indexer.logits", score_kernel,
           {dim3(static_cast<unsigned>(min_of<int64_t>(units, num_sms))), dim3(kThreads), sizeof(SharedStorage) + 1024, p.stream}, p,
           w, units);
    p.any_marked = w.any_marked;
    p.marked_tokens = w.marked_tokens;
    p.marked_tiles = w.marked_tiles;
    p.marked_stride = w.num_tiles;
    launch_logits_marked(p, num_sms);
}

}  // namespace mdi::indexer
