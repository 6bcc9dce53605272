// Kernel launch with the checks every launcher wants. Included by .cu files only; no torch.
#pragma once
#if !defined(MDI_CUDA_ON_CPU)  // tests/host/cuda_on_cpu.h brings its own mdi::launch
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/math.h"

namespace mdi {

struct LaunchConfig {
    dim3 grid;                // grid.x == 0 launches nothing
    dim3 block;
    size_t smem_bytes = 0;    // dynamic shared memory; above 32 KiB the kernel's limit is raised
    cudaStream_t stream = nullptr;
    unsigned cluster = 1;     // thread blocks of a cluster along x
};

// The block's dynamic shared memory, as declared once for all kernels.
#if defined(__CUDACC__)
MDI_DEVICE char* dynamic_smem() {
    extern __shared__ __align__(1024) char mdi_dynamic_smem[];
    return mdi_dynamic_smem;
}
#endif

[[noreturn]] inline void throw_cuda_error(const char* what, cudaError_t error, const std::string& detail) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")" +
                             detail);
}

inline void check_cuda(const char* what, cudaError_t error) {
    if (error != cudaSuccess) throw_cuda_error(what, error, "");
}

// launch("attention.sparse", kernel, {grid, block, smem_bytes, stream}, params...);
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
    if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return;
    const auto detail = [&] {
        const auto dims = [](dim3 d) {
            return std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z);
        };
        int device = -1, major = 0, minor = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
        return " launching grid (" + dims(config.grid) + ") block (" + dims(config.block) + ") with " +
               std::to_string(config.smem_bytes) + " bytes of shared memory on device " + std::to_string(device) +
               ", sm_" + std::to_string(major) + std::to_string(minor);
    };
    if (config.smem_bytes > 32 * 1024) {  // the default limit of 48 KiB includes the kernel's static shared memory
        const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(config.smem_bytes));
        if (error != cudaSuccess) {
            cudaGetLastError();
            throw_cuda_error(name, error, detail());
        }
    }
    cudaLaunchConfig_t launch_config = {};
    launch_config.gridDim = config.grid;
    launch_config.blockDim = config.block;
    launch_config.dynamicSmemBytes = config.smem_bytes;
    launch_config.stream = config.stream;
    cudaLaunchAttribute attribute = {};
    if (config.cluster > 1) {
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = config.cluster;
        attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
        launch_config.attrs = &attribute;
        launch_config.numAttrs = 1;
    }
    const cudaError_t error = cudaLaunchKernelEx(&launch_config, kernel, Params(args)...);
    if (error != cudaSuccess) {
        cudaGetLastError();  // clears the non-sticky error so that the next call does not report it again
        throw_cuda_error(name, error, detail());
    }
}

}  // namespace mdi
#endif
