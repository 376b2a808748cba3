// Which cells the library holds: a line for each, with the digest that its Python states and that of
// the sources it was compiled from. Python reads this section before it trusts the library, and
// without running anything of it. The build writes digests.inc.

extern "C" {
extern __attribute__((visibility("default"), section(".fusegen"))) const char fusegen_digests[];
const char fusegen_digests[] =
    "fusegen digests\n"
#include "digests.inc"
    ;
}
