// Sparse attention on Hopper for few tokens: a cluster of eight blocks per (token, 64 heads) instead of one block, and the same
// bits as sparse_sm90.cu, because every step of 64 slots runs through the same instructions in the same order.
//
// Steps are taken in rounds of eight, one per block:
//   1. every block expands the rows of its step to a K tile in its shared memory, and atom j of it (64 columns) also to block j,
//      which collects the values of its 64 dims of O; then S = Q K^T;
//   2. the largest scores of the step go to all blocks: each follows the running maximum over the steps, as one block would;
//   3. P and the parts of the sum go to all blocks, and every block adds P V of all steps, in order, to its dims of O.
// A token of 640 slots takes two rounds: about two steps' gathering and expansion, and Q once, in sequence instead of ten.
// Measured on an H200, 640 slots: T=1 and T=8 0.025 ms instead of 0.031, T=12 0.027; T=16 would need a second wave of clusters
// (0.049), so more than twelve go to sparse_sm90.cu. Most of it is latency: two dependent reads of memory and three cluster
// barriers a round, 128 KiB to other blocks' shared memory.
//
// Rotation of Q and the forms of the output are those of sparse_output_sm90.cuh; codes take one more barrier of the cluster.
//
// 256 threads: all of them copy and expand, the first warpgroup does the products. Shared memory: Q 64 KiB, K tile 64 KiB (then P
// of eight steps), values 64 KiB, packed rows 18 KiB (then P or O on its way out), the rest 10.5 KiB.
// SASS: HGMMA
#include "attention/sparse_output_sm90.cuh"
#include "attention/sparse_sm90.cuh"
#include "common/launch.h"

namespace mdi::attention {
namespace {

using namespace sm90;

constexpr int kRanks = kSplitBlocks;
static_assert(kRanks == kAtoms);  // a block has an atom of V
constexpr int kThreads = kExpanderThreads;

struct SharedStorage {
    uint8_t q[kTileBytes];
    uint8_t keys[kTileBytes];  // of this block's step; from the second barrier of a round on P of its steps, an atom each
    uint8_t values[kRanks][kAtomBytes];
    union {
        uint8_t packed[kThreads / 32][kPackedWarpBytes];
        uint8_t out[kAtomBytes];  // P for the other blocks, and O
    };
    float top[kRanks][kHeads];               // largest scores of a step
    float2 part[kRanks][kGroupThreads];      // each product thread's part of a step's sum, for its two rows
    uint32_t valid[2];
    float largest[2 * kThreads / 32][kRanks];  // bits: largest |o| of a warp's heads in a block, for the first and the second half
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

// `address` in this block's shared memory, of block `rank`
template <class Value>
MDI_DEVICE void store_remote(uint32_t address, int rank, Value v) {
    ptx::store_cluster(ptx::map_to_rank(address, rank), v);
}

// The second half of a window row, for which the warp's buffer has no room: it waits in the last two atoms of the K tile, which are
// written last. Every lane copies what it takes itself.
struct SecondHalf {
    uint32_t at;  // the lane's unit of the first 64 bytes

    MDI_DEVICE SecondHalf(uint32_t tile, int tile_row, int part)
        : at(tile + (kAtoms - 2) * kAtomBytes + atom_offset(tile_row, Packed::window_unit(part))) {}
    MDI_DEVICE uint32_t unit(int i) const { return (at ^ (i % 2 * 64)) + i / 2 * kAtomBytes; }
    MDI_DEVICE void start(const SparseParams& params, const LaneRow& from, int part) const {
        if (from.window) {
            const uint8_t* bytes =
                params.window + static_cast<int64_t>(from.idx) * kWindowRowBytes + kHeadDim / 2 + Packed::window_unit(part) * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::cp_async_16(unit(i), bytes + 64 * i);
        }
        ptx::cp_async_commit();
    }
};

template <Output kOutput>
struct Block {
    const SparseParams& params;
    SharedStorage& shared;
    int thread, warp, lane, rank;
    int item, first_head, num_heads, num_lanes;
    Rotation rotation;  // of the chunks thread % 8 of the last 64 columns, of Q and of O

    MDI_DEVICE Block(const SparseParams& p, SharedStorage& s) : params(p), shared(s) {
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
        rank = ptx::cluster_rank();
        item = blockIdx.x / kRanks;
        first_head = first_head_of(params, item);
        num_heads = min_of(kHeads, params.num_heads - first_head);
        num_lanes = lanes_of(params, length_of(params, item));
    }

    MDI_DEVICE void load_rotation() {
        if constexpr (kOutput != Output::kPlain) {
            rotation.load(params.rotary, load_position(params.rotary, token_of(params, item)), thread % 8);
        }
    }

    // Q, rotated and permuted: a thread has one chunk of every atom of two heads.
    MDI_DEVICE void load_query() {
        load_rotation();
        const int chunk = thread % 8;
        const bf16* from = params.q + token_of(params, item) * params.q_stride_token + first_head * int64_t{kHeadDim} + chunk * 8;
#pragma unroll
        for (int head = thread / 8; head < kHeads; head += kThreads / 8) {
            uint4 v[kAtoms];
#pragma unroll
            for (int atom = 0; atom < kAtoms; ++atom) {
                v[atom] = make_uint4(0, 0, 0, 0);
                if (head < num_heads) v[atom] = __ldg(reinterpret_cast<const uint4*>(from + head * kHeadDim + atom * 64));
            }
            if (rotation.any) v[kAtoms - 1] = rotation.forward(v[kAtoms - 1]);
#pragma unroll
            for (int atom = 0; atom < kAtoms; ++atom) {
                store_shared_v4(address_of(shared.q) + atom * kAtomBytes + atom_offset(head, chunk), to_key_order(v[atom]));
            }
        }
    }

    MDI_DEVICE LaneRow row_of_step(int step, int tile_row) const {
        const int slot = step * kSlots + tile_row;
        const int64_t token = token_of(params, item);
        int idx = -1;
        if (slot < num_lanes) {
            idx = slot < params.num_window ? params.window_idx[token * params.num_window + slot]
                                           : params.compressed_idx[token * params.num_picks + slot - params.num_window];
        }
        LaneRow row;
        row.settle(params, idx, slot);
        return row;
    }

    template <int kQuarter>
    MDI_DEVICE static void take(Packed& packed, const SecondHalf& second, const LaneRow& row, int part) {
        if (row.window) {
            const uint32_t first = packed.quarter_at(kQuarter, part);
            packed.take_window<kQuarter>(kQuarter < 2 ? first : second.unit(2 * kQuarter - 4),
                                         kQuarter < 2 ? first + 64 : second.unit(2 * kQuarter - 3));
        } else if (kQuarter % 2 == 0) {
            packed.take_compressed<kQuarter / 2 * 2>(row.any(), part);
        }
    }

    template <int kQuarter>
    MDI_DEVICE void write_quarter(const Packed& packed, const LaneRow& row, int part, const LaneChunks& to) const {
        uint4 chunks[4];
        expand_quarter<kQuarter>(packed, row, part, chunks);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t offset = to.at(row.window, i) + 2 * kQuarter * kAtomBytes;
            store_shared_v4(address_of(shared.keys) + offset, chunks[i]);
            store_remote(address_of(shared.values[rank]) + offset % kAtomBytes, offset / kAtomBytes, chunks[i]);
        }
    }

    // The K tile of a step, here and its atoms to the blocks that own their columns
    // next_row: in and out, this lane's row of the step and of the one in the next round, whose bytes are fetched to L2 early
    MDI_DEVICE void expand(int step, bool with_query, LaneRow& next_row) {
        const int part = Packed::part_of(lane), tile_row = warp * kWarpRows + Packed::row_of(lane);
        Packed packed(shared.packed[warp], lane);
        const LaneRow row = with_query ? row_of_step(step, tile_row) : next_row;
        const SecondHalf second(address_of(shared.keys), tile_row, part);
        packed.start(params, row, part);
        second.start(params, row, part);
        next_row = row_of_step(step + kRanks, tile_row);
        if (with_query) load_query();
        if (next_row.any()) {
            const uint8_t* bytes = next_row.window ? params.window + static_cast<int64_t>(next_row.idx) * kWindowRowBytes
                                                   : params.compressed + static_cast<int64_t>(next_row.idx) * kCompressedRowBytes;
            prefetch_l2(bytes + min_of(part * 128, kCompressedRowBytes - 1));
        }
        const LaneChunks to(0, tile_row, part);
        Packed::wait<0>();
        if (with_query) ptx::cluster_wait();  // all blocks have started
        take<0>(packed, second, row, part);
        write_quarter<0>(packed, row, part, to);
        take<1>(packed, second, row, part);
        write_quarter<1>(packed, row, part, to);
        take<2>(packed, second, row, part);
        write_quarter<2>(packed, row, part, to);
        take<3>(packed, second, row, part);
        __syncwarp();  // the second half of every window row is taken
        write_quarter<3>(packed, row, part, to);
        const uint8_t valid = valid_rows(row);
        if (lane == 0) reinterpret_cast<uint8_t*>(shared.valid)[warp] = valid;
    }

    MDI_DEVICE void scores(float (&s)[kSlots / 2]) const {
        const Descriptor q(shared.q, 16), k(shared.keys, 16);
        fence_registers(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; ++i) {
            const uint32_t offset = i / 4 * kAtomBytes + i % 4 * 32;
            wgmma_bf16_ss<kSlots>(s, q.at(offset), k.at(offset), i > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(s);
    }

    MDI_DEVICE void run() {
        ptx::cluster_arrive();
        const int num_steps = (num_lanes + kSlots - 1) / kSlots;
        const bool multiplies = warp < kGroupThreads / 32;
        const int row = warp % 4 * 16 + lane / 4;  // this thread's first head, the second is row + 8
        float s[kSlots / 2], scale = 0.f, o[kSlots / 2], m[2] = {kMaxStart, kMaxStart};
        float sum[2][2] = {};  // of even and of odd steps, per row; a round starts with an even step
        LaneRow next_row;
        if (rank >= num_steps) {
            load_rotation();
            __syncwarp();  // here and below: barriers of the cluster want whole warps
            ptx::cluster_wait();
        }
        for (int first = 0; first < num_steps; first += kRanks) {
            const int step = first + rank, steps = min_of(kRanks, num_steps - first);
            const bool has_step = rank < steps;
            if (has_step) expand(step, first == 0, next_row);
            ptx::fence_proxy_async_cluster();
            __syncthreads();
            if (multiplies && has_step) {
                scores(s);
                float top[2];
                scale = mask_scores(s, params.softmax_scale, shared.valid[0], shared.valid[1], lane, top);
                if (lane % 4 < 2) {
                    const uint32_t to = address_of(&shared.top[rank][row + 8 * (lane % 4)]);
                    for (int to_rank = 0; to_rank < kRanks; ++to_rank) store_remote(to, to_rank, lane % 4 == 0 ? top[0] : top[1]);
                }
            }
            __syncwarp();
            ptx::cluster_arrive();
            ptx::cluster_wait();  // all values and largest scores are there, all K tiles are free

            if (multiplies && has_step) {
                float own_max[2] = {m[0], m[1]}, part[2];
                for (int j = 0; j <= rank; ++j) {
                    own_max[0] = next_max(own_max[0], shared.top[j][row]);
                    own_max[1] = next_max(own_max[1], shared.top[j][row + 8]);
                }
                uint32_t p[kSlots / 4];
                exponentiate(s, scale, own_max, part, p);
                AtomWriter(shared.out).store(p);
                const uint32_t to = address_of(&shared.part[rank][thread]);
                for (int to_rank = 0; to_rank < kRanks; ++to_rank) store_remote(to, to_rank, make_float2(part[0], part[1]));
            }
            __syncthreads();
            if (has_step) {
                const uint32_t from = address_of(shared.out), to = address_of(shared.keys) + rank * kAtomBytes;
#pragma unroll
                for (int chunk = thread; chunk < kAtomBytes / 16; chunk += kThreads) {
                    const uint4 v = load_shared_v4(from + chunk * 16);
                    for (int to_rank = 0; to_rank < kRanks; ++to_rank) store_remote(to + chunk * 16, to_rank, v);
                }
            }
            ptx::fence_proxy_async_cluster();
            ptx::cluster_arrive();
            ptx::cluster_wait();  // P and the sums are there
            ptx::fence_proxy_async_cluster();
            if (multiplies) add_values(first, steps, row, m, sum, o);
            if (first + kRanks < num_steps) {
                ptx::cluster_arrive();
                ptx::cluster_wait();  // values and P may be written again
            }
        }
        __syncthreads();  // the packed rows of the last round are used up, `out` is free
        if (num_steps == 0) {
#pragma unroll
            for (float& value : o) value = 0.f;
        }
        store(row, m, sum, o);
    }

    // O += P V of a round's steps for this block's dims
    MDI_DEVICE void add_values(int first, int steps, int row, float (&m)[2], float (&sum)[2][2], float (&o)[kSlots / 2]) const {
        for (int j = 0; j < steps; ++j) {
            const float new_max[2] = {next_max(m[0], shared.top[j][row]), next_max(m[1], shared.top[j][row + 8])};
            const float alpha[2] = {ptx::exp2_approx(m[0] - new_max[0]), ptx::exp2_approx(m[1] - new_max[1])};
            const float2 part = shared.part[j][thread];
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                m[f] = new_max[f];
#pragma unroll
                for (int parity = 0; parity < 2; ++parity) {
                    sum[parity][f] = __fmul_rn(sum[parity][f], alpha[f]) + ((j & 1) == parity ? (f == 0 ? part.x : part.y) : 0.f);
                }
            }
            const bool started = first + j > 0;
            if (started) {
#pragma unroll
                for (int i = 0; i < kSlots / 2; ++i) o[i] *= alpha[i / 2 % 2];
            }
            const Descriptor p(shared.keys + j * kAtomBytes, 16), v(shared.values[j], kAtomBytes);
            fence_registers(o);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSlots / 16; ++k) wgmma_bf16_ss<kSlots, 0, 1>(o, p.at(k * 32), v.at(k * 2048), started || k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_registers(o);
        }
    }

    // o / (l + exp(sink - m)), rounded, through shared memory to 16-byte stores
    MDI_DEVICE void store(int row, const float (&m)[2], float (&sum)[2][2], const float (&o)[kSlots / 2]) const {
        if (warp < kGroupThreads / 32) {
            float factor[2];
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                const int head = row + 8 * f;
                const float sink = head < num_heads ? sink_of(params, first_head + head) : 0.f;
#pragma unroll
                for (int parity = 0; parity < 2; ++parity) {
                    sum[parity][f] += __shfl_xor_sync(~0u, sum[parity][f], 1);
                    sum[parity][f] += __shfl_xor_sync(~0u, sum[parity][f], 2);
                }
                factor[f] = output_factor(sum[0][f] + sum[1][f], sink, m[f]);
            }
            uint32_t pairs[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) pairs[i] = ptx::pack_bf16x2(o[2 * i] * factor[i % 2], o[2 * i + 1] * factor[i % 2]);
            AtomWriter(shared.out).store(pairs);
        }
        __syncthreads();
        const int token = token_of(params, item), chunk = thread % 8, dim = rank * 64 + chunk * 8;
        uint4 v[2];  // of two heads
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = thread / 8 + i * kThreads / 8;
            v[i] = from_key_order(load_shared_v4(address_of(shared.out) + atom_offset(head, chunk)));
            if (rank == kRanks - 1 && rotation.any) v[i] = rotation.inverse(v[i]);
            if (kOutput != Output::kCodes && head < num_heads) {
                const int64_t row = static_cast<int64_t>(token) * params.num_heads + first_head + head;
                *reinterpret_cast<uint4*>(params.out + row * kHeadDim + dim) = v[i];
            }
        }
        if constexpr (kOutput == Output::kCodes) store_codes(v, token, dim);
    }

    // v: of heads thread / 8 and 32 on. The scales of the codes are settled by all blocks.
    MDI_DEVICE void store_codes(const uint4 (&v)[2], int token, int dim) const {
        constexpr int kWarps = kThreads / 32;
        const uint32_t group_max = largest_of_groups(v[0], v[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t largest = __reduce_max_sync(~0u, group_max >> (i * 16) & 0xffffu);
            if (lane < kRanks) store_remote(address_of(&shared.largest[i * kWarps + warp][rank]), lane, bits_float(largest));
        }
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = thread / 8 + i * kThreads / 8;
            uint32_t largest = 0;  // two warps have the heads of a row
#pragma unroll
            for (int j = 0; j < 2 * kRanks; ++j) {
                largest = max_of(largest, float_bits(shared.largest[i * kWarps + (warp & ~1) + j / kRanks][j % kRanks]));
            }
            const int row_byte = scale_byte(largest);
            if (head >= num_heads) continue;
            const int64_t row = output_row(params, first_head + head, token);
            *reinterpret_cast<uint2*>(params.codes + row * kHeadDim + dim) =
                fold_chunk<false>(v[i], group_max >> (i * 16) & 0xffffu, row_byte);
            if (dim == 0 && head % kCodeHeads == 0) params.row_scale[row / kCodeHeads] = e8m0_decode(static_cast<uint8_t>(row_byte));
        }
    }
};

template <Output kOutput>
__global__ void __launch_bounds__(kThreads, 1) sparse_split_sm90_kernel(const __grid_constant__ SparseParams params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    Block<kOutput>(params, *reinterpret_cast<SharedStorage*>(shared_bytes)).run();
}

template <Output kOutput>
void launch_output(const SparseParams& params) {
    const int items = params.num_tokens * ((params.num_heads + kHeads - 1) / kHeads);
    launch("attention.sparse", sparse_split_sm90_kernel<kOutput>,
           {dim3(items * kRanks), dim3(kThreads), sizeof(SharedStorage), params.stream, kRanks}, params);
}

}  // namespace

void launch_sparse_split_sm90(const SparseParams& params) {
    switch (output_of(params)) {
        case Output::kPlain: return launch_output<Output::kPlain>(params);
        case Output::kRotated: return launch_output<Output::kRotated>(params);
        case Output::kCodes: return launch_output<Output::kCodes>(params);
    }
}

}  // namespace mdi::attention
