// What the kernels of sparse_sm90.cu fill and read: their shared memory, and the producers of Q and K tiles, for packed and for expanded
// rows. The roles, barriers and measurements are described in sparse_sm90.cu.
#pragma once
#include "attention/sparse_output_sm90.cuh"
#include "attention/sparse_sm90.cuh"

namespace mdi::attention::sm90 {

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

}  // namespace mdi::attention::sm90
