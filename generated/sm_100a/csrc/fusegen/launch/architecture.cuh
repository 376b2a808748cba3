// What the hardware has that a file is compiled for.
#pragma once

namespace fusegen {

// The least architecture among those of a file, as __CUDA_ARCH__ counts: 900 is sm_90. The host
// passes know it, too, so that what they launch and what kernels do cannot disagree; and since PTX
// counts, code that runs on newer hardware than it was compiled for is launched as it was written.
#ifdef __CUDA_ARCH_LIST__
inline constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // in ascending order
inline constexpr int kLeastArchitecture = kArchitectures[0];
#else
inline constexpr int kLeastArchitecture = 900;  // compiled for a CPU, which takes its place
#endif
static_assert(kLeastArchitecture >= 800, "device code without a suffix is for sm_80 and later");

// Whether a kernel may start before the stream's previous one has ended.
inline constexpr bool kProgrammaticLaunch = kLeastArchitecture >= 900;
// Whether blocks of threads form clusters, which see each other's shared memory.
inline constexpr bool kClusters = kLeastArchitecture >= 900;

}  // namespace fusegen
