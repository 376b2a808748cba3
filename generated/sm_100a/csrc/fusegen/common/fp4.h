// The type of E2M1, from CUDA's header, some of whose parameters have no use: without the pragmas,
// nvcc 13.0.88 hands them to a host compiler that warns of it.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <cuda_fp4.h>
#pragma GCC diagnostic pop
