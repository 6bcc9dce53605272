// Params structs and launcher declarations of the attention kernels. No torch in here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::attention {

}  // namespace mdi::attention
