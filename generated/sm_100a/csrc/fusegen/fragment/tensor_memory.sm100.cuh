// Values of a GEMM in tensor memory, as the warp that stores them sees them.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/mainloop/tcgen05.sm100.cuh"

namespace fusegen {

// 32 rows by `Columns` columns: two strips of a fragment, whose parts come into registers when they
// are asked for, in the place of the one before; those of either half of the columns into registers of
// their own. A tile without a contraction has zeros.
template <int Columns>
struct TensorFragment {
  static constexpr int kColumns = Columns;
  static constexpr int kStrips = 2;
  static constexpr int kStripStep = 16;

  uint32_t memory;  // address of the first row's first column
  uint32_t lane;
  bool zero;
  float (&registers)[2][32];

  // Columns [index Width, (index + 1) Width) of one strip.
  template <int Width>
  __device__ Fragment<Width> part(int strip, int index) const {
    static_assert(Columns % Width == 0 && Width <= 64);
    const int half = index * Width >= Columns / 2;
    auto& values = reinterpret_cast<float(&)[1][Width / 2]>(registers[half]);
    if (zero) {
#pragma unroll
      for (float& value : values[0]) value = 0.f;
    } else {
      tcgen05::load_strip(values[0], memory + (uint32_t(strip) * kStripStep << 16) + index * Width);
    }
    return {values, lane, strip, index * Width};
  }
};

}  // namespace fusegen
