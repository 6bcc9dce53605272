// One function = one instruction of PTX available from sm_90 on (setmaxnreg: the "a" targets). Nothing else belongs
// here. Shared-memory addresses are 32-bit (ptx::smem_address); barriers are 8-byte mbarrier objects.
#pragma once
#if !defined(MDI_CUDA_ON_CPU)  // tests/host/cuda_on_cpu.h brings its own
#include <cuda.h>  // CUtensorMap; types only, libcuda is not linked

#include <cstdint>

#include "common/ptx_sm80.cuh"

namespace mdi::ptx {

// ---- mbarrier -----------------------------------------------------------------------------------------------------

// mbarrier.init.shared::cta.b64: a phase completes after `arrivals` arrivals and all announced bytes
MDI_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// mbarrier.inval.shared::cta.b64: the memory may be used for something else
MDI_DEVICE void mbarrier_inval(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// fence.mbarrier_init.release.cluster: makes initialised barriers visible to the async proxy and to the cluster
MDI_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// ld.shared.v4.u32
MDI_DEVICE uint4 load_shared_v4(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// mbarrier.arrive.expect_tx.shared::cta.b64: one arrival that also announces `bytes` of coming copies
MDI_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.arrive.shared::cta.b64
MDI_DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// cp.async.mbarrier.arrive.noinc.shared::cta.b64: an arrival once all earlier cp.async of this thread are there. It is one of those
// that the barrier was initialised for.
MDI_DEVICE void cp_async_mbarrier_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.release.cluster.shared::cluster.b64: `barrier` comes from map_to_rank
MDI_DEVICE void mbarrier_arrive_remote(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.shared::cluster.b64, `barrier` from map_to_rank: releases a stage that was only read, by wgmma that have
// completed. Not .release.cluster: that adds a fence at GPU scope, which waits for loads in flight.
MDI_DEVICE void mbarrier_arrive_remote_read(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64 until the phase of this parity has completed. A fresh barrier is in phase 0:
// waiting for parity 1 returns at once, waiting for parity 0 waits for the first completion.
MDI_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (done == 0);
}

// mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64: mbarrier_wait for what other blocks of the cluster have released
MDI_DEVICE void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (done == 0);
}

// ---- TMA ----------------------------------------------------------------------------------------------------------

// prefetch.tensormap
MDI_DEVICE void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier: x is the coordinate of the contiguous dimension
MDI_DEVICE void tma_load_2d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

// cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier
MDI_DEVICE void tma_load_3d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t y, int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(smem),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// cp.async.bulk.tensor.2d with .multicast::cluster: the tile lands at the same offset in every block of `block_mask`,
// and each of those blocks' barriers (same offset) counts the bytes
MDI_DEVICE void tma_load_2d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t y,
                                      uint16_t block_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(smem),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "h"(block_mask)
        : "memory");
}

// cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group: what lies outside the tensor is not written
MDI_DEVICE void tma_store_2d(const CUtensorMap* map, uint32_t smem, int32_t x, int32_t y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(smem), "r"(x), "r"(y)
                 : "memory");
}

// cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group
MDI_DEVICE void tma_store_3d(const CUtensorMap* map, uint32_t smem, int32_t x, int32_t y, int32_t z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(smem), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// cp.async.bulk.commit_group: of this thread's bulk stores
MDI_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: at most kPending groups of this thread still read shared memory
template <int kPending>
MDI_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.shared::cluster.global.mbarrier: plain copy without a tensor map; addresses and bytes are multiples of 16
MDI_DEVICE void bulk_load(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
        "l"(reinterpret_cast<uint64_t>(global)), "r"(bytes), "r"(barrier)
        : "memory");
}

// cp.async.bulk.prefetch.L2.global: address and bytes are multiples of 16
MDI_DEVICE void bulk_prefetch_l2(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// fence.proxy.async.shared::cta: ordinary shared-memory writes before it are seen by wgmma and TMA stores after it
MDI_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// fence.proxy.async: the same for the shared memory of all blocks of the cluster
MDI_DEVICE void fence_proxy_async_cluster() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- warps, registers, clusters -----------------------------------------------------------------------------------

// setmaxnreg.inc.sync.aligned.u32: whole warpgroup; 24..256 in steps of 8. The kernel needs __launch_bounds__(threads, 1)
// or ptxas ignores it (C7508).
template <int kRegisters>
MDI_DEVICE void setmaxnreg_inc() {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg: 24..256 in steps of 8");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.dec.sync.aligned.u32
template <int kRegisters>
MDI_DEVICE void setmaxnreg_dec() {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg: 24..256 in steps of 8");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16: lane l gives the address of row l % 8 of matrix l / 8
MDI_DEVICE void stmatrix_x4(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans.shared.b16
MDI_DEVICE void stmatrix_x4_trans(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// elect.sync: true in one lane of the warp
MDI_DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// %cluster_ctarank
MDI_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// mapa.shared::cluster.u32: address of the same shared-memory offset in block `rank` of the cluster
MDI_DEVICE uint32_t map_to_rank(uint32_t smem, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(smem), "r"(rank));
    return mapped;
}

// st.shared::cluster: `address` comes from map_to_rank
MDI_DEVICE void store_cluster(uint32_t address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
MDI_DEVICE void store_cluster(uint32_t address, float2 v) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
MDI_DEVICE void store_cluster(uint32_t address, const uint4& v) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// barrier.cluster.arrive.release.aligned
MDI_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// barrier.cluster.wait.acquire.aligned
MDI_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

}  // namespace mdi::ptx
#endif
