// Accumulators -> shared memory -> global memory.
//
// Each warp stores its own 16 rows, 128 bytes of columns a chunk: convert, stmatrix into a 2 KiB
// buffer with the 128-byte swizzle, TMA store, or TMA add where results accumulate. Warps need no
// barrier among each other, so one warp's stores overlap its neighbours' conversions and the next
// tile's loads.
//
// The L2 cache, where TMA adds, does so at two thirds of the speed at which memory is read and
// written. Nobody waits for it, which is best where tiles take long; where they are so short that
// memory is what bounds them, their old values come into the buffers first and the warps add.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/fragment/pairs.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/sink/stored.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

inline constexpr int kChunkRows = 16;
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkBytes = kChunkRows * kChunkColumns * 2;

// How much of a row fills the swizzle's 128 bytes.
template <class Result>
inline constexpr int kStoreColumns = 128 / sizeof(Result);

// 16 rows by 64 columns into a swizzled buffer, or added to what is there. In the accumulator layout
// a thread holds, per 8 columns, two neighbours of row lane / 4 and two of that row + 8: one 8x8
// matrix each.
template <bool add, class Element>
__device__ void stage_chunk(const float (&in)[kChunkColumns / 2], uint32_t buffer, uint32_t lane) {
  const uint32_t row = lane % 16;
#pragma unroll
  for (int i = 0; i < kChunkColumns / 16; ++i) {
    const uint32_t unit = (i * 2 + lane / 16) ^ (row % 8);
    const uint32_t address = buffer + row * 128 + unit * 16;
    uint32_t out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      out[j] = round_pair(in[i * 8 + j * 2], in[i * 8 + j * 2 + 1], Element());
    }
    if constexpr (add) {
      uint32_t old[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(old[0]), "=r"(old[1]), "=r"(old[2]), "=r"(old[3])
                   : "r"(address)
                   : "memory");
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = add_pairs<Element>(old[j], out[j]);
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3])
                 : "memory");
  }
}

// fp32: 16 rows by 32 columns, pairs of neighbours as accumulators are held.
template <bool add>
__device__ void stage_chunk(const float (&in)[kStoreColumns<float> / 2], uint32_t buffer,
                            uint32_t lane) {
#pragma unroll
  for (int i = 0; i < kStoreColumns<float> / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = lane / 4 + half * 8;
      const uint32_t unit = (i * 2 + lane % 4 / 2) ^ (row % 8);
      const uint32_t address = buffer + row * 128 + unit * 16 + lane % 2 * 8;
      float2 out{in[i * 4 + half * 2], in[i * 4 + half * 2 + 1]};
      if constexpr (add) {
        const float2 old = load_shared_pair(address);
        out = {old.x + out.x, old.y + out.y};
      }
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(out.x), "f"(out.y)
                   : "memory");
    }
  }
}

// Whether a tile takes less time to multiply than to add to memory.
__device__ inline bool is_short(const Tile& tile) {
  constexpr int32_t kShort = 1280;  // tokens; measured: 1024 to 1536, with 8 and 16 bits
  return tile.k > 0 && tile.k <= kShort;
}

// How one warp stores its part of every tile, 16 rows of each wave by N columns, through a ring of
// buffers.
template <class Element, Store store, bool Ragged, int Waves, int N, int Buffers>
struct WarpStores {
  using Result = Stored<Element, store>;
  static constexpr int kColumns = kStoreColumns<Result>;
  static_assert(N % kColumns == 0);

  const CUtensorMap* map;
  uint8_t* buffers;     // [Buffers] of kChunkBytes, 1024-byte aligned as the swizzle wants
  CopyBarrier* loaded;  // [Buffers]: old values have come; of kernels that add
  uint32_t lane;
  uint32_t slot = 0;      // the next result's buffer
  uint32_t parities = 0;  // of `loaded`, a bit each
  bool loads = false;     // the tile's old values come; the next of them
  uint32_t next_slot = 0;
  int32_t next_row = 0, end_row = 0;
  int32_t next_column = 0;

  // Before a tile is multiplied. Old values come meanwhile, as many as the buffers hold. `row` is
  // the warp's first in the tile.
  __device__ void start(const Tile& tile, int32_t row, int32_t columns) {
    loads = adds(store) && is_short(tile);
    if (!loads || lane != 0) return;
    cute::tma_store_wait<0>();
    next_slot = slot;
    next_row = row;
    end_row = min(row + Waves * kMmaRows, tile.rows);
    next_column = tile.column;
    for (int i = 0; i < Buffers; ++i) load_next(tile, columns);
  }

  // When it has been: parts are visited, then stored.
  template <class Values, class Visits>
  __device__ void finish(const Values& fragment, const Tile& tile, int32_t row, int32_t columns,
                         Visits& visitors) {
#pragma unroll
    for (int wave = 0; wave < Waves; ++wave, row += kMmaRows) {
      if (row >= tile.rows) return;
      if (adds(store) && loads) {
        store_wave<adds(store)>(fragment, wave, tile, row, columns, visitors);
      } else {
        store_wave<false>(fragment, wave, tile, row, columns, visitors);
      }
    }
  }

 private:
  // 16 rows from `row`.
  template <bool Loaded, class Values, class Visits>
  __device__ void store_wave(const Values& fragment, int wave, const Tile& tile, int32_t row,
                             int32_t columns, Visits& visitors) {
#pragma unroll
    for (int chunk = 0; chunk < N / kColumns; ++chunk) {
      const int32_t column = tile.column + chunk * kColumns;
      if (column >= columns) return;
      const auto part = fragment.template part<kColumns>(wave, chunk);
      visitors.visit_part(part, tile, {row, column});
      wait_for_buffer<Loaded>();
      const uint32_t buffer = cute::cast_smem_ptr_to_uint(buffers) + slot * kChunkBytes;
      if constexpr (is_wide(store)) {
        stage_chunk<Loaded>(part.values[0], buffer, lane);
      } else {
        stage_chunk<Loaded, Element>(part.values[0], buffer, lane);
      }
      cute::tma_store_fence();
      __syncwarp();
      if (lane == 0) {
        store_box<Ragged, adds(store) && !Loaded>(map, buffer, coordinates(tile, row, column));
        cute::tma_store_arrive();
        if constexpr (Loaded) load_behind(tile, columns);
      }
      slot = after(slot);
    }
  }

  __device__ static uint32_t after(uint32_t slot) { return slot == Buffers - 1 ? 0 : slot + 1; }

  // A destination box: rows of a group of tokens, or rows of one matrix of E.
  __device__ static BoxCoordinates coordinates(const Tile& tile, int32_t row, int32_t column) {
    if constexpr (Ragged) {
      return ragged_coordinates(column, tile.begin, tile.tokens, tile.row + row);
    }
    return {column, tile.row + row, tile.group, 0};
  }

  template <bool Loaded>
  __device__ void wait_for_buffer() {
    if constexpr (Loaded) {
      loaded[slot].wait(parities >> slot & 1);
      parities ^= 1u << slot;
    } else {
      if (lane == 0) cute::tma_store_wait<Buffers - 1>();
      __syncwarp();
    }
  }

  // Into the buffer before the one just stored from, whose own store need not be waited for.
  __device__ void load_behind(const Tile& tile, int32_t columns) {
    if (Buffers > 1 && next_slot == slot) return;  // the tile's first: there is none behind
    cute::tma_store_wait<Buffers == 1 ? 0 : 1>();
    load_next(tile, columns);
  }

  __device__ void load_next(const Tile& tile, int32_t columns) {
    if (next_row >= end_row) return;
    CopyBarrier& barrier = loaded[next_slot];
    barrier.arrive_and_expect_tx(kChunkBytes);
    load_box<3>(map, barrier, buffers + next_slot * kChunkBytes,
                coordinates(tile, next_row, next_column));
    next_slot = after(next_slot);
    next_column += kColumns;
    if (next_column >= min(tile.column + N, columns)) {
      next_column = tile.column;
      next_row += kMmaRows;
    }
  }
};

}  // namespace fusegen
