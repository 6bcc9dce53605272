// Tensors -> checks -> Params -> launch for the moe ops. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "moe/moe.h"
#endif

namespace mdi::moe {

inline void define_moe(Library& m) { (void)m; }

#ifdef MDI_WITH_CUDA
inline void implement_moe(Library& m) { (void)m; }
#endif

}  // namespace mdi::moe
