// Params structs and launcher declarations of the indexer kernels. No torch in here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::indexer {

}  // namespace mdi::indexer
