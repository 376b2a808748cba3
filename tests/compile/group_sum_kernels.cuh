// Sums over the rows of groups behind a C function, for the CPU and for nvcc alike.
#include "fusegen/reduce/group_sum.cuh"

extern "C" int run_group_sum(int half, int wide, const fusegen::GroupSumArguments* in,
                             fusegen::Stream* stream, const char** call) {
  fusegen::Status (*launch)(const fusegen::GroupSumArguments&, fusegen::Stream&) =
      half ? wide ? &fusegen::launch_group_sum<__half, float> : &fusegen::launch_group_sum<__half>
      : wide ? &fusegen::launch_group_sum<__nv_bfloat16, float>
             : &fusegen::launch_group_sum<__nv_bfloat16>;
  const fusegen::Status status = launch(*in, *stream);
  *call = status.call;
  return status.code;
}
