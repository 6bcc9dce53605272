// Params structs and launcher declarations of the elementwise kernels. No torch in here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "elementwise/expand.h"

namespace mdi::elementwise {

}  // namespace mdi::elementwise
