// Accumulators -> shared memory -> global memory.
//
// Each warp stores its own 16 rows, 128 bytes of columns a chunk: convert, stmatrix into a 2 KiB
// buffer with the 128-byte swizzle, TMA store, or TMA add where results accumulate. Warps need no barrier among each other, so one warp's stores
// overlap its neighbours' conversions and the next tile's loads.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gemm.h"
#include "mma_sm90.cuh"
#include "ragged.cuh"
#include "schedule.cuh"

namespace fusegen {

inline constexpr int kChunkRows = 16;
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkBytes = kChunkRows * kChunkColumns * 2;

// What is stored, and how much of a row fills the swizzle's 128 bytes.
template <class Element, Store store>
using Stored = std::conditional_t<is_wide(store), float, Element>;
template <class Result>
inline constexpr int kStoreColumns = 128 / sizeof(Result);

__device__ inline uint32_t round_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline uint32_t round_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline float2 widen_pair(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ inline float2 widen_pair(__half2 pair) { return __half22float2(pair); }

template <class Element>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using type = __half2;
};

// One warp's ring of store buffers.
template <int Buffers>
struct StoreRing {
  uint32_t base;  // shared address, 1024-byte aligned as the swizzle wants
  uint32_t slot = 0;

  __device__ uint32_t buffer() const { return base + slot * kChunkBytes; }

  __device__ void wait_free(uint32_t lane) const {
    if (lane == 0) cute::tma_store_wait<Buffers - 1>();
    __syncwarp();
  }

  __device__ void advance() { slot = slot == Buffers - 1 ? 0 : slot + 1; }
};

// What fprop adds.
template <class Element>
struct Bias {
  const Element* values;    // [groups, n] or nullptr
  const float* row_scales;  // [tokens]; read for Store::scaled_bias alone
};

// Factors of the bias in the two rows that a thread holds.
struct RowScales {
  float first, second;

  // Of rows lane / 4 and that + 8 of a chunk whose first row of the tile is `row`. Rows past the
  // group's end are never stored, so they may have its last token's.
  __device__ static RowScales of(const float* row_scales, const Tile& tile, int32_t row,
                                 uint32_t lane) {
    const int32_t last = tile.begin + tile.tokens - 1;
    const int32_t token = tile.begin + tile.row + row + int32_t(lane / 4);
    return {__ldg(row_scales + min(token, last)), __ldg(row_scales + min(token + 8, last))};
  }
};

// Adds bias[0..64) of this chunk to the 32 accumulators of a thread; columns beyond are not read.
template <bool scaled, class Element>
__device__ void add_bias(float (&out)[kChunkColumns / 2], const Element* bias, RowScales scales,
                         int32_t columns, uint32_t lane) {
  using Pair = typename PairOf<Element>::type;
#pragma unroll
  for (int i = 0; i < kChunkColumns / 8; ++i) {
    const int32_t column = i * 8 + (lane % 4) * 2;
    if (column >= columns) continue;
    const float2 value = widen_pair(*reinterpret_cast<const Pair*>(bias + column));
    if constexpr (scaled) {
      out[i * 4 + 0] += scales.first * value.x;
      out[i * 4 + 1] += scales.first * value.y;
      out[i * 4 + 2] += scales.second * value.x;
      out[i * 4 + 3] += scales.second * value.y;
    } else {
      out[i * 4 + 0] += value.x;
      out[i * 4 + 1] += value.y;
      out[i * 4 + 2] += value.x;
      out[i * 4 + 3] += value.y;
    }
  }
}

// 16 rows by 64 columns into a swizzled buffer. In the accumulator layout a thread holds, per 8
// columns, two neighbours of row lane / 4 and two of that row + 8: one 8x8 matrix each.
template <class Element>
__device__ void stage_chunk(const float (&in)[kChunkColumns / 2], uint32_t buffer, uint32_t lane) {
  const uint32_t row = lane % 16;
#pragma unroll
  for (int i = 0; i < kChunkColumns / 16; ++i) {
    const uint32_t unit = (i * 2 + lane / 16) ^ (row % 8);
    const uint32_t address = buffer + row * 128 + unit * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(round_pair(in[i * 8 + 0], in[i * 8 + 1], Element())),
                 "r"(round_pair(in[i * 8 + 2], in[i * 8 + 3], Element())),
                 "r"(round_pair(in[i * 8 + 4], in[i * 8 + 5], Element())),
                 "r"(round_pair(in[i * 8 + 6], in[i * 8 + 7], Element()))
                 : "memory");
  }
}

// fp32: 16 rows by 32 columns, pairs of neighbours as accumulators are held.
__device__ inline void stage_chunk(const float (&in)[kStoreColumns<float> / 2], uint32_t buffer,
                                   uint32_t lane) {
#pragma unroll
  for (int i = 0; i < kStoreColumns<float> / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = lane / 4 + half * 8;
      const uint32_t unit = (i * 2 + lane % 4 / 2) ^ (row % 8);
      const uint32_t address = buffer + row * 128 + unit * 16 + lane % 2 * 8;
      const float first = in[i * 4 + half * 2], second = in[i * 4 + half * 2 + 1];
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
                   : "memory");
    }
  }
}

template <bool Ragged, bool add>
__device__ void store_box(const CUtensorMap* map, uint32_t buffer, BoxCoordinates at) {
  static_assert(!Ragged || !add, "results that accumulate are whole matrices");
  if constexpr (add) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map),
        "r"(buffer), "r"(at.x), "r"(at.y), "r"(at.z)
        : "memory");
  } else if constexpr (Ragged) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map),
        "r"(buffer), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map),
        "r"(buffer), "r"(at.x), "r"(at.y), "r"(at.z)
        : "memory");
  }
}

// A destination box in terms of the tile: rows of a group of tokens, or rows of one matrix of E.
template <bool Ragged>
__device__ BoxCoordinates store_coordinates(const Tile& tile, int32_t row, int32_t column) {
  if constexpr (Ragged) return ragged_coordinates(column, tile.begin, tile.tokens, row);
  return {column, row, tile.group, 0};
}

// Stores one wave of a warp: 16 rows from `row` (in the tile) by all N columns. `bias` is that of
// the tile's group, or has no values.
template <class Element, Store store, bool Ragged, int N, int Buffers>
__device__ void store_wave(const float (&values)[N / 2], StoreRing<Buffers>& ring,
                           const CUtensorMap* map, const Tile& tile, int32_t row,
                           int32_t columns, const Bias<Element> bias, uint32_t lane) {
  using Result = Stored<Element, store>;
  constexpr int kColumns = kStoreColumns<Result>;
  constexpr bool kScaled = store == Store::scaled_bias;
  static_assert(N % kColumns == 0);
  if (row >= tile.rows) return;
  RowScales scales{1.0f, 1.0f};
  if constexpr (kScaled) {
    if (bias.values != nullptr) scales = RowScales::of(bias.row_scales, tile, row, lane);
  }
#pragma unroll
  for (int chunk = 0; chunk < N / kColumns; ++chunk) {
    const int32_t column = tile.column + chunk * kColumns;
    if (column >= columns) return;
    float out[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) out[i] = values[chunk * (kColumns / 2) + i];
    if constexpr (store == Store::io || kScaled) {
      if (bias.values != nullptr) {
        add_bias<kScaled>(out, bias.values + column, scales, columns - column, lane);
      }
    }
    ring.wait_free(lane);
    if constexpr (is_wide(store)) {
      stage_chunk(out, ring.buffer(), lane);
    } else {
      stage_chunk<Element>(out, ring.buffer(), lane);
    }
    cute::tma_store_fence();
    __syncwarp();
    if (lane == 0) {
      store_box<Ragged, adds(store)>(
          map, ring.buffer(), store_coordinates<Ragged>(tile, tile.row + row, column));
      cute::tma_store_arrive();
    }
    ring.advance();
  }
}

}  // namespace fusegen
