// Sparse attention over packed KV rows, portable version (mma.sync, cp.async, ldmatrix). Model spec 4.5 and 4.6.
//
//   s_j = (q . k_j) * scale;  m = running max of the valid s_j;  p_j = exp(s_j - m);  l = sum p_j
//   o = (sum_j bf16(p_j) * v_j) / (l + exp(sink - m));  K = V, one row for all heads
//
// One block of 8 warps per token and 64 heads: heads are the M side of the MMA (missing heads are zero rows). The slots
// of a token are its W window lanes, then its K compressed lanes, in steps of 64. Per step:
//   1. the packed rows, fetched by cp.async during the step before, are expanded to bf16 (four lanes of a warp a row);
//   2. the next step's rows start their way to the staging buffer;
//   3. S = Q K^T: warp (wm, wn) makes heads 32*wm..+32 x slots 16*wn..+16; the row max is shared through memory;
//   4. P, rounded to bf16, goes through memory; O += P V: the same warp owns heads 32*wm..+32 x dims 128*wn..+128.
// The running sum l takes the unrounded p; each warp keeps the part of its own slots until the end.
//
// Shared memory: Q 64 KiB, K 64 KiB, packed rows 33 KiB, P 8 KiB, row numbers and maxima 1.5 KiB = 170.5 KiB.
// Q, K and P rows are split into 16-byte chunks; chunk c of row r lies at c ^ (r & 7), so ldmatrix (8 rows, one chunk), its
// transposed form and the 16-byte stores are free of bank conflicts. Q, K and O are in the order and scale of row_codec.cuh.
//
// A lane that is negative, at or past compressed_len, or outside the pool is never read through: its row is zeros and
// its score -inf. A token without a valid lane gives 0. Results depend on nothing but the token itself.
// Limits: D = 512, H <= 128. E4M3 conversion needs sm_89 or later.
// SASS: HMMA
#include <cuda_bf16.h>

#include "attention/attention.h"
#include "attention/row_codec.cuh"
#include "common/launch.h"
#include "common/ptx_sm80.cuh"

namespace mdi::attention {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kHeads = 64;        // heads per block (M)
constexpr int kSlots = 64;        // slots per step (the softmax block of the spec)
constexpr int kThreads = 256;
constexpr int kRowChunks = kHeadDim / kChunkElems;  // 64 chunks of 16 bytes in a bf16 row
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kHeadsPerWarp = 32;
constexpr int kSlotGroups = 4;                             // warps along the slots (S) and along the dims (O)
constexpr int kSlotsPerWarp = kSlots / kSlotGroups;        // 16
constexpr int kDimsPerWarp = kHeadDim / kSlotGroups;       // 128
constexpr int kDimTiles = kDimsPerWarp / 8;                // 16
constexpr int kStagingStride = kWindowRowBytes;            // both row kinds fit
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMaxStart = -1e30f;                        // finite: a masked step must not make NaN

struct SharedStorage {
    uint8_t q[kHeads * kRowBytes];
    uint8_t k[kSlots * kRowBytes];
    uint8_t packed[kSlots * kStagingStride];
    uint8_t p[kHeads * kSlots * 2];
    int32_t rows[2][kSlots];              // pool row of each slot, -1 = skipped; two steps in flight
    float part[kSlotGroups][kHeads];      // row maxima, at the end row sums, by slot group
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
static_assert(kWindowRowBytes % 16 == 0 && kCompressedRowBytes % 16 == 0);

// exp(x) = 2^(x log2 e): 0 at -inf and 1 at 0, else within 2 ulp and half an ulp of the exponent
MDI_DEVICE float exp_of(float x) { return ptx::exp2_approx(x * kLog2e); }
MDI_DEVICE int swizzled(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

// Where a token's slots point. Row number of slot `slot`, or -1 where nothing may be read.
struct SlotReader {
    const int32_t* window_idx;
    const int32_t* compressed_idx;
    int num_window, num_compressed, num_window_rows, num_compressed_rows;

    __device__ SlotReader(const SparseParams& params, int token_idx)
        : window_idx(params.window_idx + static_cast<int64_t>(token_idx) * params.num_window),
          compressed_idx(params.compressed_idx + static_cast<int64_t>(token_idx) * params.num_picks),
          num_window(params.num_window),
          num_compressed(params.num_picks),
          num_window_rows(params.num_window_rows),
          num_compressed_rows(params.num_compressed_rows) {
        if (params.compressed_len != nullptr) {
            num_compressed = min(num_compressed, max(params.compressed_len[token_idx], 0));
        }
    }
    __device__ int num_slots() const { return num_window + num_compressed; }
    __device__ bool is_window(int slot) const { return slot < num_window; }
    __device__ int row(int slot) const {
        int idx = -1, limit = 0;
        if (slot < num_window) {
            idx = window_idx[slot];
            limit = num_window_rows;
        } else if (slot - num_window < num_compressed) {
            idx = compressed_idx[slot - num_window];
            limit = num_compressed_rows;
        }
        return static_cast<uint32_t>(idx) < static_cast<uint32_t>(limit) ? idx : -1;
    }
};

// Starts the copy of one step's packed rows: four neighbouring threads fetch one row.
MDI_DEVICE void gather_rows(const SparseParams& params, const SlotReader& slots, int first_slot, int row,
                                            uint32_t s_packed) {
    const int slot_in_step = threadIdx.x / 4, part = threadIdx.x % 4;
    if (row < 0) return;
    const bool window = slots.is_window(first_slot + slot_in_step);
    const int row_bytes = window ? kWindowRowBytes : kCompressedRowBytes;
    const uint8_t* from = (window ? params.window : params.compressed) + static_cast<int64_t>(row) * row_bytes;
    const uint32_t to = s_packed + slot_in_step * kStagingStride;
    for (int offset = part * 16; offset < row_bytes; offset += 64) ptx::cp_async_16(to + offset, from + offset);
}

// Staged bytes -> swizzled bf16 rows. A warp takes eight rows, a lane a quarter of one (128 columns): eight neighbouring lanes
// have eight rows, so neither the 16-byte loads (rows 33 chunks apart) nor the 16-byte stores (swizzled) conflict.
MDI_DEVICE void expand_rows(SharedStorage& shared, const SlotReader& slots, int first_slot, const int32_t* rows) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 8 + lane % 8, part = lane / 8;
    const uint8_t* packed = shared.packed + row * kStagingStride;
    const bool valid = rows[row] >= 0;
    const auto store = [&](int i, const uint4& v) { *reinterpret_cast<uint4*>(shared.k + swizzled(row, part * 16 + i)) = v; };
    if (valid && slots.is_window(first_slot + row)) {
        const uint4* codes = reinterpret_cast<const uint4*>(packed + part * 128);
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(packed + kHeadDim + part * 4);
#pragma unroll 2
        for (int i = 0; i < 8; ++i) {
            const uint4 c = codes[i];
            const uint32_t factor = fp8_factor(scales >> (8 * (i / 2)) & 0xffu);
            store(2 * i, expand_fp8(c.x, c.y, factor));
            store(2 * i + 1, expand_fp8(c.z, c.w, factor));
        }
    } else {
        const uint4* codes = reinterpret_cast<const uint4*>(packed + part * 64);
        uint2 scales = *reinterpret_cast<const uint2*>(packed + kHeadDim / 2 + part * 8);
        if (!valid) scales = make_uint2(0, 0);  // whatever FP4 codes are left in the buffer: zeros
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 c = codes[i];
            uint32_t factor[2];
            fp4_factors((i < 2 ? scales.x : scales.y) >> (16 * (i % 2)), factor);
            store(4 * i, expand_fp4(c.x, factor[0]));
            store(4 * i + 1, expand_fp4(c.y, factor[0]));
            store(4 * i + 2, expand_fp4(c.z, factor[1]));
            store(4 * i + 3, expand_fp4(c.w, factor[1]));
        }
    }
}

// Fragment coordinates of a thread, and the swizzled offsets of its ldmatrix rows.
struct Lane {
    int heads, slots, dims;    // first head, slot and dim of the warp
    int group, quad;           // fragment row (lane / 4) and column pair (lane % 4)
    // ldmatrix: lane -> matrix row in 0..15, and which of two neighbouring chunks
    int a_row, a_chunk;        // A, and transposed B: rows 0-7 | 8-15, then the second chunk
    int b_row, b_chunk;        // B: chunk 0 | 1, then rows 8-15

    __device__ Lane() {
        const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32;
        heads = (warp_idx % 2) * kHeadsPerWarp;
        slots = (warp_idx / 2) * kSlotsPerWarp;
        dims = (warp_idx / 2) * kDimsPerWarp;
        group = lane / 4;
        quad = lane % 4;
        a_row = lane % 16;
        a_chunk = lane / 16;
        b_row = lane % 8 + (lane / 16) * 8;
        b_chunk = (lane / 8) % 2;
    }
};

// S[2 x 16 heads][2 x 8 slots] = Q K^T over the 512 dims.
MDI_DEVICE void scores(float (&s)[2][2][4], uint32_t s_q, uint32_t s_k, const Lane& lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
    const uint32_t q_base = s_q + (lane.heads + lane.a_row) * kRowBytes;
    const uint32_t k_base = s_k + (lane.slots + lane.b_row) * kRowBytes;
    // all these rows have row & 7 == lane & 7, because the warp's and fragments' first rows are multiples of 8
    const int q_xor = lane.a_row & 7, k_xor = lane.b_row & 7;
#pragma unroll 2
    for (int outer = 0; outer < kRowChunks / 8; ++outer) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t a[2][4], b[4];
            const uint32_t q_address = q_base + outer * 128 + (((2 * i + lane.a_chunk) ^ q_xor) << 4);
            ptx::ldmatrix_x4(a[0], q_address);
            ptx::ldmatrix_x4(a[1], q_address + 16 * kRowBytes);
            ptx::ldmatrix_x4(b, k_base + outer * 128 + (((2 * i + lane.b_chunk) ^ k_xor) << 4));
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                ptx::mma_bf16_m16n8k16(s[m][0], a[m], b[0], b[1]);
                ptx::mma_bf16_m16n8k16(s[m][1], a[m], b[2], b[3]);
            }
        }
    }
}

// O[2 x 16 heads][16 x 8 dims] += P V over the 64 slots.
MDI_DEVICE void accumulate(float (&o)[2][kDimTiles][4], uint32_t s_p, uint32_t s_k, const Lane& lane) {
    const int x = lane.a_row & 7;
#pragma unroll
    for (int step = 0; step < kSlots / 16; ++step) {
        uint32_t a[2][4];
        const uint32_t p_address =
            s_p + (lane.heads + lane.a_row) * (kSlots * 2) + (((2 * step + lane.a_chunk) ^ x) << 4);
        ptx::ldmatrix_x4(a[0], p_address);
        ptx::ldmatrix_x4(a[1], p_address + 16 * kSlots * 2);
        const uint32_t v_base = s_k + (16 * step + lane.a_row) * kRowBytes + lane.dims * 2;
#pragma unroll
        for (int n = 0; n < kDimTiles / 2; ++n) {
            uint32_t b[4];  // slots 0-7 and 8-15 of dim tile 2n, then of 2n + 1
            ptx::ldmatrix_x4_trans(b, v_base + (n / 4) * 128 + (((2 * (n % 4) + lane.a_chunk) ^ x) << 4));
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                ptx::mma_bf16_m16n8k16(o[m][2 * n], a[m], b[0], b[1]);
                ptx::mma_bf16_m16n8k16(o[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Scaled and masked scores in place; returns through `row_max` the maxima of this warp's slots, equal in a quad.
// Fragment row f = 2 * m + half is head heads + 16 * m + 8 * half + group.
MDI_DEVICE void mask_and_max(float (&s)[2][2][4], float (&row_max)[4], const int32_t* rows, float scale,
                                             const Lane& lane) {
#pragma unroll
    for (int f = 0; f < 4; ++f) row_max[f] = kMaxStart;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int2 row = *reinterpret_cast<const int2*>(rows + lane.slots + 8 * j + 2 * lane.quad);
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            float& s0 = s[f / 2][j][2 * (f % 2)];
            float& s1 = s[f / 2][j][2 * (f % 2) + 1];
            s0 = row.x >= 0 ? s0 * scale : -INFINITY;
            s1 = row.y >= 0 ? s1 * scale : -INFINITY;
            row_max[f] = fmaxf(row_max[f], fmaxf(s0, s1));
        }
    }
#pragma unroll
    for (int f = 0; f < 4; ++f) {
        row_max[f] = fmaxf(row_max[f], __shfl_xor_sync(~0u, row_max[f], 1));
        row_max[f] = fmaxf(row_max[f], __shfl_xor_sync(~0u, row_max[f], 2));
    }
}

// p = exp(s - m), added unrounded to the partial sums and stored rounded for the PV product.
MDI_DEVICE void probabilities(const float (&s)[2][2][4], const float (&m)[4], float (&sum)[4],
                                              uint8_t* s_p, const Lane& lane) {
#pragma unroll
    for (int f = 0; f < 4; ++f) {
        const int head = lane.heads + 16 * (f / 2) + 8 * (f % 2) + lane.group;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float p0 = exp_of(s[f / 2][j][2 * (f % 2)] - m[f]);
            const float p1 = exp_of(s[f / 2][j][2 * (f % 2) + 1] - m[f]);
            sum[f] += p0 + p1;
            const int chunk = lane.slots / 8 + j;
            uint8_t* to = s_p + head * (kSlots * 2) + ((chunk ^ (head & 7)) << 4) + 4 * lane.quad;
            *reinterpret_cast<uint32_t*>(to) = ptx::pack_bf16x2(p0, p1);
        }
    }
}

__global__ void __launch_bounds__(kThreads, 1) sparse_kernel(const SparseParams params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const uint32_t s_q = ptx::smem_address(shared.q), s_k = ptx::smem_address(shared.k), s_p = ptx::smem_address(shared.p);
    const uint32_t s_packed = ptx::smem_address(shared.packed);
    const int token_idx = blockIdx.x, first_head = blockIdx.y * kHeads;
    const int num_heads = min(kHeads, params.num_heads - first_head);
    const Lane lane;
    const SlotReader slots(params, token_idx);
    const int num_steps = (slots.num_slots() + kSlots - 1) / kSlots;

    const bf16* q = params.q + token_idx * params.q_stride_token + static_cast<int64_t>(first_head) * kHeadDim;
    for (int i = threadIdx.x; i < kHeads * kRowChunks; i += kThreads) {
        const int head = i / kRowChunks, chunk = i % kRowChunks;
        const int offset = swizzled(head, chunk);
        if (head < num_heads) {
            ptx::cp_async_16(s_q + offset, q + head * kHeadDim + chunk * kChunkElems);
        } else {
            *reinterpret_cast<uint4*>(shared.q + offset) = make_uint4(0, 0, 0, 0);
        }
    }

    // Q in key order: every thread permutes the chunks it copied. The first step's barrier publishes them.
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    for (int i = threadIdx.x; i < num_heads * kRowChunks; i += kThreads) {
        uint4* chunk = reinterpret_cast<uint4*>(shared.q + swizzled(i / kRowChunks, i % kRowChunks));
        *chunk = to_key_order(*chunk);
    }

    // Thread i looks after slot i / 4 of a step; its row number is read one step before the gather that needs it.
    const int my_slot = threadIdx.x / 4;
    int row = slots.row(my_slot), next_row = slots.row(kSlots + my_slot);
    if (threadIdx.x % 4 == 0) shared.rows[0][my_slot] = row;
    gather_rows(params, slots, 0, row, s_packed);
    ptx::cp_async_commit();

    float o[2][kDimTiles][4] = {};
    float m[4] = {kMaxStart, kMaxStart, kMaxStart, kMaxStart};
    float sum[4] = {};
    int any_valid = 0;

    for (int step = 0; step < num_steps; ++step) {
        const int32_t* rows = shared.rows[step % 2];
        ptx::cp_async_wait<0>();
        any_valid |= __syncthreads_or(row >= 0);  // staged rows are visible; the last step's reads of K and P are over
        expand_rows(shared, slots, step * kSlots, rows);
        __syncthreads();  // K is complete, the staging buffer is free
        row = next_row;
        if (threadIdx.x % 4 == 0) shared.rows[(step + 1) % 2][my_slot] = row;
        gather_rows(params, slots, (step + 1) * kSlots, row, s_packed);
        ptx::cp_async_commit();
        next_row = slots.row((step + 2) * kSlots + my_slot);

        float s[2][2][4], new_max[4];
        scores(s, s_q, s_k, lane);
        mask_and_max(s, new_max, rows, params.softmax_scale * kKeyFactor, lane);
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            const int head = lane.heads + 16 * (f / 2) + 8 * (f % 2) + lane.group;
            if (lane.quad == 0) shared.part[lane.slots / kSlotsPerWarp][head] = new_max[f];
        }
        __syncthreads();
        float alpha[4];
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            const int head = lane.heads + 16 * (f / 2) + 8 * (f % 2) + lane.group;
            float top = m[f];
#pragma unroll
            for (int i = 0; i < kSlotGroups; ++i) top = fmaxf(top, shared.part[i][head]);
            alpha[f] = exp_of(m[f] - top);
            m[f] = top;
            sum[f] *= alpha[f];
        }
        probabilities(s, m, sum, shared.p, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[i][n][e] *= alpha[2 * i + e / 2];
        __syncthreads();  // P is complete; every warp has read the maxima
        accumulate(o, s_p, s_k, lane);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // Q, K, P and the maxima are free

    // Row sums of the four slot groups, in a fixed order; then o / (l + exp(sink - m)).
#pragma unroll
    for (int f = 0; f < 4; ++f) {
        const int head = lane.heads + 16 * (f / 2) + 8 * (f % 2) + lane.group;
        sum[f] += __shfl_xor_sync(~0u, sum[f], 1);
        sum[f] += __shfl_xor_sync(~0u, sum[f], 2);
        if (lane.quad == 0) shared.part[lane.slots / kSlotsPerWarp][head] = sum[f];
    }
    __syncthreads();
#pragma unroll
    for (int f = 0; f < 4; ++f) {
        const int head = lane.heads + 16 * (f / 2) + 8 * (f % 2) + lane.group;
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < kSlotGroups; ++i) total += shared.part[i][head];
        const float sink = head < num_heads ? params.sink[first_head + head] - m[f] : 0.f;
        total += expf(sink > 88.f ? 88.f : sink);  // finite; a NaN sink stays NaN
        const float inverse = kKeyFactor / total;
        // Output rows pass through the Q buffer, for 16-byte stores below.
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            const float* value = &o[f / 2][n][2 * (f % 2)];
            const uint32_t pair = any_valid ? ptx::pack_bf16x2(value[0] * inverse, value[1] * inverse) : 0u;
            *reinterpret_cast<uint32_t*>(shared.q + swizzled(head, lane.dims / kChunkElems + n) + 4 * lane.quad) = pair;
        }
    }
    __syncthreads();
    bf16* out = params.out + (static_cast<int64_t>(token_idx) * params.num_heads + first_head) * kHeadDim;
    for (int i = threadIdx.x; i < num_heads * kRowChunks; i += kThreads) {
        const int head = i / kRowChunks, chunk = i % kRowChunks;
        *reinterpret_cast<uint4*>(out + head * kHeadDim + chunk * kChunkElems) =
            from_key_order(*reinterpret_cast<const uint4*>(shared.q + swizzled(head, chunk)));
    }
}

}  // namespace

void launch_sparse(const SparseParams& params) {
    const dim3 grid(params.num_tokens, (params.num_heads + kHeads - 1) / kHeads);
    launch("attention.sparse", sparse_kernel, {grid, dim3(kThreads), sizeof(SharedStorage), params.stream}, params);
}

}  // namespace mdi::attention
