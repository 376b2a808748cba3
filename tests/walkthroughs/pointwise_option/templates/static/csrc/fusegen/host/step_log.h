// Names of the steps of a launcher, on standard error as they are launched.
#pragma once

#include <cstdio>

namespace fusegen {

class StepLog {
 public:
  explicit StepLog(const char* name) { std::fprintf(stderr, "%s\n", name); }
};

}  // namespace fusegen
