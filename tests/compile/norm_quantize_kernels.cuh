// Kernels that quantise norms of rows, and those of norms alone, behind C functions.
#include "fusegen/norm/norm_quantize.cuh"
#include "scalings.cuh"

using namespace fusegen;

namespace {

using Element = __nv_bfloat16;

Status merged(int config, const NormQuantizeArguments& in, Stream& stream) {
  switch (config) {
    case 0: return launch_norm_quantize<QuantizeConfig<Element, E4M3, Tensor>>(in, stream);
    case 3: return launch_norm_quantize<QuantizeConfig<Element, E4M3, Ratio<1, 128>>>(in, stream);
    case 5: return launch_norm_quantize<QuantizeConfig<Element, E4M3, Mx<1, 32>>>(in, stream);
    case 13: return launch_norm_quantize<QuantizeConfig<Element, E4M3, Ratio<1, 64>>>(in, stream);
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

int report(const Status& status, const char** call) {
  *call = status.call;
  return status.code;
}

}  // namespace

extern "C" {

int run_norm(const NormArguments* in, Stream* stream, const char** call) {
  return report(launch_norm<Element>(*in, *stream), call);
}

int run_merged(int config, const NormQuantizeArguments* in, Stream* stream, const char** call) {
  return report(merged(config, *in, *stream), call);
}

}  // extern "C"
