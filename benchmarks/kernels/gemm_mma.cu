// The three bf16 GEMMs of one configuration by mma.sync behind C functions; build.py says which
// by a macro.
#include "fusegen/gemm/gemm.mma.cuh"

using namespace fusegen;

template <Gemm kind>
static int launch(const GemmArguments* in, Stream* stream, const char** call) {
  const Status status = launch_mma_gemm<kind, __nv_bfloat16, POINT>(*in, *stream);
  *call = status.call;
  return status.code;
}

extern "C" int launch_fprop(const GemmArguments* in, Stream* stream, const char** call) {
  return launch<Gemm::fprop>(in, stream, call);
}
extern "C" int launch_dgrad(const GemmArguments* in, Stream* stream, const char** call) {
  return launch<Gemm::dgrad>(in, stream, call);
}
extern "C" int launch_wgrad(const GemmArguments* in, Stream* stream, const char** call) {
  return launch<Gemm::wgrad>(in, stream, call);
}
