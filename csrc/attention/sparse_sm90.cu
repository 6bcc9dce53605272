// Sparse attention over packed or expanded KV rows on Hopper (wgmma). Same function as sparse.cu; model spec 4.5 and 4.6. Few tokens
// with packed rows go to sparse_split_sm90.cu. All give the same bits.
//
// Floor of T=4096, H=64, 640 slots (GPU clocks per step of 64 slots and SM): tensor cores 2 x 64 x 64 x 512 multiply-adds
// = 2,048; shared memory at 128 B a clock: Q 64 + K 64 KiB for S, V 64 + P 16 KiB for O, 64 KiB to write K, packed rows 18 (FP4)
// or 33 KiB (FP8) in and out, P, Q and O in passing 30 KiB = 340 to 370 KiB = 2,700 to 2,950; ALU to expand 32,768 elements about
// 600 of each scheduler. 10 steps a token, 31 tokens an SM: 0.49 ms at 1.755 GHz if everything overlaps.
//
// Measured on an H200, in turns with the form before (0.792, 0.804, 0.266 and 0.061 ms): T=4096, 640 slots 0.757 ms (model-like
// indices) and 0.774 (random), 128 slots 0.258; T=256, 640 slots 0.0585. The producers alone (no products) take 0.47 ms of the
// first, the consumers of the form before alone (tiles not written) 0.63. There is no single limit: the data pipe of L1 and shared
// memory is 76% busy (clocks a step: S 1,024, P V 640, K and Q written 563, packed rows copied 565, since every 128-byte line that a
// copy touches takes one, and 570 for the rest), instructions are issued in half of the clocks, and with two K tiles each side waits
// for the other. Left out, with wrong results, these save: copies of packed rows 0.06 ms, the output 0.05, rescaling O 0.04, loading
// Q 0.02, fences 0.01, multiplying by the scales 0.01.
// Worth it: fill() compiled for the kind of rows (0.02), every thread arriving on the barriers (0.014), the valid rows read before
// the last scores are there (0.02), the other's values between the halves of the own scores (0.015), descriptors in uniform
// registers (0.02).
// Slower: fence.proxy.async by the producers instead of the consumers (0.80 instead of 0.76 ms); rows by cp.async.bulk, which leaves
// a lane at a time (0.86); half a warp expanding a row (0.796 instead of 0.767); a compressed row's codes taken a quarter ahead
// (0.786 instead of 0.756); waiting for the other's values before the second half of the scores (0.802 instead of 0.767). No gain
// (0.5% or less, or a loss): half a warp copying a row, a vote on rescaling for each half of a warp's rows, O rescaled in halves
// under the products or under the exponentials, the maximum published before P, a tile given back in quarters, one fence for two
// quarters.
// Two tokens in a block, to expand the rows they share only once, do not fit: their O alone is 256 KiB, all registers of an SM.
//
// Expanded rows (bf16, expand_rows.cu) take the other producers: one warpgroup that copies rows straight to the K tile. Measured in
// turns with packed rows, rotated and quantised as in a step, T=4096: 640 slots, model-like picks of 65,536 rows 0.68 ms instead of
// 0.80 (1.22 million cycles instead of 1.44), random picks of 131,072 rows 0.72 instead of 0.80, 128 slots 0.246 instead of 0.307;
// T=256, 640 slots 0.054 instead of 0.061. Expanding 65,536 rows takes 0.028 ms, a layer's window 0.007. The consumers alone (nothing
// copied) take 1.16 million cycles. Where no two tokens share a window row or a pick (random windows) it is no faster: 134 MB do not
// fit L2.
// Worth it: 128 producers instead of 256 (2%), rows in their natural order, so that only the rotated atom of Q is touched (2%, 5% of
// 128 slots), the next step's rows fetched to L2 (2%, random picks 5%), addresses without branches (3%). Slower: that fetch before the
// copies (0 to 4%), the producers storing O (4%; without the quantisation 2% faster).
//
// One persistent block per SM walks over (token, 64 heads) items; four warpgroups (packed rows):
//   producers (warpgroups 2 and 3, 64 registers): copy packed rows by index to shared memory (cp.async), half a step ahead (window
//     rows two quarters of a tile), and expand them to bf16 in the free one of two K tiles, a warp eight rows; copy Q under the first
//     half of its item's first tile;
//   consumers (warpgroups 0 and 1, 192 registers): step b belongs to consumer b % 2, which makes S = Q K^T (m64n64k16) and
//     the softmax, and hands P (bf16) and the running maximum to the other through shared memory. Both add P V to their half of O
//     (64 heads x 256 dims as two m64n128k16, the widest that ptxas takes at 512 threads): of the own step with P from registers, of
//     the other's with P from shared memory, between the halves of the own scores. So one's softmax runs under the other's products.
// Barriers (mbarrier; a phase per use): full[2][4] two atoms of a K tile written: S follows the producer through the tile;
// empty[2][2] consumer c is done with the tile, whose half of the atoms is then free, because only its values are in there and
// S was complete before; p_ready[2] P and maximum of a step published (they are free again when the last full[] of the step
// after next completes, because that needs both empty[]); q_full, q_empty per item. Every thread arrives itself: compute-sanitizer's
// racecheck does not follow a lane that arrives for its warp after __syncwarp. When all do, its errors vanish; warnings stay,
// for bytes of cp.async that another lane reads after the wait and __syncwarp.
//
// With expanded rows: one warpgroup of producers (72 registers), a warp sixteen rows; its cp.async arrive on full[] themselves, the last
// quarter's barrier also waits for each warp's valid rows; consumers have 216 registers and one m64n256k16.
//
// Shared memory: Q 64 KiB, K 2 x 64 KiB, P 2 x 8 KiB, packed rows 18 KiB, the rest 1 KiB = 227 KiB, all there is. A packed row's
// buffer is that of a compressed row; the quarters of a window row take turns in it, two at a time (Packed).
//
// Q may be rotated on its way in and O leave in other forms (sparse_output_sm90.cuh): a kernel of its own each. The angles of Q come
// with it, from the row of the table that the token's position names; the position is in shared memory for the consumers, too.
//
// A lane that is negative, at or past compressed_len, or outside the pool is never read through: zero row, score -inf. A
// token without a valid lane gives 0. Results depend on nothing but the token itself. Limits: D = 512, H <= 128.
// SASS: HGMMA
#include "attention/sparse_output_sm90.cuh"
#include "attention/sparse_sm90.cuh"
#include "common/launch.h"

#include <type_traits>

namespace mdi::attention {
namespace {

using namespace sm90;

constexpr int kConsumers = 2;
constexpr int kFirstProducer = kConsumers * kGroupThreads;  // thread
constexpr int kHalfDims = kHeadDim / kConsumers;            // dims of O a consumer owns

// What depends on the form of the rows: packed or expanded (expand_rows.cu)
template <bool kExpanded>
struct Sizes {
    static constexpr int kProducerThreads = kExpanded ? kGroupThreads : kExpanderThreads;
    static constexpr int kValidArrivals = kExpanded ? kProducerThreads / 32 : 0;  // on the last quarter's barrier, for the valid rows
    static constexpr int kThreads = kFirstProducer + kProducerThreads;
    static constexpr int kConsumerRegisters = kExpanded ? 216 : 192;
    static constexpr int kProducerRegisters = kExpanded ? 72 : 64;
    static_assert(kFirstProducer * kConsumerRegisters + kProducerThreads * kProducerRegisters <= 65536);
};
constexpr uint32_t kConsumerBarrier = 1, kPairBarrier = 2;  // named barriers; kPairBarrier + warp of a consumer

struct SharedStorage {
    uint8_t q[kTileBytes];
    uint8_t k[2][kTileBytes];
    uint8_t p[kConsumers][kAtomBytes];
    uint8_t packed[kExpanderThreads / 32][kPackedWarpBytes];
    float row_max[kConsumers][kHeads];      // running maximum (in log2) after the consumer's latest step
    union {
        float sink[kHeads];                 // of the only block of heads, in log2; kernels without rotation
        float angles[kMaxRopeDim];          // of an item's token (cosine, sine, ..): the row of the table, chunk by chunk of the last atom
    };
    int position[2];                        // of an item's token, for the consumers; items take turns
    uint32_t valid[2][2];                   // bit s: slot s of the step may be seen; each producer warp writes those of its rows
    uint64_t full[2][kQuarters], empty[2][kConsumers], p_ready[kConsumers], q_full, q_empty;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

// ---- producer ------------------------------------------------------------------------------------------------------

// Walks over the steps of this block's items, in order.
struct Cursor {
    int item, first_slot, num_lanes;           // num_lanes = 0: done
    const int32_t *window_lanes, *pick_lanes;  // of the item's token, both indexed by slot
    int next_length;  // of the next item; in lane 0: a load by all lanes would go to a uniform register and be waited for at once

    MDI_DEVICE Cursor(const SparseParams& params, int first_item) : item(first_item), first_slot(0), next_length(0) {
        enter(params, length_of(params, first_item));
        skip_empty(params);
    }
    MDI_DEVICE void enter(const SparseParams& params, int length) {
        const int64_t token = token_of(params, item);
        window_lanes = params.window_idx + token * params.num_window;
        pick_lanes = params.compressed_idx + token * params.num_picks - params.num_window;
        num_lanes = lanes_of(params, length);
        if (threadIdx.x % 32 == 0) next_length = length_of(params, item + gridDim.x);
    }
    MDI_DEVICE bool done(const SparseParams& params) const { return item >= num_items(params); }
    MDI_DEVICE void skip_empty(const SparseParams& params) {
        while (first_slot >= num_lanes) {
            item += gridDim.x;
            first_slot = 0;
            num_lanes = 0;
            if (done(params)) return;
            enter(params, __shfl_sync(~0u, next_length, 0));
        }
    }
    MDI_DEVICE void advance(const SparseParams& params) {
        if (num_lanes == 0) return;
        first_slot += kSlots;
        skip_empty(params);
    }
};

// A lane's row number at the cursor: starts the load; LaneRow::settle takes it after other work.
MDI_DEVICE int load_index(const SparseParams& params, const Cursor& at, int tile_row) {
    const int slot = at.first_slot + tile_row;
    return slot < at.num_lanes ? (slot < params.num_window ? at.window_lanes : at.pick_lanes)[slot] : -1;
}

// What both kinds of producers do for Q
template <bool kRotates, bool kExpanded>
struct QueryProducer {
    static constexpr int kProducerThreads = Sizes<kExpanded>::kProducerThreads;
    const SparseParams& params;
    SharedStorage& shared;

    MDI_DEVICE const bf16* query(int item, int& num_heads) const {
        const int first_head = first_head_of(params, item);
        num_heads = min_of(kHeads, params.num_heads - first_head);
        return params.q + token_of(params, item) * params.q_stride_token + static_cast<int64_t>(first_head) * kHeadDim;
    }

    // Q of an item: copied as it is, while the first K tile is written; then rotated and permuted in place by the thread that
    // copied it: one chunk of every atom of some heads.
    struct QueryPlace {
        int first_head, chunk;  // the next head: kHeadStep on; chunk: of eight in an atom
        uint32_t to;

        MDI_DEVICE explicit QueryPlace(const SharedStorage& shared) {
            const int thread = thread_index() - kFirstProducer;
            first_head = thread / 8;
            chunk = thread % 8;
            to = address_of(shared.q) + atom_offset(first_head, chunk);
        }
        static constexpr int kHeadStep = kProducerThreads / 8;
        MDI_DEVICE uint32_t at(int head, int atom) const { return to + head * kHeadStep * 128 + atom * kAtomBytes; }
    };
    static constexpr int kThreadHeads = kHeads / QueryPlace::kHeadStep;
    static_assert(QueryPlace::kHeadStep % 8 == 0);
    MDI_DEVICE void start_query(int item, int item_count) const {
        int num_heads;
        const bf16* from = query(item, num_heads);
        int position = 0;
        if constexpr (kRotates) position = load_position(params.rotary, token_of(params, item));
        ptx::mbarrier_wait(address_of(&shared.q_empty), (item_count & 1) ^ 1);
        const QueryPlace place(shared);
        from += place.first_head * kHeadDim + place.chunk * 8;
#pragma unroll
        for (int head = 0; head < kThreadHeads; ++head) {
            if (place.first_head + head * place.kHeadStep < num_heads) {
#pragma unroll
                for (int atom = 0; atom < kAtoms; ++atom) {
                    ptx::cp_async_16(place.at(head, atom), from + head * place.kHeadStep * kHeadDim + atom * 64);
                }
            }
        }
        if constexpr (kRotates) start_angles(position, item_count, place.chunk);
        ptx::cp_async_commit();
    }
    // Every thread copies the angles that it reads itself; the others of its chunk copy the same.
    MDI_DEVICE void start_angles(int position, int item_count, int chunk) const {
        shared.position[item_count & 1] = position;
        const int first = first_angle(params.rotary, chunk);
        if (first < 0) return;
        const float* from = table_row(params.rotary, position) + first;
        ptx::cp_async_16(address_of(shared.angles) + chunk * 32, from);
        ptx::cp_async_16(address_of(shared.angles) + chunk * 32 + 16, from + 4);
    }
    // The same chunk of the thread's heads, half of the angles at a time: registers
    MDI_DEVICE void rotate_query(int chunk, uint4 (&v)[kThreadHeads]) const {
        if (first_angle(params.rotary, chunk) < 0) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 angles = load_shared_v4(address_of(shared.angles) + chunk * 32 + half * 16);
            const float angle[4] = {bits_float(angles.x), bits_float(angles.y), bits_float(angles.z), bits_float(angles.w)};
#pragma unroll
            for (int i = 0; i < kThreadHeads; ++i) {
                uint32_t& first = half == 0 ? v[i].x : v[i].z;
                uint32_t& second = half == 0 ? v[i].y : v[i].w;
                first = rotate_pair(first, angle[0], angle[1]);
                second = rotate_pair(second, angle[2], angle[3]);
            }
        }
    }
    MDI_DEVICE void finish_query(int item) const {
        const int num_heads = min_of(kHeads, params.num_heads - first_head_of(params, item));
        const QueryPlace place(shared);
#pragma unroll
        for (int head = 0; head < kThreadHeads; ++head) {
            if (place.first_head + head * place.kHeadStep < num_heads) continue;
#pragma unroll
            for (int atom = 0; atom < kAtoms; ++atom) store_shared_v4(place.at(head, atom), make_uint4(0, 0, 0, 0));
        }
        constexpr int kFirstChanged = kExpanded ? kAtoms - 1 : 0;  // without key order only the last atom is rotated
#pragma unroll
        for (int atom = kFirstChanged; atom < kAtoms; ++atom) {
            uint4 v[kThreadHeads];
#pragma unroll
            for (int head = 0; head < kThreadHeads; ++head) v[head] = load_shared_v4(place.at(head, atom));
            if (kRotates && atom == kAtoms - 1) rotate_query(place.chunk, v);
#pragma unroll
            for (int head = 0; head < kThreadHeads; ++head) store_shared_v4(place.at(head, atom), to_tile_order<!kExpanded>(v[head]));
        }
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(address_of(&shared.q_full));
        const int next = item + gridDim.x;
        if (next < num_items(params)) {
            int lines;
            const uint8_t* line = reinterpret_cast<const uint8_t*>(query(next, lines));
            lines *= kHeadDim * 2 / 128;
            for (int i = thread_index() - kFirstProducer; i < lines; i += kProducerThreads) prefetch_l2(line + i * 128);
        }
    }
};

template <bool kRotates>
struct PackedProducer : QueryProducer<kRotates, false> {
    using Base = QueryProducer<kRotates, false>;
    using Base::params, Base::shared;
    int lane, tile_row, part;  // tile_row: of the step's rows, the one this lane serves as `part` of four (Packed)
    uint32_t valid;            // where the warp's byte of shared.valid[0] lies

    MDI_DEVICE PackedProducer(const SparseParams& p, SharedStorage& s) : Base{p, s}, lane(threadIdx.x % 32) {
        const int warp = (threadIdx.x - kFirstProducer) / 32;
        tile_row = warp * kWarpRows + Packed::row_of(lane);
        part = Packed::part_of(lane);
        valid = address_of(shared.valid) + warp;
        Descriptor::opaque(valid);  // or it is computed anew in every step, from a slow special register
    }
    // The rows of a warp in one step; rows that are not there count as compressed. The code is compiled for each.
    enum class Rows { kWindow, kCompressed, kMixed };

    // The fence between the stores and the wgmma that reads them is the consumer's.
    MDI_DEVICE void arrive_full(int buffer, int quarter) const { ptx::mbarrier_arrive(address_of(&shared.full[buffer][quarter])); }

    // One quarter of the row's step, from registers to the K tile. Stored chunk by chunk: four of them at once leave too few registers.
    template <int kQuarter>
    MDI_DEVICE void write_quarter(bool window, const uint32_t (&to)[4], const Packed& packed) const {
        constexpr uint32_t kOffset = 2 * kQuarter * kAtomBytes;
        if (window) {
#pragma unroll
            for (int atom = 0; atom < 2; ++atom) {
                uint4 chunks[2];
                expand_codes(packed.codes[atom], packed.scales[kQuarter % 2] >> (8 * (2 * atom + part % 2)) & 0xffu, chunks[0], chunks[1]);
                store_shared_v4(to[0] + kOffset + atom * kAtomBytes, chunks[0]);
                store_shared_v4(to[1] + kOffset + atom * kAtomBytes, chunks[1]);
            }
        } else {
            const uint4& v = packed.codes[kQuarter % 2];
            uint32_t factor[2];
            fp4_factors(packed.scales[kQuarter % 2], factor);
            store_shared_v4(to[0] + kOffset, expand_nibbles(v.x, factor[0]));
            store_shared_v4(to[1] + kOffset, expand_nibbles(v.y, factor[0]));
            store_shared_v4(to[2] + kOffset, expand_nibbles(v.z, factor[1]));
            store_shared_v4(to[3] + kOffset, expand_nibbles(v.w, factor[1]));
        }
    }

    template <int kQuarter>
    MDI_DEVICE void take(Packed& packed, bool window, const LaneRow& row) const {
        if (window) {
            const uint32_t at = packed.quarter_at(kQuarter, part);
            packed.take_window<kQuarter>(at, at + 64);
        } else if (kQuarter % 2 == 0) {
            packed.take_compressed<kQuarter / 2 * 2>(row.any(), part);
        }
    }

    // Fills the K tile of step b and starts the copies of the next rows. Groups of copies that may be under way, oldest first: a
    // compressed row or a window row's first quarter, its second, Q (in an item's first step), its third and fourth.
    template <Rows kRows>
    MDI_DEVICE void fill(const LaneChunks& chunks, Packed& packed, const LaneRow& row, const LaneRow& next_row, int b, bool is_first,
                         int item) const {
        const int buffer = b & 1;
        const uint32_t parity = (b >> 1 & 1) ^ 1;
        const bool window = kRows == Rows::kWindow || (kRows == Rows::kMixed && row.window);
        const uint32_t first = (window ? chunks.window : chunks.compressed) + buffer * kTileBytes;
        const uint32_t to[4] = {first, first ^ 16, first ^ 32, first ^ 48};
        const bool next_windows = __all_sync(~0u, next_row.window);
        if (kRows == Rows::kCompressed) {
            Packed::wait<0>();
        } else if (is_first) {
            Packed::wait<2>();
        } else {
            Packed::wait<1>();
        }
        take<0>(packed, window, row);
        if (kRows != Rows::kCompressed) packed.start_quarter<2>(params, row, part);
        ptx::mbarrier_wait(address_of(&shared.empty[buffer][0]), parity);
        write_quarter<0>(window, to, packed);
        arrive_full(buffer, 0);
        if (kRows != Rows::kCompressed) {
            if (is_first) {
                ptx::cp_async_wait<2>();
            } else {
                ptx::cp_async_wait<1>();
            }
            take<1>(packed, window, row);
            packed.start_quarter<3>(params, row, part);
        }
        write_quarter<1>(window, to, packed);
        arrive_full(buffer, 1);
        if (kRows != Rows::kCompressed) {
            ptx::cp_async_wait<1>();
            if (is_first) this->finish_query(item);
        }
        take<2>(packed, window, row);
        if (kRows == Rows::kCompressed) {
            packed.start(params, next_row, part);
        } else if (next_windows) {
            __syncwarp();  // every lane has read the scales
            packed.start_quarter<0>(params, next_row, part);
        } else {
            ptx::cp_async_commit();
        }
        ptx::mbarrier_wait(address_of(&shared.empty[buffer][1]), parity);
        write_quarter<2>(window, to, packed);
        arrive_full(buffer, 2);
        if (kRows != Rows::kCompressed) {
            ptx::cp_async_wait<1>();
            take<3>(packed, window, row);
            if (next_windows) {
                packed.start_quarter<1>(params, next_row, part);
            } else {
                packed.start(params, next_row, part);
            }
        }
        write_quarter<3>(window, to, packed);
        const uint8_t rows = valid_rows(row);
        if (lane == 0) store_shared_u8(valid + buffer * sizeof(shared.valid[0]), rows);
        arrive_full(buffer, kQuarters - 1);
    }

    MDI_DEVICE void run() {
        Cursor at(params, blockIdx.x);
        if (at.done(params)) return;
        Packed packed(shared.packed[tile_row / kWarpRows], lane);
        const LaneChunks to(address_of(shared.k[0]), tile_row, part);
        // Three steps are under way: one in registers, the next one's rows being copied, row numbers of the one after that.
        LaneRow row, next_row;
        int item = at.item, next_item;  // the number of items: none
        bool is_first = true, next_is_first;
        row.settle(params, load_index(params, at, tile_row), at.first_slot + tile_row);
        packed.start(params, row, part);
        at.advance(params);
        next_row.settle(params, load_index(params, at, tile_row), at.first_slot + tile_row);
        next_item = at.item;
        next_is_first = at.first_slot == 0;

        int item_count = 0;
        for (int b = 0; item < num_items(params); ++b) {
            if (is_first) this->start_query(item, item_count++);
            at.advance(params);
            const int idx_ahead = load_index(params, at, tile_row);
            if (!is_first && __all_sync(~0u, !row.window)) {
                fill<Rows::kCompressed>(to, packed, row, next_row, b, is_first, item);
            } else if (__all_sync(~0u, row.window)) {
                fill<Rows::kWindow>(to, packed, row, next_row, b, is_first, item);
            } else {
                fill<Rows::kMixed>(to, packed, row, next_row, b, is_first, item);
            }
            row = next_row;
            item = next_item;
            is_first = next_is_first;
            next_row.settle(params, idx_ahead, at.first_slot + tile_row);
            next_item = at.item;
            next_is_first = at.first_slot == 0;
        }
    }
};

// Rows of expand_rows.cu: 16 bytes at a time straight to the K tile, a warp sixteen rows, eight neighbouring lanes the 128 bytes
// of a row in an atom. Copies arrive on the barriers themselves; nothing is waited for but places and Q.
template <bool kRotates>
struct ExpandedProducer : QueryProducer<kRotates, true> {
    using Base = QueryProducer<kRotates, true>;
    using Base::params, Base::shared;
    static constexpr int kWarpRows = kSlots / (Sizes<true>::kProducerThreads / 32), kLaneRows = kWarpRows / 4;
    int lane, warp;

    MDI_DEVICE ExpandedProducer(const SparseParams& p, SharedStorage& s) : Base{p, s}, lane(threadIdx.x % 32) {
        warp = (threadIdx.x - kFirstProducer) / 32;
    }

    struct Step {
        int item, first_slot;
        int idx;  // pool row of slot warp * kWarpRows + lane % kWarpRows of the step, negative: none
    };
    MDI_DEVICE int lane_slot() const { return warp * kWarpRows + lane % kWarpRows; }
    MDI_DEVICE Step step_at(const Cursor& at, int loaded) const {
        const int limit = at.first_slot + lane_slot() < params.num_window ? params.num_window_rows : params.num_compressed_rows;
        return {at.item, at.first_slot, static_cast<uint32_t>(loaded) < static_cast<uint32_t>(limit) ? loaded : -1};
    }
    MDI_DEVICE const uint8_t* pool_row(int idx, int slot) const {
        const bool in_window = slot < params.num_window || params.compressed == nullptr;
        return (in_window ? params.window : params.compressed) + static_cast<int64_t>(idx) * kExpandedRowBytes;
    }

    // What a lane copies in a step: 16 bytes of every 128 of four rows, four rows apart. A row that is not there is zero; its address is
    // that of row 0: no branches here.
    struct LaneRows {
        const uint8_t* from[kLaneRows];
        uint32_t bytes[kLaneRows];  // 16 or 0
    };
    MDI_DEVICE LaneRows lane_rows(const Step& step) const {
        LaneRows rows;
#pragma unroll
        for (int j = 0; j < kLaneRows; ++j) {
            const int row = lane / 8 + 4 * j, idx = __shfl_sync(~0u, step.idx, row);
            rows.bytes[j] = idx >= 0 ? 16 : 0;
            rows.from[j] = pool_row(max_of(idx, 0), step.first_slot + warp * kWarpRows + row) + lane % 8 * 16;
        }
        return rows;
    }
    template <int kQuarter>
    MDI_DEVICE void copy_quarter(const LaneRows& rows, uint32_t to, int buffer) const {
#pragma unroll
        for (int j = 0; j < kLaneRows; ++j) {
#pragma unroll
            for (int atom = 2 * kQuarter; atom < 2 * kQuarter + 2; ++atom) {  // four rows on, bit 2 of the swizzle changes
                ptx::cp_async_16_zfill((j % 2 == 0 ? to : to ^ 64) + j * 4 * 128 + atom * kAtomBytes, rows.from[j] + atom * 128, rows.bytes[j]);
            }
        }
        ptx::cp_async_mbarrier_arrive(address_of(&shared.full[buffer][kQuarter]));
    }

    MDI_DEVICE void run() {
        Cursor at(params, blockIdx.x);
        const uint32_t tile = address_of(shared.k[0]) + atom_offset(warp * kWarpRows + lane / 8, lane % 8);
        Step step = step_at(at, load_index(params, at, lane_slot()));
        at.advance(params);
        Step next = step_at(at, load_index(params, at, lane_slot()));
        int item_count = 0;
        for (int b = 0; step.item < num_items(params); ++b) {
            const int buffer = b & 1;
            const uint32_t parity = (b >> 1 & 1) ^ 1, to = tile + buffer * kTileBytes;
            const bool is_first = step.first_slot == 0;
            if (is_first) this->start_query(step.item, item_count++);
            at.advance(params);
            const int loaded = load_index(params, at, lane_slot());
            const LaneRows rows = lane_rows(step);
            const uint32_t valid = __ballot_sync(~0u, step.idx >= 0);
            ptx::mbarrier_wait(address_of(&shared.empty[buffer][0]), parity);
            copy_quarter<0>(rows, to, buffer);
            copy_quarter<1>(rows, to, buffer);
            ptx::mbarrier_wait(address_of(&shared.empty[buffer][1]), parity);
            copy_quarter<2>(rows, to, buffer);
            copy_quarter<3>(rows, to, buffer);
            if (lane < kWarpRows && next.idx >= 0) ptx::bulk_prefetch_l2(pool_row(next.idx, next.first_slot + lane_slot()), kExpandedRowBytes);
            if (lane == 0) {
                static_assert(kWarpRows == 16);
                store_shared_u16(address_of(shared.valid[buffer]) + warp * 2, valid);
                ptx::mbarrier_arrive(address_of(&shared.full[buffer][kQuarters - 1]));
            }
            if (is_first) {
                ptx::cp_async_commit();
                ptx::cp_async_wait<1>();  // Q is there, the rows may be on their way
                this->finish_query(step.item);
            }
            step = next;
            next = step_at(at, loaded);
        }
    }
};

// ---- consumers -----------------------------------------------------------------------------------------------------

template <Output kOutput, bool kExpanded>
struct Consumer {
    const SparseParams& params;
    SharedStorage& shared;
    const int group, other;          // this consumer, 0 or 1, and the other one
    int lane, row;                   // row: the thread's first head in the tile, the second is row + 8
    // O += P V is one product of 256 dims, or two of 128: ptxas takes no wider one at 512 threads.
    static constexpr int kParts = kExpanded ? 1 : 2, kPartDims = kHalfDims / kParts, kPartValues = kPartDims / 2;
    float o[kParts][kPartValues];    // 64 heads x 256 dims over the warpgroup
    float m[2], sum[2];              // running maximum, and the sum over this consumer's own steps

    MDI_DEVICE Consumer(const SparseParams& p, SharedStorage& s, int consumer) : params(p), shared(s), group(consumer), other(consumer ^ 1) {
        lane = threadIdx.x % 32;
        row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    }

    MDI_DEVICE static void arrive(const uint64_t& barrier) { ptx::mbarrier_arrive(address_of(&barrier)); }

    MDI_DEVICE void fence_output() {
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_registers(o[part]);
    }

    // Takes over a new running maximum: rescales what was summed under the old one. O holds nothing before an item's first
    // product (`started`), which overwrites it.
    MDI_DEVICE void rescale(const float (&new_max)[2], bool started) {
        const float alpha[2] = {ptx::exp2_approx(m[0] - new_max[0]), ptx::exp2_approx(m[1] - new_max[1])};
        m[0] = new_max[0];
        m[1] = new_max[1];
        sum[0] = __fmul_rn(sum[0], alpha[0]);
        sum[1] = __fmul_rn(sum[1], alpha[1]);
        if (started && __any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
            for (int i = 0; i < kHalfDims / 2; ++i) o[i / kPartValues][i % kPartValues] *= alpha[i / 2 % 2];
        }
    }

    // V = the K tile's atoms of this consumer's dims, MN-major: atoms along N, rows along K
    MDI_DEVICE Descriptor values(int buffer) const { return {shared.k[buffer] + group * (kAtoms / 2) * kAtomBytes, kAtomBytes}; }

    // The other consumer's step b: waits for its P, adjusts to its maximum and starts O += P V.
    MDI_DEVICE void start_other(int b, bool started) {
        ptx::mbarrier_wait(address_of(&shared.p_ready[other]), b >> 1 & 1);  // after its fences for P and the tile
        const float new_max[2] = {shared.row_max[other][row], shared.row_max[other][row + 8]};
        rescale(new_max, started);
        const Descriptor p(shared.p[other], 16), v = values(other);
        fence_output();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSlots / 16; ++k) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                wgmma_bf16_ss<kPartDims, 0, 1>(o[part], p.at(k * 32), v.at(k * 2048 + 2 * part * kAtomBytes), started || k > 0);
            }
        }
        wgmma_commit();
    }

    // S = Q K^T of this consumer's own step b, one quarter of the dims a group
    template <int kFirst, int kEnd>
    MDI_DEVICE void start_scores(float (&s)[kSlots / 2], int b) const {
        const Descriptor q(shared.q, 16), k(shared.k[group], 16);
#pragma unroll
        for (int quarter = kFirst; quarter < kEnd; ++quarter) {
            ptx::mbarrier_wait(address_of(&shared.full[group][quarter]), b >> 1 & 1);
            ptx::fence_proxy_async();  // the producers' stores to K, for the wgmma of both consumers
            if (quarter == 0) fence_registers(s);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t offset = (2 * quarter + i / 4) * kAtomBytes + i % 4 * 32;
                wgmma_bf16_ss<kSlots>(s, q.at(offset), k.at(offset), quarter + i > 0);
            }
            wgmma_commit();
        }
    }

    // Publishes P and the maximum it refers to to the other consumer.
    MDI_DEVICE void publish(const uint32_t (&p)[kSlots / 4], const float (&new_max)[2]) const {
        AtomWriter(shared.p[group]).store(p);
        if (lane % 4 == 0) {
            shared.row_max[group][row] = new_max[0];
            shared.row_max[group][row + 8] = new_max[1];
        }
        ptx::fence_proxy_async();  // the other consumer's wgmma reads P
        arrive(shared.p_ready[group]);
    }

    // O += P V of the own step, P from registers
    MDI_DEVICE void own_values(uint32_t (&p)[kSlots / 4], bool started) {
        const Descriptor v = values(group);
        fence_output();
        fence_registers(p);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSlots / 16; ++k) {
            const uint32_t a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                wgmma_bf16_rs<kPartDims, 1>(o[part], a, v.at(k * 2048 + 2 * part * kAtomBytes), started || k > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        fence_output();
    }

    MDI_DEVICE void finish_other() {
        wgmma_wait<0>();
        fence_output();
    }

    // The consumer's own step b. kAlone: the item's first, without one of the other before it. started: O holds something when the
    // other's step b - 1 comes. is_last: of its own; keep_tile: of the item, whose tile `store` still wants.
    // kAlone is a template argument, because ptxas serialises wgmma groups that are open across a branch.
    template <bool kAlone>
    MDI_DEVICE void own_step(int b, bool started, bool is_last, bool keep_tile) {
        float s[kSlots / 2], new_max[2], part[2];
        uint32_t p[kSlots / 4];
        start_scores<0, 2>(s, b);
        if constexpr (!kAlone) start_other(b - 1, started);
        start_scores<2, 4>(s, b);
        const uint32_t valid_low = shared.valid[group][0], valid_high = shared.valid[group][1];
        if constexpr (!kAlone) {
            wgmma_wait<2>();
            arrive(shared.empty[other][group]);
        }
        wgmma_wait<0>();
        fence_registers(s);
        if (is_last) arrive(shared.q_empty);
        const float scale = mask_scores(s, params.softmax_scale, valid_low, valid_high, lane, new_max);
        new_max[0] = next_max(m[0], new_max[0]);
        new_max[1] = next_max(m[1], new_max[1]);
        exponentiate(s, scale, new_max, part, p);
        publish(p, new_max);
        fence_output();
        rescale(new_max, !kAlone);
        sum[0] += part[0];
        sum[1] += part[1];
        own_values(p, !kAlone);
        if (!keep_tile) arrive(shared.empty[group][group]);
    }

    // Steps b..last of one item; step b is in K tile b % 2, which is also the consumer it belongs to.
    MDI_DEVICE void attend(int b, int last) {
        m[0] = m[1] = kMaxStart;
        sum[0] = sum[1] = 0.f;
        bool started = false;
        if (((b ^ group) & 1) == 0) {
            own_step<true>(b, false, b + 2 > last, b == last);
            started = true;
            b += 2;
        } else {
            if (b == last) arrive(shared.q_empty);  // no step of its own
            ++b;
        }
        for (; b <= last; b += 2, started = true) own_step<false>(b, started, b + 2 > last, b == last);
        if (((last ^ group) & 1) != 0) {
            start_other(last, started);
            finish_other();
        }
    }

    // Where a consumer's sum of a row goes to the other one: into the P that it reads, whose row its own warp rewrites next. Items take
    // turns in two places: in an item of one step nothing else keeps a consumer from writing before the other has read the last one.
    MDI_DEVICE float* sum_slot(int writes_p, int head, uint32_t parity) const {
        return reinterpret_cast<float*>(shared.p[writes_p] + head * 128 + (head & 7) * 16 + parity * 8);
    }

    // Where a consumer's largest |o| of eight heads goes, behind the sum of the first
    MDI_DEVICE uint32_t* max_slot(int writes_p, int head) const { return reinterpret_cast<uint32_t*>(sum_slot(writes_p, head, 0)) + 1; }

    // o / (l + exp(sink - m)), rounded, through this consumer's half of the last K tile to chunks of eight columns (OutputPlace),
    // which leave in the wanted form. The tile is free for that: only the consumer's own values are read there, all its warps are
    // done with them when the sums are there, and the scores of the step were complete before P. A warp reads what it wrote.
    // parity: of the items before this one that were not empty
    MDI_DEVICE void store(int item, uint32_t parity, int buffer) {
        const int thread = thread_index() % kGroupThreads, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
        const int first_head = first_head_of(params, item);
        const int num_heads = min_of(kHeads, params.num_heads - first_head);
        float factor[2], sink[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            const int head = row + 8 * f;
            sink[f] = 0.f;
            if (head < num_heads) {
                sink[f] = kOutput != Output::kPlain || params.num_heads > kHeads ? sink_of(params, first_head + head) : shared.sink[head];
            }
            sum[f] += __shfl_xor_sync(~0u, sum[f], 1);
            sum[f] += __shfl_xor_sync(~0u, sum[f], 2);
            if (lane % 4 == 0) *sum_slot(other, head, parity) = sum[f];
        }
        ptx::named_barrier_sync(kConsumerBarrier, kConsumers * kGroupThreads);  // sums are there
        const OutputPlace place(thread);
        Rotation rotation;
        if (kOutput != Output::kPlain && group == kConsumers - 1) {
            rotation.load(params.rotary, load_shared_s32(address_of(&shared.position[parity])), place.chunk);
        }
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            const int head = row + 8 * f;
            const float others = *sum_slot(group, head, parity);
            const float valid_sum = group == 0 ? sum[f] + others : others + sum[f];
            factor[f] = output_factor(valid_sum, sink[f], m[f]);
        }
        uint8_t* tile = shared.k[buffer] + group * (kAtoms / 2) * kAtomBytes;
#pragma unroll
        for (int part = 0; part < kHalfDims / 64; ++part) {
            uint32_t pairs[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int first = part * 32 + 2 * i;
                const float* value = o[first / kPartValues] + first % kPartValues;
                pairs[i] = ptx::pack_bf16x2(value[0] * factor[i % 2], value[1] * factor[i % 2]);
            }
            AtomWriter(tile + part * kAtomBytes).store(pairs);
        }
        __syncwarp();
        if constexpr (kOutput != Output::kCodes) {
            bf16* out = params.out + place.offset(params, item) + group * kHalfDims;
#pragma unroll
            for (int part = 0; part < kHalfDims / 64; ++part) {
                const bool rotates = kOutput == Output::kRotated && part == kHalfDims / 64 - 1 && rotation.any;
#pragma unroll
                for (int i = 0; i < OutputPlace::kRows; ++i) {
                    uint4 v = from_tile_order<!kExpanded>(load_shared_v4(place.staged(tile, part, i)));
                    if (rotates) v = rotation.inverse(v);
                    if (place.row(i) < num_heads) *reinterpret_cast<uint4*>(out + i * OutputPlace::kRowStep * kHeadDim + part * 64) = v;
                }
            }
        } else {
            store_codes(item, tile, place, rotation, num_heads);
        }
        arrive(shared.empty[buffer][group]);
    }

    // The staged chunks as folded codes. A warp's 16 heads are two rows of codes, of which the other consumer's warp of the same heads
    // has the other columns.
    MDI_DEVICE void store_codes(int item, const uint8_t* tile, const OutputPlace& place, const Rotation& rotation, int num_heads) const {
        constexpr int kParts = kHalfDims / 64, kRows = OutputPlace::kRows;
        const int thread = thread_index() % kGroupThreads, head = thread / 32 * 16;
        uint32_t largest[2] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                uint4 v = load_shared_v4(place.staged(tile, part, i));
                if (part == kParts - 1 && rotation.any) {
                    v = to_tile_order<!kExpanded>(rotation.inverse(from_tile_order<!kExpanded>(v)));
                    store_shared_v4(place.staged(tile, part, i), v);
                }
                largest[2 * i / kRows] = elementwise::max_halves(largest[2 * i / kRows], largest_halves(v));
            }
        }
#pragma unroll
        for (int f = 0; f < 2; ++f) largest[f] = __reduce_max_sync(~0u, largest_half(largest[f]));
        if (thread % 32 < 2) *max_slot(other, head + 8 * (thread % 32)) = thread % 32 == 0 ? largest[0] : largest[1];
        ptx::named_barrier_sync(kPairBarrier + thread / 32, 2 * 32);
        int row_byte[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) row_byte[f] = scale_byte(max_of(largest[f], *max_slot(group, head + 8 * f)));
        if (head >= num_heads) return;

        // First as if one rounding were enough, without a branch; then again the rows of chunks in which it is not for some lane.
        uint8_t* to = params.codes + place.offset(params, item) + group * kHalfDims;
        const int rows = head + kCodeHeads < num_heads ? kRows : kRows / 2;
        uint32_t inexact = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (i == kRows / 2 && i >= rows) break;
            bool exact = true;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const uint4 v = load_shared_v4(place.staged(tile, part, i));
                const uint2 codes = encode_at_row<!kExpanded>(v, row_byte[2 * i / kRows], exact);
                *reinterpret_cast<uint2*>(to + i * OutputPlace::kRowStep * kHeadDim + part * 64) = codes;
            }
            if (!__all_sync(~0u, exact)) inexact |= 1u << i;
        }
#pragma unroll 1
        for (; inexact != 0; inexact &= inexact - 1) {
            const int i = __ffs(static_cast<int>(inexact)) - 1, byte = i < kRows / 2 ? row_byte[0] : row_byte[1];
            uint4 v[kParts];
#pragma unroll
            for (int part = 0; part < kParts; ++part) v[part] = load_shared_v4(place.staged(tile, part, i));
#pragma unroll
            for (int part = 0; part < kParts; part += 2) {
                const uint32_t group_max = largest_of_groups(v[part], v[part + 1]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint2 codes = fold_chunk<!kExpanded>(v[part + j], group_max >> (j * 16) & 0xffffu, byte);
                    *reinterpret_cast<uint2*>(to + i * OutputPlace::kRowStep * kHeadDim + (part + j) * 64) = codes;
                }
            }
        }
        if (group == 0 && thread % 32 < 2 && head + 8 * (thread % 32) < num_heads) {
            params.row_scale[output_row(params, first_head_of(params, item) + head, token_of(params, item)) / kCodeHeads + thread % 32] =
                e8m0_decode(static_cast<uint8_t>(thread % 32 == 0 ? row_byte[0] : row_byte[1]));
        }
    }

    MDI_DEVICE void store_zeros(int item) const {
        const int first_head = first_head_of(params, item);
        store_empty<kOutput>(params, token_of(params, item), first_head, min_of(kHeads, params.num_heads - first_head), thread_index(),
                             kConsumers * kGroupThreads);
    }

    MDI_DEVICE void run() {
        // Steps so far, as the producer counts them, modulo 4 (K tile and its parity), and the parity of non-empty items. One
        // register, because none is left.
        uint32_t phases = 0;
        int length = length_of(params, blockIdx.x);
        for (int item = blockIdx.x; item < num_items(params);) {
            const int num_steps = (lanes_of(params, length) + kSlots - 1) / kSlots, next = item + gridDim.x;
            int next_length = 0;
            if (num_steps == 0) {
                store_zeros(item);
                length = length_of(params, next);
            } else {
                ptx::mbarrier_wait(address_of(&shared.q_full), phases >> 2);
                const int first = phases & 3, last = first + num_steps - 1;
                attend(first, last);
                // Arrives under the stores; a load by all lanes would go to a uniform register, which is waited for at once.
                if (thread_index() % 32 == 0) next_length = length_of(params, next);
                store(item, phases >> 2, last & 1);
                phases = ((phases & 4) ^ 4) | ((last + 1) & 3);
                length = __shfl_sync(~0u, next_length, 0);
            }
            item = next;
        }
    }
};

template <Output kOutput, bool kExpanded>
__global__ void __launch_bounds__(Sizes<kExpanded>::kThreads, 1) sparse_sm90_kernel(const __grid_constant__ SparseParams params) {
    constexpr bool kRotates = kOutput != Output::kPlain;
    using Size = Sizes<kExpanded>;
    using Producer = std::conditional_t<kExpanded, ExpandedProducer<kRotates>, PackedProducer<kRotates>>;
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            for (int j = 0; j < kQuarters; ++j) ptx::mbarrier_init(address_of(&shared.full[i][j]), Size::kProducerThreads + (j == kQuarters - 1 ? Size::kValidArrivals : 0));
            for (uint64_t& empty : shared.empty[i]) ptx::mbarrier_init(address_of(&empty), kGroupThreads);
            ptx::mbarrier_init(address_of(&shared.p_ready[i]), kGroupThreads);
        }
        ptx::mbarrier_init(address_of(&shared.q_full), Size::kProducerThreads);
        ptx::mbarrier_init(address_of(&shared.q_empty), kConsumers * kGroupThreads);
        ptx::fence_mbarrier_init();
    }
    if (kOutput == Output::kPlain && static_cast<int>(threadIdx.x) < min_of(params.num_heads, kHeads)) {
        shared.sink[threadIdx.x] = sink_of(params, threadIdx.x);
    }
    __syncthreads();
    const int role = __shfl_sync(~0u, threadIdx.x / kGroupThreads, 0);  // in a uniform register, and so all descriptors
    if (role >= kConsumers) {
        ptx::setmaxnreg_dec<Size::kProducerRegisters>();
        Producer(params, shared).run();
    } else {
        ptx::setmaxnreg_inc<Size::kConsumerRegisters>();
        Consumer<kOutput, kExpanded>(params, shared, role).run();
    }
}

template <Output kOutput>
void launch_output(const SparseParams& params, int blocks) {
    const auto launch_kernel = [&](auto* kernel, int threads) {
        launch("attention.sparse", kernel, {dim3(blocks), dim3(threads), sizeof(SharedStorage), params.stream}, params);
    };
    if (params.expanded) {
        launch_kernel(sparse_sm90_kernel<kOutput, true>, Sizes<true>::kThreads);
    } else {
        launch_kernel(sparse_sm90_kernel<kOutput, false>, Sizes<false>::kThreads);
    }
}

}  // namespace

void launch_sparse_sm90(const SparseParams& params) {
    int device = 0, num_sms = 0;
    check_cuda("attention.sparse", cudaGetDevice(&device));
    check_cuda("attention.sparse", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const int items = params.num_tokens * ((params.num_heads + kHeads - 1) / kHeads);
    if (!params.expanded && int64_t{4} * kSplitBlocks * items <= 3 * num_sms) return launch_sparse_split_sm90(params);  // clusters of eight do not fill every GPC
    const int blocks = min_of(items, num_sms);
    switch (output_of(params)) {
        case Output::kPlain: return launch_output<Output::kPlain>(params, blocks);
        case Output::kRotated: return launch_output<Output::kRotated>(params, blocks);
        case Output::kCodes: return launch_output<Output::kCodes>(params, blocks);
    }
}

}  // namespace mdi::attention
