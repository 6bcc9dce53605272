// Sum of a token's expert rows, then the shared expert, then one rounding (model spec 6.2):
//     out[t] = round( ( sum over slots j ascending with row_of_slot[t, j] >= 0 of f32(y[row_of_slot[t, j]]) ) + f32(shared[t]) )
// Slots of other ranks are -1: their rows are never read, whatever the buffer holds. fp32 adds in slot order, so the
// result is the same bits in every run. A token without a local slot gets shared[t], or 0.
// With the other ranks' sums of these tokens (combine_parts) this rank's own sum is rounded to bf16 as theirs were and all are added
// in rank order before the shared expert: the bits of a pass that writes the own sum and one that reads it again, without either.
//
// A block walks over tokens (gridDim.x) for up to 5,120 columns (gridDim.y). A thread takes two chunks of 8 columns and copies
// the rows of the block's tokens, one after the other whatever token they belong to, into a ring of kStages rows in shared
// memory, kStages - 1 of them always on their way; it reads only what it copied, so nobody waits for anybody. The slots of a token
// sit in the lanes of every warp, those of the block's next token are on their way too. Memory-bound.
// Shared memory: (kStages + 1) x 32 bytes a thread, four blocks of 50 KiB on a multiprocessor. Limits: N a multiple of 8, k <= 32.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

constexpr int kColumns = 8;
constexpr int kMaxThreads = 320;
constexpr int kChunks = 2;  // of a thread
constexpr int kStages = 4;  // rows of the ring
constexpr int kBlocksPerSm = 4;
constexpr int kVectorBytes = 16;

__device__ __forceinline__ void add_row(float (&sum)[kColumns], uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += bits_float(words[i] << 16);
        sum[2 * i + 1] += bits_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint4 rounded(const float (&sum)[kColumns]) {
    return make_uint4(ptx::pack_bf16x2(sum[0], sum[1]), ptx::pack_bf16x2(sum[2], sum[3]), ptx::pack_bf16x2(sum[4], sum[5]),
                      ptx::pack_bf16x2(sum[6], sum[7]));
}

template <bool kFloatOut>
__device__ __forceinline__ void store(const CombineParams& p, int64_t offset, const float (&sum)[kColumns]) {
    if constexpr (kFloatOut) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(p.out) + offset);
        out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + offset) = rounded(sum);
    }
}

// A block's tokens in turn. Slots a lane each: the row in y or -1, of the token and of the next one.
struct Walk {
    int token, mine, next;

    __device__ __forceinline__ static int slot(const CombineParams& p, int token, int lane) {
        return token < p.num_tokens && lane < p.k ? p.row_of_slot[static_cast<int64_t>(token) * p.k + lane] : -1;
    }
    __device__ __forceinline__ Walk(const CombineParams& p, int lane)
        : token(static_cast<int>(blockIdx.x)), mine(slot(p, token, lane)), next(slot(p, token + static_cast<int>(gridDim.x), lane)) {}
    __device__ __forceinline__ void advance(const CombineParams& p, int lane) {
        token += static_cast<int>(gridDim.x);
        mine = next;
        next = slot(p, token + static_cast<int>(gridDim.x), lane);
    }
    __device__ __forceinline__ uint32_t live() const { return __ballot_sync(kFullWarp, mine >= 0); }
};

template <bool kFloatOut, bool kParts>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerSm) combine_kernel(const __grid_constant__ CombineParams params) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int step = static_cast<int>(blockDim.x);
    const int first = static_cast<int>(blockIdx.y) * kChunks * step + static_cast<int>(threadIdx.x);
    const int num_tokens = static_cast<int>(params.num_tokens);
    const int num_extra = params.num_parts + (params.shared ? 1 : 0);  // rows of a token behind its slots
    char* ring = dynamic_smem() + threadIdx.x * kVectorBytes;  // vector c of a row is c * step further, a row kChunks * step
    bool valid[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) valid[c] = first + c * step < params.hidden / kColumns;

    Walk ahead(params, lane), here(params, lane);
    uint32_t left = ahead.live();  // of the token that is copied: slots and rows behind them that are still to come
    int extra = 0;
    const auto copy_next_row = [&](int stage) {
        while (left == 0 && extra == num_extra && ahead.token < num_tokens) {
            ahead.advance(params, lane);
            left = ahead.live();
            extra = 0;
        }
        if (ahead.token < num_tokens) {
            const uint16_t* source;
            if (left != 0) {
                const int64_t row = __shfl_sync(kFullWarp, ahead.mine, __ffs(static_cast<int>(left)) - 1);
                left &= left - 1;
                source = params.y + row * params.hidden;
            } else {
                const bool is_part = extra < params.num_parts;
                const int64_t row = is_part ? extra * params.num_tokens + ahead.token : ahead.token;
                source = (is_part ? params.parts : params.shared) + row * params.hidden;
                ++extra;
            }
            const uint32_t target = ptx::smem_address(ring + stage * kChunks * step * kVectorBytes);
#pragma unroll
            for (int c = 0; c < kChunks; ++c)
                if (valid[c]) ptx::cp_async_16(target + c * step * kVectorBytes, source + (first + c * step) * kColumns);
        }
        ptx::cp_async_commit();
    };
    int stage = 0;
    float sum[kChunks][kColumns];
    const auto add_next_row = [&] {
        ptx::cp_async_wait<kStages - 1>();
        const uint4* row = reinterpret_cast<const uint4*>(ring + stage * kChunks * step * kVectorBytes);
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
            if (valid[c]) add_row(sum[c], row[c * step]);
        copy_next_row(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    };

#pragma unroll
    for (int s = 0; s < kStages; ++s) copy_next_row(s);
    for (; here.token < num_tokens; here.advance(params, lane)) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
            for (int i = 0; i < kColumns; ++i) sum[c][i] = 0.0f;
        for (int slots = __popc(here.live()); slots > 0; --slots) add_next_row();
        uint4* own = reinterpret_cast<uint4*>(ring + kStages * kChunks * step * kVectorBytes);  // behind the ring: registers are short
        if constexpr (kParts) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                own[c * step] = rounded(sum[c]);
#pragma unroll
                for (int i = 0; i < kColumns; ++i) sum[c][i] = 0.0f;
            }
        }
        for (int behind = 0; behind <= num_extra; ++behind) {
            if (kParts && behind == params.own_part) {
#pragma unroll
                for (int c = 0; c < kChunks; ++c) add_row(sum[c], own[c * step]);
            }
            if (behind < num_extra) add_next_row();
        }
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
            if (valid[c])
                store<kFloatOut>(params, static_cast<int64_t>(here.token) * params.hidden + (first + c * step) * kColumns, sum[c]);
    }
}

}  // namespace

void launch_combine(const CombineParams& params) {
    if (params.num_tokens == 0) return;
    int device = 0, num_sms = 0;
    check_cuda("moe.combine", cudaGetDevice(&device));
    check_cuda("moe.combine", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const int chunks = params.hidden / kColumns;
    const int threads = min_of(align_up(ceil_div(chunks, kChunks), 32), kMaxThreads);
    const int64_t blocks = min_of(params.num_tokens, static_cast<int64_t>(num_sms) * kBlocksPerSm);
    const LaunchConfig config{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(chunks, kChunks * threads))),
                              dim3(static_cast<unsigned>(threads)), static_cast<size_t>((kStages + 1) * kChunks * kVectorBytes * threads),
                              params.stream};
    if (params.has_parts) launch("moe.combine_parts", combine_kernel<false, true>, config, params);
    else if (params.out_float) launch("moe.combine", combine_kernel<true, false>, config, params);
    else launch("moe.combine", combine_kernel<false, false>, config, params);
}

}  // namespace mdi::moe
