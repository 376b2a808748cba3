// Names for what kernels under test are instantiated with.
#pragma once

#include "fusegen/quantize/config.cuh"

namespace fusegen {

using Tensor = Scaling<kWhole, kWhole, float, Rule::ratio>;
using Row = Scaling<1, kWhole, float, Rule::ratio>;
template <int rows, int columns>
using Ratio = Scaling<rows, columns, float, Rule::ratio>;
template <int rows, int columns>
using Pow2 = Scaling<rows, columns, E8M0, Rule::ratio>;
template <int rows, int columns>
using Mx = Scaling<rows, columns, E8M0, Rule::mx>;
template <int rows, int columns>
using Nv = Scaling<rows, columns, E4M3, Rule::nvfp4>;

}  // namespace fusegen
