// wgmma for sm_90a: the shapes used here, shared-memory descriptors, fences. D is fp32 in registers, 64 x kN over the
// four warps of a warpgroup; every function is called by all 128 threads.
//
// Accumulator element i of thread t (warp w = t / 32 % 4, lane l = t % 32):
//   row = 16 * w + l / 4 + 8 * (i / 2 % 2),   column = 8 * (i / 4) + 2 * (l % 4) + i % 2
// A from registers (rs): four 32-bit registers, rows as above. bf16 (k16): a[0] row l/4, k 2(l%4)..+1; a[1] row + 8;
// a[2], a[3] the same rows, k + 8. e4m3 (k32): a[0] row l/4, k 4(l%4)..+3; a[1] row + 8; a[2], a[3] k + 16.
//
// Sequence: write operands (fence_proxy_async when by ordinary stores) -> wgmma_fence -> wgmma_* ... -> wgmma_commit ->
// wgmma_wait<n>. Registers of an rs operand and of D must not be touched between wgmma_fence and the wait.
// The first product of a chain: pass `accumulate` as a runtime value (k > 0). A constant false followed by an rs form makes
// ptxas add a fence of its own (C7519).
// The e4m3 forms accumulate with reduced precision inside the tensor core: promote to fp32 registers every 128 of K.
//
// The register lists are macros because asm operands cannot be a template pack.
#pragma once
#include <cstdint>

#include "common/math.h"

namespace mdi {

enum class Swizzle : uint32_t { kNone = 0, k128B = 1, k64B = 2, k32B = 3 };

// Shared-memory matrix descriptor. Bytes are multiples of 16.
//   K-major operand with 128-byte swizzle (rows of 128 bytes, 8-row atoms of 1024 bytes, tile 1024-byte aligned):
//     stride_bytes = 1024 from one group of 8 rows to the next, leading_bytes is ignored; advance along K inside the
//     128 bytes by adding the byte offset to the address (32 bytes a step: 16 bf16 or 32 e4m3).
//   MN-major bf16 operand with 128-byte swizzle (each K row holds 64 consecutive M or N elements): stride_bytes from
//     one group of 8 K rows to the next, leading_bytes from one group of 64 M/N elements to the next.
MDI_DEVICE uint64_t smem_descriptor(uint32_t smem, Swizzle swizzle, uint32_t leading_bytes, uint32_t stride_bytes) {
    return static_cast<uint64_t>((smem & 0x3ffffu) >> 4) | static_cast<uint64_t>((leading_bytes & 0x3ffffu) >> 4) << 16 |
           static_cast<uint64_t>((stride_bytes & 0x3ffffu) >> 4) << 32 |
           static_cast<uint64_t>(static_cast<uint32_t>(swizzle)) << 62;
}

// K-major, 128-byte swizzle
MDI_DEVICE uint64_t smem_descriptor_k128(uint32_t smem) { return smem_descriptor(smem, Swizzle::k128B, 16, 1024); }

// The descriptor of an operand `bytes` further on; cheaper than building it again
MDI_DEVICE uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// Where byte `offset` of an unswizzled [rows][128 B] tile lies under the 128-byte swizzle (tile 1024-byte aligned)
MDI_HOST_DEVICE constexpr uint32_t swizzle128(uint32_t offset) { return offset ^ ((offset >> 3) & 0x70u); }

// wgmma.fence.sync.aligned
MDI_DEVICE void wgmma_fence() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// wgmma.commit_group.sync.aligned
MDI_DEVICE void wgmma_commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// wgmma.wait_group.sync.aligned: at most kPending groups are still running
template <int kPending>
MDI_DEVICE void wgmma_wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Keeps the compiler from moving writes or reads of these registers across this point: use it on D and on rs operands
// before wgmma_fence and after wgmma_wait when ptxas notes C7519 ("warpgroup.arrive is injected") or serialises.
template <int kCount>
MDI_DEVICE void fence_registers(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
MDI_DEVICE void fence_registers(uint32_t (&a)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// clang-format off
#define MDI_WGMMA_TEXT_4 "%0, %1, %2, %3"
#define MDI_WGMMA_TEXT_8 MDI_WGMMA_TEXT_4 ", %4, %5, %6, %7"
#define MDI_WGMMA_TEXT_12 MDI_WGMMA_TEXT_8 ", %8, %9, %10, %11"
#define MDI_WGMMA_TEXT_16 MDI_WGMMA_TEXT_12 ", %12, %13, %14, %15"
#define MDI_WGMMA_TEXT_20 MDI_WGMMA_TEXT_16 ", %16, %17, %18, %19"
#define MDI_WGMMA_TEXT_24 MDI_WGMMA_TEXT_20 ", %20, %21, %22, %23"
#define MDI_WGMMA_TEXT_28 MDI_WGMMA_TEXT_24 ", %24, %25, %26, %27"
#define MDI_WGMMA_TEXT_32 MDI_WGMMA_TEXT_28 ", %28, %29, %30, %31"
#define MDI_WGMMA_TEXT_36 MDI_WGMMA_TEXT_32 ", %32, %33, %34, %35"
#define MDI_WGMMA_TEXT_40 MDI_WGMMA_TEXT_36 ", %36, %37, %38, %39"
#define MDI_WGMMA_TEXT_44 MDI_WGMMA_TEXT_40 ", %40, %41, %42, %43"
#define MDI_WGMMA_TEXT_48 MDI_WGMMA_TEXT_44 ", %44, %45, %46, %47"
#define MDI_WGMMA_TEXT_52 MDI_WGMMA_TEXT_48 ", %48, %49, %50, %51"
#define MDI_WGMMA_TEXT_56 MDI_WGMMA_TEXT_52 ", %52, %53, %54, %55"
#define MDI_WGMMA_TEXT_60 MDI_WGMMA_TEXT_56 ", %56, %57, %58, %59"
#define MDI_WGMMA_TEXT_64 MDI_WGMMA_TEXT_60 ", %60, %61, %62, %63"
#define MDI_WGMMA_TEXT_68 MDI_WGMMA_TEXT_64 ", %64, %65, %66, %67"
#define MDI_WGMMA_TEXT_72 MDI_WGMMA_TEXT_68 ", %68, %69, %70, %71"
#define MDI_WGMMA_TEXT_76 MDI_WGMMA_TEXT_72 ", %72, %73, %74, %75"
#define MDI_WGMMA_TEXT_80 MDI_WGMMA_TEXT_76 ", %76, %77, %78, %79"
#define MDI_WGMMA_TEXT_84 MDI_WGMMA_TEXT_80 ", %80, %81, %82, %83"
#define MDI_WGMMA_TEXT_88 MDI_WGMMA_TEXT_84 ", %84, %85, %86, %87"
#define MDI_WGMMA_TEXT_128 MDI_WGMMA_TEXT_88 \
    ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107" \
    ", %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MDI_WGMMA_D_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MDI_WGMMA_D_8 MDI_WGMMA_D_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MDI_WGMMA_D_12 MDI_WGMMA_D_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define MDI_WGMMA_D_16 MDI_WGMMA_D_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MDI_WGMMA_D_20 MDI_WGMMA_D_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define MDI_WGMMA_D_24 MDI_WGMMA_D_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define MDI_WGMMA_D_28 MDI_WGMMA_D_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define MDI_WGMMA_D_32 MDI_WGMMA_D_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MDI_WGMMA_D_36 MDI_WGMMA_D_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define MDI_WGMMA_D_40 MDI_WGMMA_D_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define MDI_WGMMA_D_44 MDI_WGMMA_D_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define MDI_WGMMA_D_48 MDI_WGMMA_D_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define MDI_WGMMA_D_52 MDI_WGMMA_D_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define MDI_WGMMA_D_56 MDI_WGMMA_D_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define MDI_WGMMA_D_60 MDI_WGMMA_D_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define MDI_WGMMA_D_64 MDI_WGMMA_D_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MDI_WGMMA_D_68 MDI_WGMMA_D_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define MDI_WGMMA_D_72 MDI_WGMMA_D_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define MDI_WGMMA_D_76 MDI_WGMMA_D_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define MDI_WGMMA_D_80 MDI_WGMMA_D_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define MDI_WGMMA_D_84 MDI_WGMMA_D_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define MDI_WGMMA_D_88 MDI_WGMMA_D_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define MDI_WGMMA_D_128 MDI_WGMMA_D_88, \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
    "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
    "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
    "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// clang-format on

// One instruction. SHAPE: "m64n64k16"; TYPES: "bf16.bf16"; C: fp32 registers of D a thread; A..S: operand numbers of a, b, accumulate.
#define MDI_WGMMA_SS(SHAPE, TYPES, C, A, B, S, TAIL, ...)                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #S ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES \
                 " {" MDI_WGMMA_TEXT_##C "}, %" #A ", %" #B ", p, 1, 1" TAIL ";\n}\n"                             \
                 : MDI_WGMMA_D_##C                                                                                \
                 : "l"(descriptor_a), "l"(descriptor_b), "r"(static_cast<uint32_t>(accumulate)) __VA_ARGS__)
#define MDI_WGMMA_RS(SHAPE, TYPES, C, A0, A1, A2, A3, B, S, TAIL, ...)                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #S ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES \
                 " {" MDI_WGMMA_TEXT_##C "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1" TAIL ";\n}\n" \
                 : MDI_WGMMA_D_##C                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_b),                                 \
                   "r"(static_cast<uint32_t>(accumulate)) __VA_ARGS__)
#define MDI_COMMA ,
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16: d = a * b (+ d when `accumulate`).
// A and B from shared memory; kTranspose = 1: that operand is MN-major.
template <int kN, int kTransposeA = 0, int kTransposeB = 0>
MDI_DEVICE void wgmma_bf16_ss(float (&d)[kN / 2], uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
    static_assert(kN == 32 || kN == 64 || kN == 128 || kN == 256, "wgmma: N is 32, 64, 128 or 256 here");
    static_assert((kTransposeA | kTransposeB) >> 1 == 0, "wgmma: transpose is 0 or 1");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kN == 32) {
        MDI_WGMMA_SS("m64n32k16", "bf16.bf16", 16, 16, 17, 18, ", %19, %20", MDI_COMMA "n"(kTransposeA), "n"(kTransposeB));
    } else if constexpr (kN == 64) {
        MDI_WGMMA_SS("m64n64k16", "bf16.bf16", 32, 32, 33, 34, ", %35, %36", MDI_COMMA "n"(kTransposeA), "n"(kTransposeB));
    } else if constexpr (kN == 128) {
        MDI_WGMMA_SS("m64n128k16", "bf16.bf16", 64, 64, 65, 66, ", %67, %68", MDI_COMMA "n"(kTransposeA), "n"(kTransposeB));
    } else if constexpr (kN == 256) {
        MDI_WGMMA_SS("m64n256k16", "bf16.bf16", 128, 128, 129, 130, ", %131, %132", MDI_COMMA "n"(kTransposeA), "n"(kTransposeB));
    }
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for another architecture: name the file *_sm90.cu
#endif
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16: d = a * b (+ d when `accumulate`).
// A from registers; kTransposeB = 1: B is MN-major.
template <int kN, int kTransposeB = 0>
MDI_DEVICE void wgmma_bf16_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t descriptor_b, bool accumulate) {
    static_assert(kN == 32 || kN == 64 || kN == 128 || kN == 256, "wgmma: N is 32, 64, 128 or 256 here");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kN == 32) {
        MDI_WGMMA_RS("m64n32k16", "bf16.bf16", 16, 16, 17, 18, 19, 20, 21, ", %22", MDI_COMMA "n"(kTransposeB));
    } else if constexpr (kN == 64) {
        MDI_WGMMA_RS("m64n64k16", "bf16.bf16", 32, 32, 33, 34, 35, 36, 37, ", %38", MDI_COMMA "n"(kTransposeB));
    } else if constexpr (kN == 128) {
        MDI_WGMMA_RS("m64n128k16", "bf16.bf16", 64, 64, 65, 66, 67, 68, 69, ", %70", MDI_COMMA "n"(kTransposeB));
    } else if constexpr (kN == 256) {
        MDI_WGMMA_RS("m64n256k16", "bf16.bf16", 128, 128, 129, 130, 131, 132, 133, ", %134", MDI_COMMA "n"(kTransposeB));
    }
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for another architecture: name the file *_sm90.cu
#endif
}

// wgmma.mma_async.sync.aligned.m64nNk32.f32.e4m3.e4m3: d = a * b (+ d when `accumulate`), d the first kN / 2 registers.
// A from registers, B K-major.
template <int kN, int kSize>
MDI_DEVICE void wgmma_e4m3_rs(float (&d)[kSize], const uint32_t (&a)[4], uint64_t descriptor_b, bool accumulate) {
    static_assert(kN == 16 || kN == 32 || (kN >= 48 && kN <= 176 && kN % 8 == 0), "wgmma: N is 16, 32 or 48, 56 .. 176 here");
    static_assert(kN / 2 <= kSize, "wgmma: d is too short");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kN == 16) MDI_WGMMA_RS("m64n16k32", "e4m3.e4m3", 8, 8, 9, 10, 11, 12, 13, "",);
    if constexpr (kN == 32) MDI_WGMMA_RS("m64n32k32", "e4m3.e4m3", 16, 16, 17, 18, 19, 20, 21, "",);
    if constexpr (kN == 48) MDI_WGMMA_RS("m64n48k32", "e4m3.e4m3", 24, 24, 25, 26, 27, 28, 29, "",);
    if constexpr (kN == 56) MDI_WGMMA_RS("m64n56k32", "e4m3.e4m3", 28, 28, 29, 30, 31, 32, 33, "",);
    if constexpr (kN == 64) MDI_WGMMA_RS("m64n64k32", "e4m3.e4m3", 32, 32, 33, 34, 35, 36, 37, "",);
    if constexpr (kN == 72) MDI_WGMMA_RS("m64n72k32", "e4m3.e4m3", 36, 36, 37, 38, 39, 40, 41, "",);
    if constexpr (kN == 80) MDI_WGMMA_RS("m64n80k32", "e4m3.e4m3", 40, 40, 41, 42, 43, 44, 45, "",);
    if constexpr (kN == 88) MDI_WGMMA_RS("m64n88k32", "e4m3.e4m3", 44, 44, 45, 46, 47, 48, 49, "",);
    if constexpr (kN == 96) MDI_WGMMA_RS("m64n96k32", "e4m3.e4m3", 48, 48, 49, 50, 51, 52, 53, "",);
    if constexpr (kN == 104) MDI_WGMMA_RS("m64n104k32", "e4m3.e4m3", 52, 52, 53, 54, 55, 56, 57, "",);
    if constexpr (kN == 112) MDI_WGMMA_RS("m64n112k32", "e4m3.e4m3", 56, 56, 57, 58, 59, 60, 61, "",);
    if constexpr (kN == 120) MDI_WGMMA_RS("m64n120k32", "e4m3.e4m3", 60, 60, 61, 62, 63, 64, 65, "",);
    if constexpr (kN == 128) MDI_WGMMA_RS("m64n128k32", "e4m3.e4m3", 64, 64, 65, 66, 67, 68, 69, "",);
    if constexpr (kN == 136) MDI_WGMMA_RS("m64n136k32", "e4m3.e4m3", 68, 68, 69, 70, 71, 72, 73, "",);
    if constexpr (kN == 144) MDI_WGMMA_RS("m64n144k32", "e4m3.e4m3", 72, 72, 73, 74, 75, 76, 77, "",);
    if constexpr (kN == 152) MDI_WGMMA_RS("m64n152k32", "e4m3.e4m3", 76, 76, 77, 78, 79, 80, 81, "",);
    if constexpr (kN == 160) MDI_WGMMA_RS("m64n160k32", "e4m3.e4m3", 80, 80, 81, 82, 83, 84, 85, "",);
    if constexpr (kN == 168) MDI_WGMMA_RS("m64n168k32", "e4m3.e4m3", 84, 84, 85, 86, 87, 88, 89, "",);
    if constexpr (kN == 176) MDI_WGMMA_RS("m64n176k32", "e4m3.e4m3", 88, 88, 89, 90, 91, 92, 93, "",);
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for another architecture: name the file *_sm90.cu
#endif
}

// wgmma.mma_async.sync.aligned.m64nNk32.f32.e4m3.e4m3: d = a * b (+ d when `accumulate`).
// A and B from shared memory, K-major.
template <int kN>
MDI_DEVICE void wgmma_e4m3_ss(float (&d)[kN / 2], uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
    static_assert(kN == 32 || kN == 64 || kN == 128 || kN == 256, "wgmma: N is 32, 64, 128 or 256 here");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kN == 32) {
        MDI_WGMMA_SS("m64n32k32", "e4m3.e4m3", 16, 16, 17, 18, "",);
    } else if constexpr (kN == 64) {
        MDI_WGMMA_SS("m64n64k32", "e4m3.e4m3", 32, 32, 33, 34, "",);
    } else if constexpr (kN == 128) {
        MDI_WGMMA_SS("m64n128k32", "e4m3.e4m3", 64, 64, 65, 66, "",);
    } else if constexpr (kN == 256) {
        MDI_WGMMA_SS("m64n256k32", "e4m3.e4m3", 128, 128, 129, 130, "",);
    }
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for another architecture: name the file *_sm90.cu
#endif
}

#undef MDI_WGMMA_SS
#undef MDI_WGMMA_RS
#undef MDI_COMMA

}  // namespace mdi
