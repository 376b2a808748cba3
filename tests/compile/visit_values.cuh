// One warp's fragment of a tile on the CPU: filled from a matrix by the coordinates of its values,
// visited, and put back part by part.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/fragment/pairs.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/launch/stream.h"
#include "fusegen/sink/store_fragment.cuh"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/visit/gemm_visitors.cuh"
#include "fusegen/visit/group_amaxes.cuh"
#include "fusegen/visit/scales.cuh"

namespace visiting {

using namespace fusegen;

// What test_visitors.py passes.
struct Arguments {
  Tile tile;
  Place place;
  Shape shape;
  int32_t scales;     // 0 none, 1 of tensors, 2 of rows and columns, 3 amaxes of groups
  int32_t per_group;  // of tensors
  int32_t half;       // elements of the bias: __half, not __nv_bfloat16
  const float* sums;  // [tile's rows, columns]
  float* results;     // the same
  const float* scale_a;
  const float* scale_b;
  const void* bias;
  const float* row_scales;
};

// Parts of so many columns into the matrix; what the tile and the result have not is not written.
template <int Columns>
struct MatrixSink {
  static constexpr int kColumns = Columns;

  float* results;
  int32_t columns;

  template <class Function>
  void with(Function function) {
    function(*this);
  }

  void put(const Fragment<Columns>& part, const Tile& tile, Place place) {
    part.for_each_pair([&](int32_t row, int32_t column, float first, float second) {
      row += place.row;
      column += place.column;
      if (row >= tile.rows || column >= columns) return;
      results[row * columns + column] = first;
      results[row * columns + column + 1] = second;
    });
  }
};

template <class Values, int Width, class Visits>
void visit(const Visits visits, const Arguments in, const int32_t columns) {
  float registers[Values::kStrips][Values::kCount];
  const Values fragment{registers, threadIdx.x};
  for (int strip = 0; strip < Values::kStrips; ++strip) {
    for (int i = 0; i < Values::kCount; ++i) {
      const int32_t row = in.place.row + fragment.row(strip, i);
      const int32_t column = in.place.column + fragment.column(i);
      registers[strip][i] = row < in.tile.rows && column < columns
                                ? in.sums[row * columns + column]
                                : std::numeric_limits<float>::quiet_NaN();
    }
  }
  auto visitors = visits.template begin<Values>(in.tile, in.place, columns, threadIdx.x);
  MatrixSink<Width> sink{in.results, columns};
  store_fragment(fragment, visitors, sink, in.tile, in.place, columns);
}

template <class Values, int Width, Gemm kind, Store store, class Element, class... Scales>
void launch(const Arguments& in, const Scales&... scales) {
  const Bias<Element> bias{static_cast<const Element*>(in.bias), in.row_scales};
  const auto visits = gemm_visitors<kind, store>(bias, in.shape, scales...);
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(32);
  cudaLaunchKernelEx(&config, &visit<Values, Width, std::decay_t<decltype(visits)>>, visits, in,
                     kind == Gemm::fprop ? in.shape.n : in.shape.k);
}

template <class Values, int Width, Gemm kind, Store store, class Element>
void with_scales(const Arguments& in) {
  constexpr auto kLaunch = [](const Arguments& in, const auto&... scales) {
    launch<Values, Width, kind, store, Element>(in, scales...);
  };
  switch (in.scales) {
    case 0: return kLaunch(in);
    case 1: return kLaunch(in, TensorScales{in.scale_a, in.scale_b, in.per_group, in.per_group});
    case 2: return kLaunch(in, RowAndColumnScales<kind>{in.scale_a, in.scale_b, in.shape.n});
    case 3: return kLaunch(in, GroupAmaxes{in.scale_a, in.scale_b});
  }
}

template <Gemm kind, Store store, class Element>
void with_extents(const Arguments& in, int extents) {
  switch (extents) {
    case 0: return with_scales<Fragment<64>, 8, kind, store, Element>(in);
    case 1: return with_scales<Fragment<128, 4>, 128, kind, store, Element>(in);
    case 2: return with_scales<Fragment<192, 2, 64>, 64, kind, store, Element>(in);
  }
}

template <Gemm kind, Store store>
void with_element(const Arguments& in, int extents) {
  if (in.half != 0) return with_extents<kind, store, __half>(in, extents);
  with_extents<kind, store, __nv_bfloat16>(in, extents);
}

}  // namespace visiting

extern "C" int run_visitors(int gemm, int extents, const visiting::Arguments* in,
                            fusegen::Stream*, const char** call) {
  using fusegen::Gemm;
  using fusegen::Store;
  *call = nullptr;
  switch (gemm) {
    case 0: visiting::with_element<Gemm::fprop, Store::io>(*in, extents); break;
    case 1: visiting::with_element<Gemm::fprop, Store::scaled_bias>(*in, extents); break;
    case 2: visiting::with_element<Gemm::dgrad, Store::io>(*in, extents); break;
    case 3: visiting::with_element<Gemm::wgrad, Store::fp32>(*in, extents); break;
  }
  return 0;
}

// Places of the values of a fragment, [32 lanes, 2 strips, 32 values], each two neighbours at once.
extern "C" int run_coordinates(int32_t* rows, int32_t* columns, fusegen::Stream*,
                               const char** call) {
  *call = nullptr;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    float registers[2][32];
    const fusegen::Fragment<64, 2, 64> fragment{registers, lane};
    fragment.for_each_pair([&](int32_t row, int32_t column, float& first, float& second) {
      for (float* const value : {&first, &second}) {
        const long at = lane * 64 + (value - registers[0]);
        rows[at] = row;
        columns[at] = column + (value == &second);
      }
    });
  }
  return 0;
}

// Rounds pairs to 16 bits and adds them there.
extern "C" int run_round_pairs(int half, int64_t pairs, const float* values, const uint32_t* old,
                               uint32_t* rounded, uint32_t* sums, fusegen::Stream*,
                               const char** call) {
  *call = nullptr;
  const auto run = [&](auto element) {
    for (int64_t i = 0; i < pairs; ++i) {
      rounded[i] = fusegen::round_pair(values[2 * i], values[2 * i + 1], element);
      sums[i] = fusegen::add_pairs<decltype(element)>(old[i], rounded[i]);
    }
  };
  half != 0 ? run(__half()) : run(__nv_bfloat16());
  return 0;
}
