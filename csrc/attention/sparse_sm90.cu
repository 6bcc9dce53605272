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
#include "attention/sparse_producers_sm90.cuh"
#include "common/launch.h"

#include <type_traits>

namespace mdi::attention {
namespace {

using namespace sm90;

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
