// Parts of results on their way from registers through shared memory: 16 rows of 128 bytes, which
// stmatrix writes into a buffer of 2 KiB in the 128-byte swizzle that TMA reads.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/fragment/pairs.cuh"
#include "fusegen/load/tma.sm90.cuh"

namespace fusegen {

inline constexpr int kChunkRows = 16;
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkBytes = kChunkRows * kChunkColumns * 2;

// How much of a row fills the swizzle's 128 bytes.
template <class Result>
inline constexpr int kStoreColumns = 128 / sizeof(Result);

// Columns of a part of half a tile of `TileN`, which has whole parts, and how those are swizzled.
template <int TileN>
inline constexpr int kGatedColumns =
    TileN / 2 % kChunkColumns == 0 ? kChunkColumns : kChunkColumns / 2;
template <int TileN>
inline constexpr CUtensorMapSwizzle kGatedSwizzle = kGatedColumns<TileN> == kChunkColumns
                                                        ? CU_TENSOR_MAP_SWIZZLE_128B
                                                        : CU_TENSOR_MAP_SWIZZLE_64B;

// The buffers of one warp, taken in turns.
template <int Buffers>
struct ChunkRing {
  uint8_t* buffers;  // [Buffers] of kChunkBytes, 1024-byte aligned as the swizzle wants
  uint32_t slot = 0;

  __device__ explicit ChunkRing(uint8_t* buffers) : buffers(buffers) {}

  __device__ static uint32_t after(uint32_t slot) { return slot == Buffers - 1 ? 0 : slot + 1; }
  __device__ static uint32_t before(uint32_t slot) { return slot == 0 ? Buffers - 1 : slot - 1; }

  __device__ uint32_t address() const {
    return shared_address(buffers) + slot * kChunkBytes;
  }

  __device__ void advance() { slot = after(slot); }
};

// 16-bit results into a buffer, rounded and changed, where a change loads by what is there. Per 8
// columns a lane holds two pairs of a fragment, one 8x8 matrix each. Rows of half the columns are
// 64 bytes in the swizzle of as many.
template <class Result, int Columns = kStoreColumns<Result>>
struct WriteChunk {
  static_assert(sizeof(Result) == 2 && (Columns == kChunkColumns || Columns == kChunkColumns / 2));
  using Rounded = std::array<uint32_t, Columns / 4>;  // of a lane: of its first row, its second, ...

  template <bool Loads, class Change>
  __device__ static void run(const Fragment<Columns>& fragment, uint32_t buffer,
                             const Change& change) {
    const float* const in = fragment.values[0];
#pragma unroll
    for (int i = 0; i < Columns / 16; ++i) {
      const uint32_t address = address_of(buffer, fragment.lane, i);
      uint32_t old[4] = {}, out[4];
      if constexpr (Loads) load_matrices(address, old);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[j] = change(round_pair(in[i * 8 + j * 2], in[i * 8 + j * 2 + 1], Result()), old[j]);
      }
      store_matrices(address, out);
    }
  }

  // The same in two steps, for results that are written more than once.
  __device__ static Rounded round(const Fragment<Columns>& fragment) {
    const float* const in = fragment.values[0];
    Rounded out;
#pragma unroll
    for (int i = 0; i < Columns / 4; ++i) {
      out[i] = round_pair(in[i * 2], in[i * 2 + 1], Result());
    }
    return out;
  }

  template <class Change>
  __device__ static void write(const Rounded& rounded, uint32_t lane, uint32_t buffer,
                               const Change& change) {
#pragma unroll
    for (int i = 0; i < Columns / 16; ++i) {
      uint32_t out[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = change(rounded[i * 4 + j], 0);
      store_matrices(address_of(buffer, lane, i), out);
    }
  }

 private:
  static constexpr int kUnits = Columns / 8;  // of 16 bytes, of a row
  static constexpr int kRows = 8 / kUnits;    // whose units change places alike

  // Of the lane's row of the two 8x8 matrices `i` and the next ones.
  __device__ static uint32_t address_of(uint32_t buffer, uint32_t lane, int i) {
    const uint32_t row = lane % 16;
    const uint32_t unit = (i * 2 + lane / 16) ^ (row / kRows % kUnits);
    return buffer + row * (kUnits * 16) + unit * 16;
  }

  __device__ static void load_matrices(uint32_t address, uint32_t (&old)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(old[0]), "=r"(old[1]), "=r"(old[2]), "=r"(old[3])
                 : "r"(address)
                 : "memory");
  }

  __device__ static void store_matrices(uint32_t address, const uint32_t (&out)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3])
                 : "memory");
  }
};

// fp32 results, pair after pair.
template <>
struct WriteChunk<float> {
  template <bool Loads, class Change>
  __device__ static void run(const Fragment<kStoreColumns<float>>& fragment, uint32_t buffer,
                             const Change& change) {
    fragment.for_each_pair([&](int32_t row, int32_t column, float first, float second) {
      const uint32_t unit = uint32_t(column / 4) ^ uint32_t(row % 8);
      const uint32_t address = buffer + row * 128 + unit * 16 + column % 4 * 4;
      float2 out{first, second};
      if constexpr (Loads) {
        const float2 old = load_shared_pair(address);
        out = {changed(change, out.x, old.x), changed(change, out.y, old.y)};
      }
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(out.x), "f"(out.y)
                   : "memory");
    });
  }

 private:
  template <class Change>
  __device__ static float changed(const Change& change, float value, float old) {
    return __uint_as_float(change(__float_as_uint(value), __float_as_uint(old)));
  }
};

}  // namespace fusegen
