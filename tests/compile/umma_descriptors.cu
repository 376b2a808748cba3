// What mainloop/umma.sm100.cuh makes of operands, and how tensor memory is read, against CUTLASS's
// constructors and layouts. On the host; prints what differs.
#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/float8.h>
#include <cutlass/float_subbyte.h>
#include <cutlass/half.h>

#include <cstdio>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/mainloop/umma.sm100.cuh"

using fusegen::StageMajor;
using fusegen::tcgen05::Kind;
using Major = cute::UMMA::Major;

static constexpr StageMajor ours(Major major) { return major == Major::K ? StageMajor::K : StageMajor::MN; }

// ---- instruction descriptors

template <class OurA, class OurB, class A, class B, Kind kind, int N, Major a, Major b, int M = 128>
static bool plain() {
  return fusegen::instruction_descriptor<kind, OurA, OurB>(M, N, ours(a), ours(b)) ==
         cute::UMMA::make_instr_desc<A, B, float, M, N, a, b>().desc_;
}
template <class OurA, class OurB, class A, class B, Kind kind>
static bool plain_everywhere() {
  return plain<OurA, OurB, A, B, kind, 128, Major::K, Major::K>() &&
         plain<OurA, OurB, A, B, kind, 256, Major::K, Major::MN>() &&
         plain<OurA, OurB, A, B, kind, 256, Major::MN, Major::MN>() &&
         plain<OurA, OurB, A, B, kind, 256, Major::MN, Major::MN, 256>();
}
using E4m3 = __nv_fp8_e4m3;
using E5m2 = __nv_fp8_e5m2;
using E2m1 = __nv_fp4_e2m1;
using cutlass::float_e2m1_t;
using cutlass::float_e4m3_t;
using cutlass::float_e5m2_t;

template <class OurA, class OurB, class A, class B, class Scale, Kind kind, int N, Major a = Major::K,
          Major b = Major::K, int M = 128>
static bool scaled() {
  const auto theirs = cute::UMMA::make_instr_desc_block_scaled<A, B, float, Scale, M, N, a, b>();
  return fusegen::instruction_descriptor<kind, OurA, OurB>(M, N, ours(a), ours(b)) == theirs.desc_;
}
using cutlass::float_ue4m3_t;
using cutlass::float_ue8m0_t;

static bool scale_bytes() {
  for (uint32_t index = 0; index < 4; ++index) {
    cute::UMMA::InstrDescriptorBlockScaled theirs{};
    theirs.a_sf_id_ = uint16_t(index);
    theirs.b_sf_id_ = uint16_t(index);
    if (fusegen::scale_byte(index) != theirs.desc_) return false;
  }
  return true;
}

// ---- matrix descriptors

static bool fields() {
  constexpr uint32_t kAddress = 0x1fc00;
  cute::UMMA::SmemDescriptor theirs{};
  theirs.start_address_ = uint16_t(kAddress >> 4);
  theirs.leading_byte_offset_ = 1;
  theirs.stride_byte_offset_ = 1024 >> 4;
  theirs.version_ = 1;
  theirs.layout_type_ = uint8_t(cute::UMMA::LayoutType::SWIZZLE_128B);
  if (fusegen::matrix_descriptor<StageMajor::K, 64>(kAddress) != theirs.desc_) return false;
  theirs.leading_byte_offset_ = 64 * 128 >> 4;
  if (fusegen::matrix_descriptor<StageMajor::MN, 64>(kAddress) != theirs.desc_) return false;
  theirs.leading_byte_offset_ = 0;
  theirs.stride_byte_offset_ = 128 >> 4;
  theirs.layout_type_ = uint8_t(cute::UMMA::LayoutType::SWIZZLE_NONE);
  return fusegen::atom_descriptor(kAddress) == theirs.desc_;
}

// Elements of a tile in shared memory, as CuTe lays them out for TMA with the 128-byte swizzle, and as
// the descriptor of this project says where they are.
template <class Layout, int Bits, bool MnMajor, int Extent, int K>
static bool lies_alike(Layout layout) {
  constexpr int kWidth = 1024 / Bits;
  const uint64_t descriptor =
      fusegen::matrix_descriptor<MnMajor ? StageMajor::MN : StageMajor::K, K>(0);
  const int leading = int(descriptor >> 16 & 0x3fff) * 16, stride = int(descriptor >> 32 & 0x3fff) * 16;
  for (int row = 0; row < Extent; ++row) {
    for (int k = 0; k < K; ++k) {
      const int bits = MnMajor ? (row / kWidth * leading + k / 8 * stride + k % 8 * 128) * 8 + row % kWidth * Bits
                               : (row / 8 * stride + row % 8 * 128) * 8 + k * Bits;
      const int at = bits ^ (bits >> 10 & 7) << 7;
      if (int(layout(row, k)) * Bits != at) return false;
    }
  }
  return true;
}
template <class Element, Major major, int Extent, int K>
static bool tile_lies_alike() {
  using namespace cute;
  using Atom = std::conditional_t<major == Major::K, UMMA::Layout_K_SW128_Atom<Element>,
                                  UMMA::Layout_MN_SW128_Atom<Element>>;
  // Boxes of all of K, one after the other, as TMA loads them.
  using Order = std::conditional_t<major == Major::K, Step<_1, _2>, Step<_2, _1>>;
  // In elements, whose swizzle is otherwise that of bytes.
  const auto layout = as_position_independent_swizzle_layout(
      tile_to_shape(Atom{}, Shape<Int<Extent>, Int<K>>{}, Order{}));
  return lies_alike<decltype(layout), sizeof_bits_v<Element>, major == Major::MN, Extent, K>(layout);
}

// From one MMA of a stage to the next: 32 bytes of the contraction, as CuTe's tile has them.
template <class Element, Major major, int K>
static bool steps_alike() {
  using namespace cute;
  using Atom = std::conditional_t<major == Major::K, UMMA::Layout_K_SW128_Atom<Element>,
                                  UMMA::Layout_MN_SW128_Atom<Element>>;
  using Order = std::conditional_t<major == Major::K, Step<_1, _2>, Step<_2, _1>>;
  const auto layout = tile_to_shape(Atom{}, Shape<Int<128>, Int<K>>{}, Order{});
  constexpr int kBits = sizeof_bits_v<Element>, kMmaK = fusegen::kMmaKBytes * 8 / kBits;
  for (int step = 0; step < K / kMmaK; ++step) {
    // The first element of a step, whose place the swizzle does not change in an address's bits above.
    const int bytes = int(layout.layout_b()(0, step * kMmaK)) * kBits / 8;
    const int stepped = step * int(fusegen::kUmmaStep<ours(major), kBits>) * 16;
    if (bytes != stepped) return false;
  }
  return true;
}

// ---- tensor memory: a warp's load of 16 rows by 64 columns of 32 bits

static bool strip_lies_alike() {
  using namespace cute;
  const auto layout = typename Copy_Traits<SM100_TMEM_LOAD_16dp256b8x>::DstLayout{};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 32; ++i) {
      // As fragment/fragment.cuh has them; a row is 64 columns of 32 bits in this layout.
      const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (int(layout(lane, i * 32)) != (row * 64 + column) * 32) return false;
    }
  }
  return true;
}

int main() {
  int different = 0;
#define CHECK(same) \
  if (!same) different += std::printf("%s\n", #same) > 0
  CHECK((plain_everywhere<__half, __half, cutlass::half_t, cutlass::half_t, Kind::f16>()));
  CHECK((plain_everywhere<__nv_bfloat16, __nv_bfloat16, cutlass::bfloat16_t, cutlass::bfloat16_t, Kind::f16>()));
  CHECK((plain_everywhere<E4m3, E4m3, float_e4m3_t, float_e4m3_t, Kind::f8f6f4>()));
  CHECK((plain_everywhere<E5m2, E4m3, float_e5m2_t, float_e4m3_t, Kind::f8f6f4>()));
  CHECK((plain_everywhere<E4m3, E5m2, float_e4m3_t, float_e5m2_t, Kind::f8f6f4>()));
  CHECK((scaled<E4m3, E4m3, float_e4m3_t, float_e4m3_t, float_ue8m0_t, Kind::mxf8f6f4, 128>()));
  CHECK((scaled<E5m2, E4m3, float_e5m2_t, float_e4m3_t, float_ue8m0_t, Kind::mxf8f6f4, 256>()));
  CHECK((scaled<E5m2, E4m3, float_e5m2_t, float_e4m3_t, float_ue8m0_t, Kind::mxf8f6f4, 128, Major::K, Major::MN>()));
  CHECK((scaled<E4m3, E4m3, float_e4m3_t, float_e4m3_t, float_ue8m0_t, Kind::mxf8f6f4, 256, Major::MN, Major::MN>()));
  CHECK((scaled<E4m3, E4m3, float_e4m3_t, float_e4m3_t, float_ue8m0_t, Kind::mxf8f6f4, 256, Major::MN, Major::MN, 256>()));
  CHECK((scaled<E2m1, E2m1, float_e2m1_t, float_e2m1_t, float_ue4m3_t, Kind::mxf4nvf4, 256, Major::K, Major::K, 256>()));
  CHECK((scaled<E2m1, E2m1, float_e2m1_t, float_e2m1_t, float_ue4m3_t, Kind::mxf4nvf4, 128>()));
  CHECK((scaled<E2m1, E2m1, float_e2m1_t, float_e2m1_t, float_ue4m3_t, Kind::mxf4nvf4, 256>()));
  CHECK((tile_lies_alike<cutlass::bfloat16_t, Major::K, 128, 64>()));
  CHECK((tile_lies_alike<cutlass::bfloat16_t, Major::MN, 128, 64>()));
  CHECK((tile_lies_alike<float_e4m3_t, Major::K, 128, 128>()));
  CHECK((tile_lies_alike<float_e4m3_t, Major::MN, 128, 128>()));
  CHECK((tile_lies_alike<float_e4m3_t, Major::MN, 256, 128>()));
  CHECK((steps_alike<cutlass::bfloat16_t, Major::K, 64>()));
  CHECK((steps_alike<cutlass::bfloat16_t, Major::MN, 64>()));
  CHECK((steps_alike<float_e4m3_t, Major::K, 128>()));
  CHECK((steps_alike<float_e4m3_t, Major::MN, 128>()));
  CHECK((steps_alike<float_e2m1_t, Major::K, 256>()));
  CHECK((tile_lies_alike<float_e2m1_t, Major::K, 128, 256>()));
  CHECK((strip_lies_alike()));
  CHECK((scale_bytes()));
  CHECK((fields()));
  return different;
}
