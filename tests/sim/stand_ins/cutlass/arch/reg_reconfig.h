#pragma once

namespace cutlass::arch {

template <unsigned>
void warpgroup_reg_alloc() {}
template <unsigned>
void warpgroup_reg_dealloc() {}

}  // namespace cutlass::arch
