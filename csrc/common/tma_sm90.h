// Host side of TMA: tensor maps for tma_load_* (ptx_sm90.cuh). No torch; libcuda is not linked, the
// encoder is fetched from the driver at run time. Pass a map to a kernel by value: `const __grid_constant__ CUtensorMap`.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mdi {

enum class TmaType { kUint8, kInt32, kBf16, kFloat32 };  // e4m3 and packed fp4 travel as bytes

struct TmaTensor {
    const char* what;         // op and tensor, for the error message
    TmaType type;
    const void* base;         // 16-byte aligned
    int rank;                 // 2..5
    uint64_t sizes[5];        // elements, dimension 0 contiguous
    uint64_t stride_bytes[4]; // BYTES from one index of dimension 1, 2, ... to the next; multiples of 16
    uint32_t box[5];          // elements of the tile, each <= 256; box[0] bytes <= the swizzle span when swizzled
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    CUtensorMapL2promotion l2 = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
};

// Elements outside the tensor are read as zero and not written. Throws with the driver's code and the numbers.
inline CUtensorMap make_tensor_map(const TmaTensor& tensor) {
    using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static const Encode encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == nullptr)
            throw std::runtime_error("mini_deepinfer: the CUDA driver has no cuTensorMapEncodeTiled (needs CUDA >= 12.0)");
        return reinterpret_cast<Encode>(entry);
    }();
    CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    switch (tensor.type) {
        case TmaType::kUint8: type = CU_TENSOR_MAP_DATA_TYPE_UINT8; break;
        case TmaType::kInt32: type = CU_TENSOR_MAP_DATA_TYPE_INT32; break;
        case TmaType::kBf16: type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; break;
        case TmaType::kFloat32: type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32; break;
    }
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result =
        encode(&map, type, static_cast<cuuint32_t>(tensor.rank), const_cast<void*>(tensor.base), tensor.sizes,
               tensor.stride_bytes, tensor.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, tensor.swizzle, tensor.l2,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        std::string text = std::string(tensor.what) + ": no tensor map (driver error " + std::to_string(result) + "), sizes";
        for (int i = 0; i < tensor.rank; ++i) text += " " + std::to_string(tensor.sizes[i]);
        text += ", stride bytes";
        for (int i = 0; i + 1 < tensor.rank; ++i) text += " " + std::to_string(tensor.stride_bytes[i]);
        text += ", box";
        for (int i = 0; i < tensor.rank; ++i) text += " " + std::to_string(tensor.box[i]);
        throw std::runtime_error(text);
    }
    return map;
}

}  // namespace mdi
