// One function = one instruction of PTX available from sm_80 on. Nothing else belongs here.
#pragma once
#if !defined(MDI_CUDA_ON_CPU)  // tests/host/cuda_on_cpu.h brings its own
#include <cstdint>

#include "common/math.h"

namespace mdi::ptx {

// 32-bit address of a shared-memory pointer
MDI_DEVICE uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: d += a * b.
// Lane l, g = l / 4, t = l % 4. a[0]: row g, k 2t..2t+1; a[1]: row g+8; a[2], a[3]: the same rows, k + 8.
// b[0]: column g, k 2t..2t+1; b[1]: k + 8. d[0], d[1]: row g, columns 2t, 2t+1; d[2], d[3]: row g+8.
MDI_DEVICE void mma_bf16_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned)
MDI_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
MDI_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// ldmatrix.sync.aligned.m8n8.x2.shared.b16: lanes 0..15 give the addresses
MDI_DEVICE void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r0), "=r"(r1)
                 : "r"(smem)
                 : "memory");
}

// ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16
MDI_DEVICE void ldmatrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r0), "=r"(r1)
                 : "r"(smem)
                 : "memory");
}

// cp.async.cg.shared.global, 16 bytes, both addresses 16-byte aligned; bypasses L1
MDI_DEVICE void cp_async_16(uint32_t smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(smem), "l"(global) : "memory");
}

// The same with `valid_bytes` (0..16) read and the rest zero-filled; 0 reads nothing, the address must still be legal
MDI_DEVICE void cp_async_16_zfill(uint32_t smem, const void* global, uint32_t valid_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem), "l"(global), "r"(valid_bytes) : "memory");
}

// cp.async.ca.shared.global, 4 or 8 bytes
template <int kBytes>
MDI_DEVICE void cp_async_small(uint32_t smem, const void* global) {
    static_assert(kBytes == 4 || kBytes == 8, "cp.async.ca: 4 or 8 bytes here");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(smem), "l"(global), "n"(kBytes) : "memory");
}

// cp.async.commit_group
MDI_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// cp.async.wait_group: at most kPending groups of this thread are still in flight
template <int kPending>
MDI_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// cvt.rn.bf16x2.f32: low half = `even`
MDI_DEVICE uint32_t pack_bf16x2(float even, float odd) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(odd), "f"(even));
    return d;
}

// mul.rn on bf16 pairs through fma.rn.bf16x2 with -0 (sm_80 has no bf16x2 multiply)
MDI_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

// ex2.approx.ftz.f32
MDI_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ld.global.nc.L1::no_allocate.v4: streaming 16-byte load of data that is read once and never written in this kernel
MDI_DEVICE uint4 load_streaming(const void* global) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(global));
    return v;
}

// bar.sync id, threads: a barrier among the warps that name it (id 1..15; 0 is __syncthreads)
MDI_DEVICE void named_barrier_sync(uint32_t id, uint32_t num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace mdi::ptx
#endif
