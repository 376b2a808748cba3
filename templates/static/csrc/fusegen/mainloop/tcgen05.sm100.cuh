// Instructions of tensor memory and of the MMAs that add up in it (PTX ISA, "tcgen05").
//
// Tensor memory has 128 lanes of 512 columns, 32 bits each; the upper half of an address is a lane,
// the lower one a column. An MMA of 128 rows leaves row r in lane r, column c in column c. Whole
// warps call these functions; where an instruction is one thread's, the first lane acts. A file that
// defines FUSEGEN_TCGEN05 first brings functions of its own: tests have such, in software.
//
// `Ctas` is 1, or 2 for the CTAs of a cluster of two, the pair, whose first one leads: it alone asks for
// MMAs and copies, which read and write at the same addresses of both CTAs. An MMA of 256 rows has
// rows r and 128 + r in lane r of the first and the second; of A each CTA has its own rows, of B half
// of the columns, and in tensor memory the scales of its own rows and of all columns.
#ifndef FUSEGEN_TCGEN05
#define FUSEGEN_TCGEN05

#include <cstdint>

#include "fusegen/load/ring.sm90.cuh"

namespace fusegen::tcgen05 {

// Kinds of MMAs: of 16-bit elements, of FP8 codes, and of FP8 and E2M1 codes with scales in tensor
// memory, one of each row's 32 elements, or four of 16.
enum class Kind { f16, f8f6f4, mxf8f6f4, mxf4nvf4 };

// `Columns` of all lanes, a power of two from 32 on; their address goes to shared memory.
template <int Columns, int Ctas>
__device__ void allocate(uint32_t* to) {
  asm volatile(
      "tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;\n"
      "tcgen05.relinquish_alloc_permit.cta_group::%2.sync.aligned;" ::"r"(
          shared_address(to)),
      "n"(Columns), "n"(Ctas)
      : "memory");
}

// Before the CTA ends.
template <int Columns, int Ctas>
__device__ void deallocate(uint32_t at) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(at), "n"(Columns),
               "n"(Ctas));
}

// Around barriers of threads: what is behind one does not pass it, what is before it has its effect.
__device__ inline void fence_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ inline void fence_after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// d = a b, or d += a b; `instruction` and the matrices are described in mainloop/umma.sm100.cuh.
template <Kind kind, int Ctas>
__device__ void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  if (threadIdx.x % 32 != 0) return;
  if constexpr (kind == Kind::f16) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, add;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(add)), "n"(Ctas)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f8f6f4 [%0], %1, %2, %3, add;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(add)), "n"(Ctas)
        : "memory");
  }
}

// The same of scaled kinds; `scale_a` and `scale_b` are addresses of scales.
template <Kind kind, int Ctas>
__device__ void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add,
                         uint32_t scale_a, uint32_t scale_b) {
  if (threadIdx.x % 32 != 0) return;
  if constexpr (kind == Kind::mxf8f6f4) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %4, 0;\n"
        "tcgen05.mma.cta_group::%7.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%5], [%6],"
        " add;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(add)), "r"(scale_a), "r"(scale_b), "n"(Ctas)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %4, 0;\n"
        "tcgen05.mma.cta_group::%7.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%5], [%6],"
        " add;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(add)), "r"(scale_a), "r"(scale_b), "n"(Ctas)
        : "memory");
  }
}

// An atom of scales (quantize/scale_atoms.cuh) into 4 columns: rows r, 32 + r, 64 + r and 96 + r lie
// in lane r, and again in each further 32 lanes. What is asked for later finds it there.
template <int Ctas>
__device__ void copy_atom(uint32_t to, uint64_t from) {
  if (threadIdx.x % 32 != 0) return;
  asm volatile("tcgen05.cp.cta_group::%2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from), "n"(Ctas)
               : "memory");
}

// Arrives at a barrier, of a pair at that of either CTA, once all MMAs and copies that the warp has
// asked for are done.
template <int Ctas>
__device__ void commit(const Barrier& barrier) {
  if (threadIdx.x % 32 != 0) return;
  const uint32_t address = shared_address(&barrier);
  if constexpr (Ctas == 1) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(address)
        : "memory");
  } else {
    constexpr uint16_t kBoth = 3;
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
        " [%0], %1;" ::"r"(address),
        "h"(kBoth)
        : "memory");
  }
}

// 16 rows by 64 columns, as an MMA of 16 x 8 results leaves them (fragment/fragment.cuh). A warp
// reaches the 32 lanes of its place in its warpgroup. They have come on return.
__device__ inline void load_strip(float (&to)[32], uint32_t from) {
#define FUSEGEN_FOUR(i) "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3])
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
      " %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29,"
      " %30, %31}, [%32];\ntcgen05.wait::ld.sync.aligned;"
      : FUSEGEN_FOUR(0), FUSEGEN_FOUR(4), FUSEGEN_FOUR(8), FUSEGEN_FOUR(12), FUSEGEN_FOUR(16),
        FUSEGEN_FOUR(20), FUSEGEN_FOUR(24), FUSEGEN_FOUR(28)
      : "r"(from)
      : "memory");
}

// The same of 32 columns.
__device__ inline void load_strip(float (&to)[16], uint32_t from) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
      " %12, %13, %14, %15}, [%16];\ntcgen05.wait::ld.sync.aligned;"
      : FUSEGEN_FOUR(0), FUSEGEN_FOUR(4), FUSEGEN_FOUR(8), FUSEGEN_FOUR(12)
      : "r"(from)
      : "memory");
#undef FUSEGEN_FOUR
}

}  // namespace fusegen::tcgen05

#endif  // FUSEGEN_TCGEN05
