// Grouped product over experts with FP8 wgmma (sm_90a), MXFP4 weights in the packed layout of ops/packed_weight.py:
//     out[i, o] = bf16( sum_k A'[i, k] * B'[e(i), o, k] ) * 2^S_a(i) * 2^S_b(e, o)
// A' are the rows of fold_rows (one scale per row, columns reordered inside every 128), B' = E2M1 * 2^(byte - row's
// largest byte + 6), exact in E4M3 (docs/numerics.md). Both row scales are powers of two: applied after the rounding.
//
// Operands are swapped: the tensor core's M is output columns (weights, from registers), its N is rows (activations,
// from shared memory). So FP4 is expanded straight into the fragment and never written anywhere, and ragged experts
// cost rows in small steps: an expert's R rows are cut into ceil(R / 288) equal tiles of one of the widths of width_of.
//
// A cluster of two blocks computes 256 columns x up to 288 rows; both need the same rows, each fetches half of them
// by TMA and multicasts. Block roles (384 threads):
//   warp 0       by TMA into a ring of stages of 128 columns of K: rows (128-byte swizzle), FP4 words and the shifts: how far
//                the scale of each group of 32 columns is below the largest of its row of weights
//   warp 1       the tiles of the next rounds, with their scales: searching is done by nobody who is waited for
//   warps 2, 3   finished rows of a warpgroup each, from shared memory to global, beside the next tile's products
//   warpgroups 1, 2 (64 columns each)   per stage, for each of the one to four chains that the tile's rows are cut into:
//     issue four wgmma m64nNk32 on the fragments of this stage; while they run, expand the next stage's weights into the
//     other set of fragments (during a tile's last stage those of the next tile's first) and read what the ones after that
//     are expanded from; then add the tensor core's sums, which have about 14 bits, to fp32 sums (promotion every 128).
//     The other warpgroup's wgmma run meanwhile.
//
// What limits it: a rule that fits the runs made on an H200, no more than a fit. A sub-partition of the SM takes as many
// cycles as it issues instructions, of any kind and any warp, plus three quarters of the wgmma's own; so the promotion hides
// in the fourth quarter and every other instruction adds a cycle. Why three quarters is a guess: a wgmma that reads its
// accumulators may keep other instructions from the register file, and the first of a chain of four reads none.
// The design follows the rule: wide tiles (expansion and loop cost the same for any number of rows: 256 rows in one tile of
// three chains take 11 % less time than in two of 128), few chains (each costs ten instructions a step), two steps for each
// turn of the loop, everything of a stage at one address, no turns and no barriers between the warpgroups, a producer whose
// loop is 37 instructions (65 were 2 to 3 % slower), and what can be computed once at the load is not computed here (seven
// instructions expand eight weights; with the signs where the checkpoint has them it takes nine, and the shifts took three
// warps). Registers set the limit of the width: 288 rows in four chains are 144 fp32 sums, 36 of the tensor core and 32 of
// fragments; one chain of 176 rows 88, 88 and 32.
//
// A stage holds the rows of the widest tile that the ring is cut for, so that narrow tiles, which are done with a stage soon,
// have more of them: 4 of 288 rows, 5 of 224, 6 of 176, 7 of 144, 9 of 80, 14 of 32 (with five for all, 32 rows an expert
// took a third longer). The cut changes between tiles, at most five times since the tiles come by descending width: the
// producers of both blocks wait until their consumers are through, set up the new barriers and tell each other.
//
// Lane t of a quad owns scale group t of the 128 columns, 16 bytes per weight row: word j of them is its part of the
// j-th wgmma. Expansion is a byte look-up (prmt) in the eight magnitudes of the group's scale, then the signs.
// Epilogue in pieces of 32 rows: sums -> bf16 -> scales -> stmatrix transposed to [row][column] in one of three buffers, and
// from there the copying warp makes 16-byte stores of the rows that exist. Tiles of more than 96 rows wait for it, so it is
// written for 40 registers: four loads at a time before their stores.
//
// Tiles are dealt by descending width, back and forth (scheduler.cuh): all clusters get about the same work.
//
// Barriers: full[s] counts the producer, with all bytes of both halves; empty[s] counts one arrival per consumer warp
// of both blocks, because a stage is overwritten in both at once: lane r of a warp arrives in block r, after the wgmma
// that used what all lanes had read. Consumers wait two stages ahead, also past the last tile of a cut: there the producer
// arrives without having brought anything. Barriers that a new cut covers with data are invalidated first (mbarrier.inval):
// without that, the words where barriers had been were sometimes wrong in the new data. laid_out counts the producers of both
// blocks. ready and free of a TileInfo: warp 1 has written it, everybody else has read it. full and empty of a piece: between a
// warpgroup and its copying warp.
// compute-sanitizer's racecheck does not follow __syncwarp to the arrival of another lane and reports what lay_out writes against
// the consumers' reads before and after. With every lane arriving, in both blocks, it reports nothing.
// Shared memory 227 KiB: ring 189 (7 x 27, or 4 x 45, ...), output 2 x 3 x 4, tiles 10, infos 4. Registers 232 x 256 + 40 x 128.
// SASS: QGMMA
// Limits: E <= 1024, K and O multiples of 32. Rows at or past offsets[E] are never written.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm90.cuh"
#include "common/tma_sm90.h"
#include "common/wgmma_sm90.cuh"
#include "moe/grouped_gemm_producers_sm90.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

using namespace sm90;

// Computed once: the compiler would do it again at every use.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// A place in the ring
struct Ring {
    uint32_t offset = 0;  // of the stage, in bytes from the first
    uint32_t phase = 0;

    // At the end of the ring: offset = 0, phase ^= 1. Predicated by hand: the compiler's selects take more instructions.
    template <int kCut>
    __device__ __forceinline__ void advance() {
        offset += stage_bytes(kCut);
        asm("{\n.reg .pred p;\nsetp.eq.u32 p, %0, %2;\n@p xor.b32 %1, %1, 1;\n@p mov.u32 %0, 0;\n}"
            : "+r"(offset), "+r"(phase)
            : "n"(ring_end(kCut)));
    }
};

// -- weights: shared memory -> fragments ---------------------------------------------------------------------------------

// prmt.b32, opaque: the compiler would otherwise mask the two halves of an index word separately
__device__ __forceinline__ uint32_t look_up(uint2 bytes, uint32_t index) {
    uint32_t d;
#if defined(__CUDA_ARCH__)
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(bytes.x), "r"(bytes.y), "r"(index));
#else
    d = __byte_perm(bytes.x, bytes.y, index);
#endif
    return d;
}

// Eight E2M1 codes -> eight E4M3 codes (columns 0..3 and 4..7 of the word): the magnitude by look-up, then the signs, which
// the word's layout holds in place, four at a time.
__device__ __forceinline__ void expand_word(uint32_t word, uint2 magnitudes, uint32_t& low, uint32_t& high) {
    const uint32_t index = word & 0x77777777u;
    low = look_up(magnitudes, index) | (word << 4 & 0x80808080u);
    high = look_up(magnitudes, index >> 16) | (word & 0x80808080u);
}

// What row l / 4 + 8 r of the fragments of a step is expanded from.
struct RawWeights {
    uint4 codes;
    uint2 magnitudes;
};

// a[j][r] K bytes 4t.. of wgmma j, a[j][2 + r] K bytes 16 + 4t..
__device__ __forceinline__ void expand_row(const RawWeights& raw, int r, uint32_t (&a)[4][4]) {
    expand_word(raw.codes.x, raw.magnitudes, a[0][r], a[0][2 + r]);
    expand_word(raw.codes.y, raw.magnitudes, a[1][r], a[1][2 + r]);
    expand_word(raw.codes.z, raw.magnitudes, a[2][r], a[2][2 + r]);
    expand_word(raw.codes.w, raw.magnitudes, a[3][r], a[3][2 + r]);
}

// -- product ------------------------------------------------------------------------------------------------------------

// ld.shared by address: of a register, a uniform register and a constant, without an instruction to add them
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Shared-memory addresses of a thread in stage 0: its first row of the weights, the barriers (empty: of block lane % 2); and the
// low word of the rows' descriptor, which holds the address
struct Lane {
    uint32_t codes, shifts, full, empty, descriptor;
    __device__ __forceinline__ Lane(const SharedStorage& shared, int consumer_thread) {
        const uint32_t base = ptx::smem_address(shared.ring);
        const int place = (consumer_thread / 32 * 16 + consumer_thread % 32 / 4) * 4 + consumer_thread % 4;
        codes = opaque(base + static_cast<uint32_t>(offsetof(Stage, codes)) + place * 16);
        shifts = opaque(base + static_cast<uint32_t>(offsetof(Stage, shifts)) + place);
        descriptor = opaque(static_cast<uint32_t>(smem_descriptor_k128(base + static_cast<uint32_t>(sizeof(Stage)))));
        full = opaque(base + static_cast<uint32_t>(offsetof(Stage, full)));
        empty = ptx::map_to_rank(base + static_cast<uint32_t>(offsetof(Stage, empty)), consumer_thread % kCluster);
    }

    // Descriptor of the rows of the stage at `offset`, without the carry of a 64-bit addition
    __device__ __forceinline__ uint64_t rows(uint32_t offset) const {
        const auto high = static_cast<uint32_t>(smem_descriptor_k128(0) >> 32);
        uint64_t v;
        asm("mov.b64 %0, {%1, %2};" : "=l"(v) : "r"(descriptor + (offset >> 4)), "r"(high));
        return v;
    }
};

struct Consumer {
    SharedStorage& shared;
    const GroupedGemmSm90Params& p;
    int thread;               // of the warpgroup
    int group;                // 0 or 1
    int round = 0;            // of the tile
    uint32_t now, next;       // offsets of this step's stage and the next's
    Ring following;           // the stage after them
    uint32_t num_pieces = 0;  // handed over

    // Reads the thread number anew: what depends on it is computed again instead of kept in registers or spilled.
    __device__ __forceinline__ void reload_thread() {
        uint32_t number = threadIdx.x;
#if defined(__CUDA_ARCH__)
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
#endif
        thread = static_cast<int>(number % 128);
        group = static_cast<int>(number / 128) - 1;
    }

    // Row r of the weights of the stage at `offset`
    __device__ __forceinline__ RawWeights read_row(uint32_t offset, const Lane& lane, int r) const {
        RawWeights raw;
        const uint32_t shift = load_shared_byte(lane.shifts + offset + r * 8 * 4);
        raw.codes = ptx::load_shared_v4(lane.codes + offset + r * 8 * (kBlockK / 2));
        raw.magnitudes = *reinterpret_cast<const uint2*>(reinterpret_cast<const uint8_t*>(shared.magnitudes) + shift);
        return raw;
    }

    __device__ __forceinline__ void wait_following(const Lane& lane) const {
        ptx::mbarrier_wait(lane.full + following.offset, following.phase);
    }

    template <int kCut>
    __device__ __forceinline__ void advance() {
        now = next;
        next = following.offset;
        following.advance<kCut>();
    }

    // One chain of a step: multiply its rows with the fragments `a`; while the tensor cores do it, expand the next step's rows of
    // weights into `b`, all of them in the only chain, else one in each of the first two.
    template <int kWidth, int kChain>
    __device__ __forceinline__ void run_chain(bool never, const Lane& lane, uint64_t descriptor, uint32_t (&a)[4][4],
                                              uint32_t (&b)[4][4], RawWeights& raw, float (&part)[chain_rows(kWidth) / 2],
                                              float (&sums)[kWidth / 2]) {
        constexpr int kBegin = kChain * chain_rows(kWidth), kN = min_of(chain_rows(kWidth), kWidth - kBegin);
        constexpr bool kLast = kChain == chains_of(kWidth) - 1;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j)
            wgmma_e4m3_rs<kN>(part, a[j], advance_descriptor(descriptor, kBegin * kBlockK + 32 * j), j > 0 || never);
        wgmma_commit();
        if (!never) {  // always: the branch keeps ptxas from moving the expansion behind the wait
            if constexpr (kChain == 0 && kLast) {
                const RawWeights other = read_row(next, lane, 1);
                expand_row(raw, 0, b);
                expand_row(other, 1, b);
            } else if constexpr (kChain < 2) {
                expand_row(raw, kChain, b);
            }
            if constexpr (kChain < 2) {
#pragma unroll
                for (int j = 0; j < 4; ++j) fence_registers(b[j]);
            }
            if constexpr (kLast) {
                wait_following(lane);
                raw = read_row(following.offset, lane, 0);
            } else if constexpr (kChain == 0) {
                raw = read_row(next, lane, 1);
            }
        }
        if constexpr (kLast) __syncwarp();  // all lanes have read what they want of the stage
        wgmma_wait<0>();
        fence_registers(part);
        if (kLast && thread % 32 < kCluster) ptx::mbarrier_arrive_remote_read(lane.empty + now);  // done with the stage, in both blocks
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
            sums[kBegin / 2 + i] += part[i];
            // here: with additions put off until the next chain overwrites `part`, ptxas runs out of registers
            if constexpr (chains_of(kWidth) > 1) asm volatile("" : "+f"(sums[kBegin / 2 + i]));
        }
    }

    // One step. `raw` holds the next step's row 0 at the beginning and the one after the next's at the end.
    template <int kCut, int kWidth>
    __device__ __forceinline__ void run_step(bool never, const Lane& lane, uint32_t (&a)[4][4], uint32_t (&b)[4][4], RawWeights& raw,
                                             float (&part)[chain_rows(kWidth) / 2], float (&sums)[kWidth / 2]) {
        constexpr int kChains = chains_of(kWidth);
        const uint64_t descriptor = lane.rows(now);
        run_chain<kWidth, 0>(never, lane, descriptor, a, b, raw, part, sums);
        if constexpr (kChains > 1) run_chain<kWidth, 1>(never, lane, descriptor, a, b, raw, part, sums);
        if constexpr (kChains > 2) run_chain<kWidth, 2>(never, lane, descriptor, a, b, raw, part, sums);
        if constexpr (kChains > 3) run_chain<kWidth, 3>(never, lane, descriptor, a, b, raw, part, sums);
        advance<kCut>();
    }

    // The fragments of the first step of a cut, and what row 0 of the second's are expanded from
    template <int kCut>
    __device__ __forceinline__ void begin(uint32_t (&a)[4][4], RawWeights& raw) {
        const Lane lane(shared, group * 128 + thread);
        now = 0;
        next = stage_bytes(kCut);
        following = Ring();
        wait_following(lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) expand_row(read_row(now, lane, r), r, a);
        following.advance<kCut>();
        wait_following(lane);
        raw = read_row(next, lane, 0);
        following.advance<kCut>();
    }

    // Sums of a tile's kWidth rows -> bf16 -> scaled -> [row][64 columns] in shared memory, for copy_out
    template <int kWidth>
    __device__ __forceinline__ void hand_over(const TileInfo& info, const float* sums) {
        const int warp = thread / 32, lane = thread % 32;
        const uint16_t* columns = info.columns + group * 64 + warp * 16 + lane / 4;  // of this thread: this one and 8 on
        const uint32_t factors[2] = {columns[0] * 0x10001u, columns[8] * 0x10001u};
        const uint32_t first_piece = ptx::smem_address(&shared.pieces[group][0]);
        const uint32_t first_barriers = ptx::smem_address(&shared.piece_barriers[group][0]);
        const uint32_t place = ((lane / 16) * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
        for (int first = 0; first < kWidth; first += kPieceRows, ++num_pieces) {
            const uint32_t piece = first_piece + num_pieces % kPieces * sizeof(Piece);
            const uint32_t barriers = first_barriers + num_pieces % kPieces * sizeof(PieceBarriers);
            uint32_t scales[kPieceRows / 8];  // of two rows each
#pragma unroll
            for (int n = 0; n < kPieceRows / 8; ++n)
                if (first + n * 8 < kWidth)
                    scales[n] = *reinterpret_cast<const uint32_t*>(info.rows + first + n * 8 + lane % 4 * 2);
            ptx::mbarrier_wait(barriers + static_cast<uint32_t>(offsetof(PieceBarriers, empty)), num_pieces / kPieces & 1 ^ 1);
#pragma unroll
            for (int n = 0; n < kPieceRows / 8; n += 2)  // matrices: columns 0..7 and 8..15 of rows 8n.., then of rows 8n + 8..
                if (first + n * 8 < kWidth) {
                    uint32_t v[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (first + n * 8 + i / 2 * 8 >= kWidth) {  // past the tile: nobody reads it
                            v[i] = v[0];
                            continue;
                        }
                        const float* pair = sums + first / 2 + 4 * n + 2 * i;
                        v[i] = bf16x2_product(bf16x2_product(ptx::pack_bf16x2(pair[0], pair[1]), factors[i % 2]), scales[n + i / 2]);
                    }
                    ptx::stmatrix_x4_trans(piece + place + n * 8 * 128, v[0], v[1], v[2], v[3]);
                }
            ptx::mbarrier_arrive(barriers + static_cast<uint32_t>(offsetof(PieceBarriers, full)));
        }
    }

    // One tile of kWidth rows
    template <int kCut, int kWidth>
    __device__ __forceinline__ void run_tile(const TileInfo& info, uint32_t (&a)[4][4], RawWeights& raw) {
        const int num_steps = steps_of(p);
        // the first product of a chain must not see a constant: ptxas would add a fence (wgmma_sm90.cuh)
        const bool never = p.num_out < 0;
        float sums[kWidth / 2], part[chain_rows(kWidth) / 2];
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sums[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < chain_rows(kWidth) / 2; ++i) part[i] = 0.0f;
        reload_thread();
        const Lane lane(shared, group * 128 + thread);
        for (int step = 0; step < num_steps; step += 2) {
            uint32_t b[4][4];
            run_step<kCut, kWidth>(never, lane, a, b, raw, part, sums);
            run_step<kCut, kWidth>(never, lane, b, a, raw, part, sums);
        }
        reload_thread();
        hand_over<kWidth>(info, sums);
    }

    // One tile of a width of the cut, kWidth or less
    template <int kCut, int kWidth>
    __device__ __forceinline__ void run_width(const TileInfo& info, int width, uint32_t (&a)[4][4], RawWeights& raw) {
        if constexpr (kWidth > least_width(kCut)) {
            if (width < kWidth) return run_width<kCut, width_below(kWidth)>(info, width, a, raw);
        }
        run_tile<kCut, kWidth>(info, a, raw);
    }

    // The information of this round's tile
    __device__ __forceinline__ TileInfo& wait_info() const {
        TileInfo& info = shared.info[round % kInfos];
        ptx::mbarrier_wait(ptx::smem_address(&info.ready), round / kInfos & 1);
        return info;
    }

    // The tiles of one cut from this round on; whether there are others
    template <int kCut>
    __device__ __forceinline__ bool run_cut() {
        uint32_t a[4][4];
        RawWeights raw;
        begin<kCut>(a, raw);
        for (;;) {
            TileInfo& info = wait_info();
            run_width<kCut, most_rows(kCut)>(info, info.work.width, a, raw);
            const bool has_next = info.work.has_next;
            ptx::mbarrier_arrive(ptx::smem_address(&info.free));
            ++round;
            if (!has_next) return false;
            if (wait_info().work.cut != kCut) return true;
        }
    }
};

__device__ __forceinline__ void consume(SharedStorage& shared, const GroupedGemmSm90Params& p) {
    Consumer consumer{shared, p, static_cast<int>(threadIdx.x) % 128, static_cast<int>(threadIdx.x) / 128 - 1};
    bool more = dealt(0) < shared.num_tiles;
    for (uint32_t cuts = 0; more; ++cuts) {
        if (cuts > 0) ptx::mbarrier_wait(ptx::smem_address(&shared.laid_out), cuts - 1 & 1);
        static_assert(kCuts == 6);
        switch (consumer.wait_info().work.cut) {
            case 0: more = consumer.run_cut<0>(); break;
            case 1: more = consumer.run_cut<1>(); break;
            case 2: more = consumer.run_cut<2>(); break;
            case 3: more = consumer.run_cut<3>(); break;
            case 4: more = consumer.run_cut<4>(); break;
            default: more = consumer.run_cut<5>(); break;
        }
    }
}

// The eight magnitudes of E2M1 times 2^(6 - d) as E4M3 bytes; 15 and above: zeros.
__device__ uint2 magnitude_bytes(int d) {
    uint32_t words[2] = {0, 0};
    for (int i = 0; i < 8; ++i) {
        const float value = d < 15 ? e2m1_decode(static_cast<uint8_t>(i)) * bits_float((127u + 6u - d) << 23) : 0.0f;
        words[i / 4] |= static_cast<uint32_t>(e4m3_encode(value)) << (8 * (i % 4));
    }
    return make_uint2(words[0], words[1]);
}

__global__ void __launch_bounds__(kThreads, 1) grouped_gemm_sm90_kernel(const __grid_constant__ GroupedGemmSm90Params params,
                                                                        const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) uint8_t smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);
    const int thread = static_cast<int>(threadIdx.x);
    const int rank = static_cast<int>(ptx::cluster_rank());
    if (thread == 0) {
        ptx::prefetch_tensor_map(&maps.codes);
        ptx::prefetch_tensor_map(&maps.shifts);
        ptx::mbarrier_init(ptx::smem_address(&shared.laid_out), kCluster);
        for (TileInfo& info : shared.info) {
            ptx::mbarrier_init(ptx::smem_address(&info.ready), 32);
            ptx::mbarrier_init(ptx::smem_address(&info.free), (128 + 32) * kConsumers + 1);
        }
        for (PieceBarriers& piece : reinterpret_cast<PieceBarriers(&)[kConsumers * kPieces]>(shared.piece_barriers)) {
            ptx::mbarrier_init(ptx::smem_address(&piece.full), 128);
            ptx::mbarrier_init(ptx::smem_address(&piece.empty), 32);
        }
        ptx::fence_mbarrier_init();
    }
    if (thread >= 32 && thread < 48) shared.magnitudes[thread - 32] = magnitude_bytes(thread - 32);
    Scheduler::build(shared.tiles, params.offsets, params.num_experts);
    const int num_tiles = Scheduler::num_tiles(shared.tiles, params.num_experts, params.num_out);
    if (thread == 0) shared.num_tiles = num_tiles;
    if (thread < 32 && dealt(0) < num_tiles) {
        const Work first = find_work(shared, params, 0, num_tiles, rank);
        if (thread == 0) shared.first = first;
        if (thread == 0) ptx::prefetch_tensor_map(map_of_rows(maps, first, rank));
        lay_out(shared, first.cut);
    }
    ptx::cluster_arrive();  // both blocks' barriers exist before anyone signals them
    ptx::cluster_wait();

    if (thread < 128) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        if (thread < 32) Producer{shared, params, maps, steps_of(params), rank, ptx::elect_one()}.run();
        if (thread >= 32 && thread < 64) describe(shared, params, maps, num_tiles, rank);
        if (thread >= 64) copy_out(shared, params, thread / 32 - 2);
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        consume(shared, params);
    }
    ptx::cluster_arrive();  // the other block may still write into this one's shared memory
    ptx::cluster_wait();
}

}  // namespace

void launch_grouped_gemm_sm90(const GroupedGemmSm90Params& params) {
    const char* op = "moe.grouped_gemm_sm90";
    if (params.num_rows == 0 || params.num_experts == 0 || params.num_out == 0) return;
    int device = 0, num_sms = 0;
    check_cuda(op, cudaGetDevice(&device));
    check_cuda(op, cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const auto padded = static_cast<uint64_t>(align_up(params.k, kBlockK));
    Maps maps;
    for (int i = 0; i < kNumBoxes; ++i)
        maps.rows[i] = make_tensor_map({"moe.grouped_gemm_sm90: folded", TmaType::kUint8, params.folded, 2,
                                        {padded, static_cast<uint64_t>(params.num_rows)}, {padded},
                                        {kBlockK, static_cast<uint32_t>((i + 1) * kRowStep)}});
    const auto row_bytes = static_cast<uint64_t>(params.k / 2);
    maps.codes = make_tensor_map({"moe.grouped_gemm_sm90: words", TmaType::kUint8, params.words, 2,
                                  {row_bytes, static_cast<uint64_t>(params.num_experts) * static_cast<uint64_t>(params.num_out)},
                                  {row_bytes}, {kBlockK / 2, kColumns}, CU_TENSOR_MAP_SWIZZLE_NONE,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
    const auto num_out = static_cast<uint64_t>(params.num_out);
    maps.shifts = make_tensor_map({"moe.grouped_gemm_sm90: shifts", TmaType::kInt32, params.shifts, 2,
                                   {num_out, static_cast<uint64_t>(params.num_experts) * (padded / kBlockK)}, {4 * num_out},
                                   {kColumns, 1}, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
    const int64_t most_tiles =
        min_of<int64_t>(params.num_rows, ceil_div<int64_t>(params.num_rows, kMaxRows) + params.num_experts) *
        ceil_div(params.num_out, kCluster * kColumns);
    const auto clusters = static_cast<unsigned>(min_of<int64_t>(most_tiles, num_sms / kCluster));
    launch(op, grouped_gemm_sm90_kernel,
           {dim3(clusters * kCluster), dim3(kThreads), sizeof(SharedStorage), params.stream, kCluster}, params, maps);
}

}  // namespace mdi::moe
