#pragma once

#include "cluster.h"

namespace cute {

inline uint32_t cast_smem_ptr_to_uint(const void* pointer) { return sim::shared_address(pointer); }

}  // namespace cute
