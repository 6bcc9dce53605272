// Params structs and launcher declarations of the moe kernels. No torch in here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::moe {

}  // namespace mdi::moe
