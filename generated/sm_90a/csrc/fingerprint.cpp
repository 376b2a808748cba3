// The hash of every operator schema of this bundle. The Python side compares it with its own before
// it trusts the library: boxed calls check the number of arguments, not their order.

#ifndef FUSEGEN_FINGERPRINT
#error "define FUSEGEN_FINGERPRINT as the string that sources.cmake states"
#endif

extern "C" __attribute__((visibility("default"))) const char* fusegen_fingerprint() {
  return FUSEGEN_FINGERPRINT;
}
