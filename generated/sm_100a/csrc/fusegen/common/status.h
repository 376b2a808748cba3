// Outcome of a host call: zero, or the code that a CUDA call gave and the name of that call.
#pragma once

namespace fusegen {

struct Status {
  int code = 0;                // cudaError_t or CUresult, whichever the call returns; 0 is success
  const char* call = nullptr;  // static string: the call that failed, or the requirement broken

  constexpr bool ok() const { return code == 0; }
};

}  // namespace fusegen
