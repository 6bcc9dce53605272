// Engram gate (model spec 7.4), float32 inside, one rounding:
//     key[s] = z[s*N : (s+1)*N],  value = z[n*N : (n+1)*N]
//     dot[s] = sum_c R[s,c] * (q_weight[s,c] * k_weight[s,c]) * key[s,c] * rstd(R[s]) * rstd(key[s]) * N^-1/2
//     out[s] = bf16( R[s] + sigmoid( copysign( sqrt(max(|dot[s]|, 1e-6)), dot[s] ) ) * value )
//
// A block takes one token. A thread owns kGateChunks vectors of 8 columns of every stream, in registers from the load to the
// store (out may be streams); of a chunk, all that only this block reads is under way before the first use. The three sums of
// every stream are reduced together: a thread's columns in order, a butterfly over the warp, then the first warp adds the warps
// in order and makes the gates. Memory-bound: (3n + 1) * N * 2 bytes a token; the weights stay in L1 and L2.
// Shared memory: 3 n floats a warp and n gates, 976 bytes. Limits: N % 8 == 0, N <= 10240, n <= 4. NaN reaches its whole stream.
#include "common/launch.h"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kGateChunks = 2;
constexpr int kGateThreads = kMaxCollapseWidth / kVector / kGateChunks;
constexpr int kGateSums = 3;  // R^2, key^2, R * weight * key

struct GateSums {
    float value[kGateSums];
};

MDI_DEVICE GateSums add_products(const uint4& stream, const uint4& key, const uint4& q_weight, const uint4& k_weight, GateSums sums) {
    float r[kVector], k[kVector], qw[kVector], kw[kVector];
    unpack(stream, r);
    unpack(key, k);
    unpack(q_weight, qw);
    unpack(k_weight, kw);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
        sums.value[0] = fmaf(r[e], r[e], sums.value[0]);
        sums.value[1] = fmaf(k[e], k[e], sums.value[1]);
        sums.value[2] = fmaf(r[e] * (qw[e] * kw[e]), k[e], sums.value[2]);
    }
    return sums;
}

MDI_DEVICE float gate_of(const GateSums& sums, float width, float eps) {
    const float rstd = (1.0f / sqrtf(sums.value[0] / width + eps)) * (1.0f / sqrtf(sums.value[1] / width + eps));
    const float dot = sums.value[2] * rstd * (1.0f / sqrtf(width));
    const float magnitude = fabsf(dot) < 1e-6f ? 1e-6f : fabsf(dot);  // keeps NaN
    return 1.0f / (1.0f + expf(-copysignf(sqrtf(magnitude), dot)));
}

template <int kStreams>
__global__ void __launch_bounds__(kGateThreads) engram_gate_kernel(EngramGateParams p) {
    __shared__ float scratch[kGateThreads / 32][kStreams * kGateSums], gates[kStreams];
    const int64_t token = blockIdx.x;
    const int step = static_cast<int>(blockDim.x) * kVector;
    const int first = static_cast<int>(threadIdx.x) * kVector;
    const bf16* streams = p.streams + token * kStreams * p.width;
    const bf16* z = p.z + token * p.z_stride;

    uint4 packed[kGateChunks][kStreams];
    uint4 addend[kGateChunks];
    GateSums sums[kStreams] = {};
#pragma unroll
    for (int c = 0; c < kGateChunks; ++c) {
        const int column = first + c * step;
        if (column >= p.width) continue;
        uint4 key[kStreams];  // all of the token's reads before the first use: what is in flight is what hides memory's latency
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
            const int64_t at = static_cast<int64_t>(s) * p.width + column;
            packed[c][s] = load_once(streams + at);
            key[s] = load_once(z + at);
        }
        addend[c] = load_once(z + static_cast<int64_t>(kStreams) * p.width + column);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
            const int64_t at = static_cast<int64_t>(s) * p.width + column;
            sums[s] = add_products(packed[c][s], key[s], *reinterpret_cast<const uint4*>(p.q_weight + at),
                                   *reinterpret_cast<const uint4*>(p.k_weight + at), sums[s]);
        }
    }
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
#pragma unroll
        for (int k = 0; k < kGateSums; ++k) {
            const float sum = warp_sum(sums[s].value[k]);
            if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32][s * kGateSums + k] = sum;
        }
    __syncthreads();
    if (threadIdx.x < 32) {  // lane k: sum k over the warps, then lane s: gate s
        const int lane = static_cast<int>(threadIdx.x), sum = min_of(lane, kStreams * kGateSums - 1);
        float total = 0.0f;
        for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) total += scratch[warp][sum];
        GateSums stream;
#pragma unroll
        for (int k = 0; k < kGateSums; ++k)
            stream.value[k] = __shfl_sync(kFullWarp, total, min_of(lane, kStreams - 1) * kGateSums + k);
        const float gate = gate_of(stream, static_cast<float>(p.width), p.eps);
        if (lane < kStreams) gates[lane] = gate;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kGateChunks; ++c) {
        const int column = first + c * step;
        if (column >= p.width) continue;
        float value[kVector];
        unpack(addend[c], value);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
            const float gate = gates[s];
            float result[kVector];
            unpack(packed[c][s], result);
#pragma unroll
            for (int e = 0; e < kVector; ++e) result[e] = fmaf(gate, value[e], result[e]);
            *reinterpret_cast<uint4*>(p.out + (token * kStreams + s) * p.width + column) = pack(result);
        }
    }
}

template <int kStreams>
void launch_streams(const EngramGateParams& p) {
    const int threads = align_up(ceil_div(ceil_div(p.width, kVector), kGateChunks), 32);
    launch("elementwise.engram_gate", engram_gate_kernel<kStreams>,
           {dim3(static_cast<unsigned>(p.num_tokens)), dim3(static_cast<unsigned>(threads)), 0, p.stream}, p);
}

}  // namespace

void launch_engram_gate(const EngramGateParams& p) {
    switch (p.num_streams) {
        case 1: return launch_streams<1>(p);
        case 2: return launch_streams<2>(p);
        case 3: return launch_streams<3>(p);
        default: return launch_streams<4>(p);
    }
}

}  // namespace mdi::elementwise
