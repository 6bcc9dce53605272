// Runs an unmodified kernel file on the CPU under g++: one ucontext fiber per CUDA thread, one block at a time.
//
// How to use it for your kernel (example: expand_driver.cpp and ../cpu/test_kernels_on_cpu.py):
//   1. write tests/host/<name>_driver.cpp: include your X.h, and give extern "C" functions of plain pointers and ints
//      that fill Params and call the launcher;
//   2. in a test: library = tests.host.build.library("<name>", ["csrc/stage/file.cu", ...]) and call them with ctypes.
//   Kernels are found through their launcher, so mdi::launch (common/launch.h) must be what starts them.
//   (build.py rewrites `extern __shared__ T name[];` in a copy of the kernel file; nothing else is changed.)
//
// Covered: static __shared__, __syncthreads and its _or/_and/_count, warp shuffles, votes, match and reductions, atomics,
// the rounding intrinsics, bf16 conversions, and of ptx_sm80.cuh: ldmatrix, mma bf16 (fp32 sums, k ascending), cp.async
// (copies at once), pack_bf16x2, mul_bf16x2, exp2_approx, load_streaming; of ptx_sm90.cuh: mbarriers of one block and bulk_load
// (copies at once).
// A barrier that some thread of the block, or some lane of the mask, never reaches is reported and aborts.
// Not covered: memory-order bugs and races (fibers switch only at the calls above), other PTX, tensor maps, wgmma, clusters,
// cudaMemcpy and streams. Shared memory is not cleared between blocks, as on a GPU. Results of exp2f and the like are
// libm's: compare with a tolerance. Speed: about a million thread-barriers a second; use small shapes.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    *value = which == cudaDevAttrMultiProcessorCount ? 3 : 227 * 1024;  // few enough that grid-stride loops loop
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
    return std::memset(p, value, bytes), cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

#define MDI_VECTOR(T, N)                                                                  \
    struct alignas(sizeof(T) * 2) N##2 { T x, y; };                                        \
    struct N##3 { T x, y, z; };                                                            \
    struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) N##4 { T x, y, z, w; };        \
    inline N##2 make_##N##2(T x, T y) { return {x, y}; }                                   \
    inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }                           \
    inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
MDI_VECTOR(float, float)
MDI_VECTOR(int, int)
MDI_VECTOR(unsigned, uint)
MDI_VECTOR(long long, longlong)
MDI_VECTOR(unsigned char, uchar)
MDI_VECTOR(unsigned short, ushort)
#undef MDI_VECTOR

namespace cuda_on_cpu {

enum class State { kReady, kBlock, kWarp, kDone };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state;
    unsigned mask;  // lanes waited for at a warp barrier
    uint3 thread;
    unsigned index;
};

inline constexpr size_t kStackBytes = 128 * 1024;
alignas(4096) inline char shared_anchor[256 * 1024];  // dynamic shared memory; also the origin of 32-bit addresses
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline unsigned num_threads = 0;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline uint3 block_index;
inline dim3 block_size, grid_size;
inline uint64_t exchange[1024][8];  // one row a thread, for warp operations
inline int votes[1024];

inline void wait(State state, unsigned mask = 0) {
    Fiber* self = current;
    self->state = state;
    self->mask = mask;
    swapcontext(&self->context, &scheduler);
}

inline void enter() {
    body();
    current->state = State::kDone;
    swapcontext(&current->context, &scheduler);
}

// Lets waiting threads go on where everybody that they wait for has arrived; true when at least one can.
inline bool release() {
    bool any = false, block_full = true;
    for (unsigned i = 0; i < num_threads; ++i) block_full &= fibers[i]->state == State::kBlock || fibers[i]->state == State::kDone;
    for (unsigned first = 0; first < num_threads; first += 32) {
        const unsigned last = std::min(first + 32, num_threads);
        for (unsigned i = first; i < last; ++i) {
            if (block_full && fibers[i]->state == State::kBlock) fibers[i]->state = State::kReady, any = true;
            if (fibers[i]->state != State::kWarp) continue;
            const unsigned mask = fibers[i]->mask;
            bool full = true;
            for (unsigned lane = first; lane < last; ++lane)
                if (mask >> (lane - first) & 1u) full &= fibers[lane]->state == State::kWarp && fibers[lane]->mask == mask;
            if (!full) continue;
            for (unsigned lane = first; lane < last; ++lane)
                if (mask >> (lane - first) & 1u) fibers[lane]->state = State::kReady;
            any = true;
        }
    }
    return any;
}

inline void run_block() {
    num_threads = block_size.x * block_size.y * block_size.z;
    while (fibers.size() < num_threads) {
        fibers.push_back(std::make_unique<Fiber>());
        fibers.back()->stack = std::make_unique<char[]>(kStackBytes);
    }
    for (unsigned i = 0; i < num_threads; ++i) {
        Fiber& f = *fibers[i];
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = kStackBytes;
        f.context.uc_link = nullptr;
        f.state = State::kReady;
        f.index = i;
        f.thread = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
        makecontext(&f.context, enter, 0);
    }
    for (;;) {
        bool live = false;
        for (unsigned i = 0; i < num_threads; ++i) {
            if (fibers[i]->state == State::kReady) {
                current = fibers[i].get();
                swapcontext(&scheduler, &current->context);
            }
            live |= fibers[i]->state != State::kDone;
        }
        if (!live) return;
        bool ready = false;
        for (unsigned i = 0; i < num_threads; ++i) ready |= fibers[i]->state == State::kReady;
        if (!release() && !ready) {
            std::fprintf(stderr, "cuda_on_cpu: block (%u,%u,%u) is stuck:", block_index.x, block_index.y, block_index.z);
            for (unsigned i = 0; i < num_threads; ++i)
                std::fprintf(stderr, " %u:%s", i, fibers[i]->state == State::kBlock ? "block" : fibers[i]->state == State::kWarp ? "warp" : "done");
            std::fprintf(stderr, "\n");
            std::abort();
        }
    }
}

inline unsigned lane() { return current->index % 32; }
inline unsigned warp_start() { return current->index / 32 * 32; }

// Every lane of `mask` puts `value` up; then `read(get)` sees get(lane) of all of them.
template <class T, class F>
auto across_warp(unsigned mask, const T& value, F read) {
    static_assert(sizeof(T) <= sizeof(exchange[0]), "value too large");
    if (num_threads - warp_start() < 32) mask &= (1u << (num_threads - warp_start())) - 1u;
    std::memcpy(exchange[current->index], &value, sizeof(T));
    wait(State::kWarp, mask);
    const unsigned first = warp_start();
    auto result = read([&](unsigned source) {
        T other;
        std::memcpy(&other, exchange[first + source % 32], sizeof(T));
        return other;
    });
    wait(State::kWarp, mask);
    return result;
}

template <class T, class F>
T fold(unsigned mask, T value, F op) {
    return across_warp(mask, value, [&](auto get) {
        bool first = true;
        T result{};
        for (unsigned l = 0; l < 32; ++l)
            if (mask >> l & 1u) result = first ? get(l) : op(result, get(l)), first = false;
        return result;
    });
}

inline int block_vote(int predicate, int (*combine)(int, int)) {
    votes[current->index] = predicate;
    wait(State::kBlock);
    int result = votes[0];
    for (unsigned i = 1; i < num_threads; ++i) result = combine(result, votes[i]);
    wait(State::kBlock);
    return result;
}

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::current->thread)
#define blockIdx (cuda_on_cpu::block_index)
#define blockDim (cuda_on_cpu::block_size)
#define gridDim (cuda_on_cpu::grid_size)
constexpr int warpSize = 32;

// ---- barriers, shuffles, votes ------------------------------------------------------------------------------------

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::State::kBlock); }
inline int __syncthreads_or(int p) { return cuda_on_cpu::block_vote(p != 0, [](int a, int b) { return a | b; }); }
inline int __syncthreads_and(int p) { return cuda_on_cpu::block_vote(p != 0, [](int a, int b) { return a & b; }); }
inline int __syncthreads_count(int p) { return cuda_on_cpu::block_vote(p != 0, [](int a, int b) { return a + b; }); }
inline void __syncwarp(unsigned mask = ~0u) { cuda_on_cpu::across_warp(mask, 0, [](auto) { return 0; }); }
inline void __threadfence() {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() {
    std::fprintf(stderr, "cuda_on_cpu: __trap\n");
    std::abort();
}

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
    const unsigned base = cuda_on_cpu::lane() / width * width;
    return cuda_on_cpu::across_warp(mask, v, [&](auto get) { return get(base + static_cast<unsigned>(source) % width); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
    const unsigned lane = cuda_on_cpu::lane(), source = lane ^ bits;
    return cuda_on_cpu::across_warp(mask, v, [&](auto get) { return get(source / width <= lane / width ? source : lane); });
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    const unsigned lane = cuda_on_cpu::lane();
    return cuda_on_cpu::across_warp(mask, v, [&](auto get) { return get(lane % width >= delta ? lane - delta : lane); });
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    const unsigned lane = cuda_on_cpu::lane();
    return cuda_on_cpu::across_warp(mask, v, [&](auto get) { return get(lane % width + delta < unsigned(width) ? lane + delta : lane); });
}
inline unsigned __activemask() { return ~0u; }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return cuda_on_cpu::across_warp(mask, predicate, [&](auto get) {
        unsigned bits = 0;
        for (unsigned l = 0; l < 32; ++l)
            if (mask >> l & 1u && get(l)) bits |= 1u << l;
        return bits;
    });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
    return cuda_on_cpu::across_warp(mask, v, [&](auto get) {
        unsigned bits = 0;
        for (unsigned l = 0; l < 32; ++l)
            if (mask >> l & 1u && get(l) == v) bits |= 1u << l;
        return bits;
    });
}
template <class T>
T __reduce_add_sync(unsigned mask, T v) { return cuda_on_cpu::fold(mask, v, [](T a, T b) { return T(a + b); }); }
template <class T>
T __reduce_min_sync(unsigned mask, T v) { return cuda_on_cpu::fold(mask, v, [](T a, T b) { return a < b ? a : b; }); }
template <class T>
T __reduce_max_sync(unsigned mask, T v) { return cuda_on_cpu::fold(mask, v, [](T a, T b) { return a > b ? a : b; }); }
template <class T>
T __reduce_or_sync(unsigned mask, T v) { return cuda_on_cpu::fold(mask, v, [](T a, T b) { return T(a | b); }); }

// ---- atomics ------------------------------------------------------------------------------------------------------

template <class T, class U>
T atomicAdd(T* p, U v) { return std::exchange(*p, static_cast<T>(*p + v)); }
template <class T, class U>
T atomicSub(T* p, U v) { return std::exchange(*p, static_cast<T>(*p - v)); }
template <class T, class U>
T atomicMax(T* p, U v) { return std::exchange(*p, std::max<T>(*p, v)); }
template <class T, class U>
T atomicMin(T* p, U v) { return std::exchange(*p, std::min<T>(*p, v)); }
template <class T, class U>
T atomicOr(T* p, U v) { return std::exchange(*p, static_cast<T>(*p | v)); }
template <class T, class U>
T atomicAnd(T* p, U v) { return std::exchange(*p, static_cast<T>(*p & v)); }
template <class T, class U>
T atomicExch(T* p, U v) { return std::exchange(*p, static_cast<T>(v)); }
template <class T, class U, class V>
T atomicCAS(T* p, U expected, V v) {
    const T old = *p;
    if (old == static_cast<T>(expected)) *p = static_cast<T>(v);
    return old;
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------

using std::max;
using std::min;
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline unsigned __float_as_uint(float x) {
    unsigned u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __uint_as_float(unsigned u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}
inline float __int_as_float(int i) { return __uint_as_float(static_cast<unsigned>(i)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __saturatef(float x) { return x < 0.0f || x != x ? 0.0f : x > 1.0f ? 1.0f : x; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> (4 * i) & 0xfu;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7u)) & 0xffu);
        if (pick & 8u) byte = byte & 0x80u ? 0xffu : 0u;
        out |= byte << (8 * i);
    }
    return out;
}
template <class T>
T __ldg(const T* p) { return *p; }

// ---- bf16 ---------------------------------------------------------------------------------------------------------

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const unsigned u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline float __low2float(__nv_bfloat162 v) { return __bfloat162float(v.x); }
inline float __high2float(__nv_bfloat162 v) { return __bfloat162float(v.y); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }

// ---- ptx_sm80.cuh -------------------------------------------------------------------------------------------------

namespace mdi::ptx {

inline uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(reinterpret_cast<intptr_t>(p) - reinterpret_cast<intptr_t>(cuda_on_cpu::shared_anchor));
}
inline char* smem_pointer(uint32_t address) { return cuda_on_cpu::shared_anchor + static_cast<int32_t>(address); }

inline void cp_async_16(uint32_t smem, const void* global) { std::memcpy(smem_pointer(smem), global, 16); }
inline void cp_async_16_zfill(uint32_t smem, const void* global, uint32_t valid_bytes) {
    std::memset(smem_pointer(smem), 0, 16);
    std::memcpy(smem_pointer(smem), global, valid_bytes);
}
template <int kBytes>
void cp_async_small(uint32_t smem, const void* global) { std::memcpy(smem_pointer(smem), global, kBytes); }
inline void cp_async_commit() {}
template <int kPending>
void cp_async_wait() {}

inline float half_bf16(uint32_t pair, int which) { return __uint_as_float(which ? pair & 0xffff0000u : pair << 16); }
inline uint32_t pack_bf16x2(float even, float odd) {
    return __float2bfloat16_rn(even).bits | static_cast<uint32_t>(__float2bfloat16_rn(odd).bits) << 16;
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    return pack_bf16x2(half_bf16(a, 0) * half_bf16(b, 0), half_bf16(a, 1) * half_bf16(b, 1));
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline uint4 load_streaming(const void* global) {
    uint4 v;
    std::memcpy(&v, global, 16);
    return v;
}

// Matrix i of an ldmatrix: row r is at the address that lane 8 * i + r gave; lane l holds elements 2(l%4), +1 of row l / 4.
template <int kMatrices, bool kTrans>
void ldmatrix(uint32_t* r, uint32_t smem) {
    const unsigned lane = cuda_on_cpu::lane();
    cuda_on_cpu::across_warp(~0u, smem, [&](auto get) {
        for (int i = 0; i < kMatrices; ++i) {
            uint16_t pair[2];
            for (unsigned e = 0; e < 2; ++e) {
                const unsigned row = kTrans ? 2 * (lane % 4) + e : lane / 4, column = kTrans ? lane / 4 : 2 * (lane % 4) + e;
                std::memcpy(&pair[e], smem_pointer(get(8 * i + row)) + 2 * column, 2);
            }
            r[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
        }
        return 0;
    });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) { ldmatrix<4, false>(r, smem); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) { ldmatrix<4, true>(r, smem); }
inline void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t smem) {
    uint32_t r[2];
    ldmatrix<2, false>(r, smem);
    r0 = r[0], r1 = r[1];
}
inline void ldmatrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t smem) {
    uint32_t r[2];
    ldmatrix<2, true>(r, smem);
    r0 = r[0], r1 = r[1];
}

inline void mma_bf16_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Operands {
        uint32_t a[4], b[2];
    };
    const unsigned lane = cuda_on_cpu::lane();
    cuda_on_cpu::across_warp(~0u, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto get) {
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            for (unsigned k = 0; k < 16; ++k) {
                const uint32_t x = get(row % 8 * 4 + k % 8 / 2).a[row / 8 + 2 * (k / 8)];
                const uint32_t y = get(column * 4 + k % 8 / 2).b[k / 8];
                d[i] += half_bf16(x, k % 2) * half_bf16(y, k % 2);
            }
        }
        return 0;
    });
}

// ---- ptx_sm90.cuh -------------------------------------------------------------------------------------------------

struct Barrier {  // 8 bytes in shared memory
    uint16_t arrivals, pending;
    int32_t bytes_and_phase;  // missing bytes * 2 + parity of the running phase
};
inline Barrier& barrier_at(uint32_t smem) { return *reinterpret_cast<Barrier*>(smem_pointer(smem)); }
inline void barrier_update(uint32_t smem, int arrivals, int64_t bytes) {
    Barrier& b = barrier_at(smem);
    b.pending = static_cast<uint16_t>(b.pending - arrivals);
    b.bytes_and_phase += static_cast<int32_t>(2 * bytes);
    if (b.pending == 0 && b.bytes_and_phase / 2 == 0) b.pending = b.arrivals, b.bytes_and_phase ^= 1;
}
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    barrier_at(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t barrier) { barrier_update(barrier, 1, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) { barrier_update(barrier, 1, bytes); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    for (int turns = 0; (barrier_at(barrier).bytes_and_phase & 1) == static_cast<int>(parity); ++turns) {
        if (turns > 10'000'000) {
            std::fprintf(stderr, "cuda_on_cpu: thread %u waits for a barrier that nobody completes\n", cuda_on_cpu::current->index);
            std::abort();
        }
        cuda_on_cpu::wait(cuda_on_cpu::State::kReady);  // the others' turn
    }
}
inline void bulk_load(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    std::memcpy(smem_pointer(smem), global, bytes);
    barrier_update(barrier, 0, -static_cast<int64_t>(bytes));
}

}  // namespace mdi::ptx

// ---- launch.h -----------------------------------------------------------------------------------------------------

namespace mdi {

struct LaunchConfig {
    dim3 grid, block;
    size_t smem_bytes = 0;
    cudaStream_t stream = nullptr;
    unsigned cluster = 1;
};

inline char* dynamic_smem() { return cuda_on_cpu::shared_anchor; }

inline void check_cuda(const char* what, cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(what);
}

template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
    using namespace cuda_on_cpu;
    const uint64_t threads = uint64_t{config.block.x} * config.block.y * config.block.z;
    if (threads == 0 || threads > 1024 || config.smem_bytes > 227 * 1024 || config.grid.y > 65535 || config.grid.z > 65535) {
        std::fprintf(stderr, "%s: a GPU would refuse %llu threads with %zu bytes of shared memory, grid %u,%u,%u\n", name,
                     static_cast<unsigned long long>(threads), config.smem_bytes, config.grid.x, config.grid.y, config.grid.z);
        std::abort();
    }
    grid_size = config.grid;
    block_size = config.block;
    body = [&] { kernel(static_cast<Params>(args)...); };
    for (unsigned z = 0; z < config.grid.z; ++z)
        for (unsigned y = 0; y < config.grid.y; ++y)
            for (unsigned x = 0; x < config.grid.x; ++x) {
                block_index = {x, y, z};
                run_block();
            }
}

}  // namespace mdi
