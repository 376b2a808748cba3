// The arithmetic of quantize/math.cuh and the tile search of quantize/places.cuh over arrays.
#include "fusegen/quantize/math.cuh"
#include "fusegen/quantize/places.cuh"

using namespace fusegen;

namespace {

template <class Format>
void encode_all(const float* values, uint8_t* codes, long count) {
  for (long i = 0; i < count; ++i) codes[i] = uint8_t(encode<Format>(values[i]));
}

template <class Format>
void decode_all(float* values) {
  for (uint32_t code = 0; code < 1u << Format::kBits; ++code) values[code] = decode<Format>(code);
}

// The code of a value as the kernels put it together: of its magnitude, and its sign; NaN has none.
uint8_t signed_code(float value, uint32_t code) {
  return uint8_t(with_signs(code & 0xF, value != value ? 0 : bits_of(value) >> 28) & 0xF);
}

}  // namespace

extern "C" {

void encode_e4m3(const float* values, uint8_t* codes, long count) {
  encode_all<E4M3>(values, codes, count);
}
void encode_e5m2(const float* values, uint8_t* codes, long count) {
  encode_all<E5M2>(values, codes, count);
}
void encode_e2m1(const float* values, uint8_t* codes, long count) {
  for (long i = 0; i < count; ++i) {
    const float magnitude = fabsf(values[i]);
    codes[i] = signed_code(values[i], nearest_e2m1<1>(&magnitude));
  }
}
void decode_e4m3(float* values) { decode_all<E4M3>(values); }
void decode_e5m2(float* values) { decode_all<E5M2>(values); }
void decode_e2m1(float* values) { decode_all<E2M1>(values); }

void to_bfloat16(const float* values, float* rounded, long count) {
  for (long i = 0; i < count; ++i) rounded[i] = round_to_bfloat16(values[i]);
}

void ratio_scales(const float* amaxes, float* scales, long count, float max, float epsilon,
                  float largest, int clear_mantissa) {
  for (long i = 0; i < count; ++i) {
    scales[i] = scale_from_amax(amaxes[i], max, epsilon, largest, clear_mantissa != 0);
  }
}

void mx_scales(const float* amaxes, int32_t* codes, float* factors, long count, int format,
               int down) {
  const auto fill = [&](auto of) {
    using Format = decltype(of);
    for (long i = 0; i < count; ++i) {
      const float amax = amaxes[i];
      codes[i] = int32_t(down ? e8m0_round_down<Format>(amax)
                              : e8m0_round_up(amax * (1.0f / Format::kMax)));
      factors[i] = e8m0_inverse(uint32_t(codes[i]));
    }
  };
  if (format == 0) return fill(E4M3{});
  if (format == 1) return fill(E5M2{});
  fill(E2M1{});
}

void e8m0_values(float* values) {
  for (uint32_t e = 0; e < 256; ++e) values[e] = e8m0_value(e);
}

void nvfp4_scales(const float* amaxes, const float* tensor_amaxes, uint8_t* codes, float* factors,
                  long count) {
  for (long i = 0; i < count; ++i) {
    const float tensor = nvfp4_tensor_scale(tensor_amaxes[i]);
    codes[i] = uint8_t(nvfp4_block_code(amaxes[i], tensor));
    factors[i] = nvfp4_block_scale(codes[i], 1.0f / tensor);
  }
}

void random_words(const uint32_t* counters, const uint32_t* keys, uint32_t* words, long count) {
  for (long i = 0; i < count; ++i) {
    const uint32_t* c = counters + 4 * i;
    PhiloxWords drawn[1] = {{{c[0], c[1], c[2], c[3]}}};
    philox(drawn, keys[2 * i], keys[2 * i + 1]);
    for (int w = 0; w < 4; ++w) words[4 * i + w] = drawn[0].words[w];
  }
}

void stochastic_codes(const float* values, const uint8_t* bytes, uint8_t* codes, long count) {
  for (long first = 0; first < count; first += 8) {
    float magnitudes[8] = {};
    uint32_t random[2] = {};
    const int some = int(count - first < 8 ? count - first : 8);
    for (int i = 0; i < some; ++i) magnitudes[i] = fabsf(values[first + i]);
    memcpy(random, bytes + first, size_t(some));
    const uint32_t word = stochastic_e2m1(magnitudes, random);
    for (int i = 0; i < some; ++i) codes[first + i] = signed_code(values[first + i], word >> (4 * i));
  }
}

void transform_runs(float* runs, long count) {
  for (long i = 0; i < count; ++i) {
    float run[kHadamard];
    memcpy(run, runs + kHadamard * i, sizeof run);
    hadamard(run);
    memcpy(runs + kHadamard * i, run, sizeof run);
  }
}

// The same by the form that gives pairs.
void transform_runs_to_pairs(float* runs, long count) {
  for (long i = 0; i < count; ++i) {
    float run[kHadamard];
    uint32_t pairs[kHadamard / 2];
    memcpy(run, runs + kHadamard * i, sizeof run);
    hadamard(run, pairs);
    for (int k = 0; k < kHadamard; ++k) {
      runs[kHadamard * i + k] = float_of((k % 2 == 0 ? pairs[k / 2] << 16 : pairs[k / 2]) & 0xFFFF0000u);
    }
  }
}

// The slices of a tile that a warp finds: every lane's part one after the other. found: group, begin,
// length, row, place of the slice and places its group owns from there with `align`, scale block and
// whether the group owns it with 16.
void find_slices(const int64_t* group_sizes, int rows, int group_count, int index, int align,
                 int32_t* found) {
  const RowGroups groups{group_sizes, rows, group_count};
  const Space space{align, 0}, blocks{kSliceRows, 0};
  Slice slices[kSlices];
  int32_t begin = 0;
  const auto mark = [&](int32_t group, int32_t first, int32_t end) {
    mark_slices(groups, space, index * kTileRows, group, first, end, slices);
  };
  for (int32_t i = 0; i * LaneGroups::kMost < group_count; ++i) {
    const LaneGroups own = lane_groups(groups, i / 32 * kChunk, i % 32);
    own.each(begin, rows, mark);
    begin = sum_to(begin, own.all(rows), rows);
  }
  mark(group_count, begin, rows);
  for (const Slice& slice : slices) {
    const int32_t facts[] = {slice.group,
                             slice.begin,
                             slice.length,
                             slice.row,
                             place_of(groups, slice, space),
                             owned_places(groups, slice, space),
                             int32_t(block_of<kSliceRows>(groups, slice)),
                             owned_places(groups, slice, blocks) > 0};
    memcpy(found, facts, sizeof facts);
    found += 8;
  }
}

int count_tiles(const int64_t* group_sizes, int rows, int group_count, int align) {
  return row_tiles({group_sizes, rows, group_count}, {align, 0});
}

}  // extern "C"
