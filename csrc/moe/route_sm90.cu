// Router (model spec 6.1, formulas in route.cu) on wgmma, up to 384 experts (more: route.cu). Same bits as route.cu: partial
// sums over 64 columns in the tensor core, added with fp32 rounding, columns ascending; no split over K.
//
// A cluster of two blocks takes 64 tokens, each block half of the experts. Block roles (512 threads):
//   warps 0..3   one warpgroup, 64 tokens x 192 experts as 128 + 64: wgmma m64n128k16 and m64n64k16, both operands in shared
//                memory; the partial sums of the first are added while the second is multiplied
//   warp 4       one thread fetches stages of 64 columns by TMA: x [64 tokens] and W [192 experts], 128-byte swizzle
//   all 16       select
// The logits of a token meet in one block: of the first 32 tokens in block 0, of the others in block 1, written over the
// finished ring through distributed shared memory. Then a warp scores and selects for one token at a time (route.cuh).
//
// Barriers: full[s] counts the producer's arrival and the bytes of a stage; empty[s] one arrival a consumer warp.
// SASS: HGMMA
// Shared memory: 6 stages x 32 KiB, reused for 32 x 392 logits. Limits: E <= 384, k <= 32, N a multiple of 32.
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/tma_sm90.h"
#include "common/wgmma_sm90.cuh"
#include "moe/moe.h"
#include "moe/route.cuh"

namespace mdi::moe {
namespace {

constexpr int kTokens = 64;                   // of a cluster
constexpr int kExperts = 384;                 // of a cluster
constexpr int kBlockExperts = kExperts / 2;
constexpr int kBlockK = 64;
constexpr int kStages = 6;
constexpr int kWide = 128, kNarrow = 64;      // the two parts of a block's experts
constexpr int kConsumerWarps = 4, kThreads = 512;
constexpr int kConsumerRegisters = 232, kOtherRegisters = 88;
constexpr int kLogitStride = kExperts + 8;  // rows 8 banks apart: 8-byte stores of a fragment do not collide
constexpr int kXBytes = kTokens * kBlockK * 2, kStageBytes = kXBytes + kBlockExperts * kBlockK * 2;

struct SharedStorage {
    alignas(1024) uint8_t ring[kStages][kStageBytes];  // x, then W; at the end float logits[kTokens / 2][kLogitStride]
    uint64_t full[kStages], empty[kStages];
};
static_assert(kTokens / 2 * kLogitStride * 4 <= kStages * kStageBytes && sizeof(SharedStorage) <= 227 * 1024, "shared memory");

struct Maps {
    CUtensorMap x, weight;
};

__device__ __forceinline__ void produce(SharedStorage& shared, const Maps& maps, int num_steps, int32_t first_token,
                                        int32_t first_expert) {
    for (int step = 0; step < num_steps; ++step) {
        const int stage = step % kStages;
        const uint32_t full = ptx::smem_address(&shared.full[stage]), ring = ptx::smem_address(shared.ring[stage]);
        ptx::mbarrier_wait(ptx::smem_address(&shared.empty[stage]), step / kStages % 2 ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, kStageBytes);  // what lies outside the tensors arrives as zeros
        ptx::tma_load_2d(ring, &maps.x, full, step * kBlockK, first_token);
        ptx::tma_load_2d(ring + kXBytes, &maps.weight, full, step * kBlockK, first_expert);
    }
}

// part = 64 columns of x times those of kExperts rows of W
template <int kExperts>
__device__ __forceinline__ void multiply(uint32_t x, uint32_t weight, float (&part)[kExperts / 2]) {
    const uint64_t a = smem_descriptor_k128(x), b = smem_descriptor_k128(weight);
    fence_registers(part);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockK / 16; ++k)
        wgmma_bf16_ss<kExperts>(part, advance_descriptor(a, k * 32), advance_descriptor(b, k * 32), k > 0);
    wgmma_commit();
}

template <int kCount>
__device__ __forceinline__ void add(float (&sums)[kCount], float (&part)[kCount]) {
    fence_registers(part);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = __fadd_rn(sums[i], part[i]);
}

// The logits of the block: element i of wide is expert 8 (i / 4) + .. (wgmma_sm90.cuh), narrow is kWide experts further.
__device__ __forceinline__ void consume(SharedStorage& shared, int num_steps, float (&wide)[kWide / 2],
                                        float (&narrow)[kNarrow / 2]) {
    for (int step = 0; step < num_steps; ++step) {
        const int stage = step % kStages;
        const uint32_t x = ptx::smem_address(shared.ring[stage]), weight = x + kXBytes;
        float wide_part[kWide / 2], narrow_part[kNarrow / 2];
        ptx::mbarrier_wait(ptx::smem_address(&shared.full[stage]), step / kStages % 2);
        multiply<kWide>(x, weight, wide_part);
        multiply<kNarrow>(x, weight + kWide * kBlockK * 2, narrow_part);
        wgmma_wait<1>();
        add(wide, wide_part);  // while the narrow part is multiplied
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.empty[stage]));
        add(narrow, narrow_part);
    }
}

// store(offset, a, b): two logits, `offset` floats behind those of element 0
template <int kExperts, class Store>
__device__ __forceinline__ void store_logits(const float (&sums)[kExperts / 2], int first_expert, const Store& store) {
#pragma unroll
    for (int i = 0; i < kExperts / 2; i += 2)
        store(i / 2 % 2 * 8 * kLogitStride + first_expert + i / 4 * 8, sums[i], sums[i + 1]);
}

__global__ void __launch_bounds__(kThreads, 1)
    route_sm90_kernel(const __grid_constant__ RouteParams params, const __grid_constant__ Maps maps) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem());
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int rank = static_cast<int>(ptx::cluster_rank());
    const int64_t first_token = static_cast<int64_t>(blockIdx.x / 2) * kTokens;
    const int num_steps = ceil_div(params.hidden, kBlockK);
    if (thread == 0) {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(ptx::smem_address(&shared.full[s]), 1);
            ptx::mbarrier_init(ptx::smem_address(&shared.empty[s]), kConsumerWarps);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();

    float* logits = reinterpret_cast<float*>(shared.ring);  // [kTokens / 2][kLogitStride]
    if (warp < kConsumerWarps) {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        float wide[kWide / 2] = {}, narrow[kNarrow / 2] = {};
        consume(shared, num_steps, wide, narrow);
        ptx::cluster_arrive();  // both blocks are done with their rings: the logits may overwrite them
        ptx::cluster_wait();
        // of element 0; the second half of the tokens goes to block 1
        const int row = warp * 16 + lane / 4, owner = row / 32;
        float* line = logits + row % 32 * kLogitStride + rank * kBlockExperts + lane % 4 * 2;
        const auto store = [&](auto put) {
            store_logits<kWide>(wide, 0, put);
            store_logits<kNarrow>(narrow, kWide, put);
        };
        if (owner == rank) {
            store([&](int offset, float a, float b) { *reinterpret_cast<float2*>(line + offset) = make_float2(a, b); });
        } else {
            const uint32_t there = ptx::map_to_rank(ptx::smem_address(line), static_cast<uint32_t>(owner));
            store([&](int offset, float a, float b) { ptx::store_cluster(there + offset * 4, make_float2(a, b)); });
        }
        ptx::setmaxnreg_dec<kOtherRegisters>();
    } else {
        ptx::setmaxnreg_dec<kOtherRegisters>();
        if (warp == kConsumerWarps && lane == 0)
            produce(shared, maps, num_steps, static_cast<int32_t>(first_token), rank * kBlockExperts);
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
    float bias[kExperts / 32];
    load_bias<kExperts>(params, bias);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    for (int row = warp; row < kTokens / 2; row += kThreads / 32) {
        const int64_t token = first_token + rank * (kTokens / 2) + row;
        if (token < params.num_tokens) select_experts<kExperts>(params, logits + row * kLogitStride, bias, token);
    }
}

}  // namespace

void launch_route_sm90(const RouteParams& params) {
    constexpr const char* op = "moe.route_sm90";
    if (params.num_experts > kExperts) return launch_route(params);
    if (params.num_tokens == 0) return;
    const auto hidden = static_cast<uint64_t>(params.hidden);
    Maps maps;
    maps.x = make_tensor_map({"moe.route_sm90: x", TmaType::kBf16, params.x, 2,
                              {hidden, static_cast<uint64_t>(params.num_tokens)}, {hidden * 2}, {kBlockK, kTokens}});
    maps.weight = make_tensor_map({"moe.route_sm90: weight", TmaType::kBf16, params.weight, 2,
                                   {hidden, static_cast<uint64_t>(params.num_experts)}, {hidden * 2}, {kBlockK, kBlockExperts}});
    const auto clusters = static_cast<unsigned>(ceil_div<int64_t>(params.num_tokens, kTokens));
    launch(op, route_sm90_kernel, {dim3(clusters * 2), dim3(kThreads), sizeof(SharedStorage), params.stream, 2}, params, maps);
}

}  // namespace mdi::moe
