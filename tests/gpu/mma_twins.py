"""A bundle of GEMMs whose instruction this GPU has not, with twins of it in software.

    python tests/gpu/mma_twins.py [OUT]

Loads, groups, barriers, scales, stores and launches are those of `sm_120a`; what multiplies
elements with scales is the MMA of 16 bits, of decoded ones.  The bundle is `OUT/sm_90a_twin`, by
default in `build/twin`:

    fusegen build build/twin/sm_90a_twin
    FUSEGEN_TEST_BUNDLE=build/twin/sm_90a_twin pytest tests/gpu

Nothing is measured by it: it says whether results are right. The ledger says where it ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bundles
import further
import twin_cells
import yaml

from fusegen.publish.paths import builtin_specs

OF, ON = "sm_120a", "sm_90a"
NAME = bundles.TWINS[OF]


def write_spec(folder: Path) -> None:
    """The architecture: families and layout of the one, instructions and limits of the other."""
    archs = builtin_specs() / "archs"
    own, host = (yaml.safe_load((archs / f"{name}.yaml").read_text("utf-8")) for name in (OF, ON))
    taken = {key: host[key] for key in ("gencode", "toolkit", "limits")}
    summary = f"Kernels of {OF}, with twins of its instructions"
    content = {**own, "arch": NAME, "summary": summary, **taken}
    further.write_yaml(folder / "archs" / f"{NAME}.yaml", content)


def generate(out: Path) -> Path:
    """Bring the bundle up to the specs; returns its folder.

    Raises:
        LedgerError: somebody edited it.
    """
    write_spec(further.specs_of(out))
    further.generate(out, {NAME: twin_cells.cells()}, (further.specs_of(out),))
    return out / NAME


if __name__ == "__main__":
    print(generate(Path(sys.argv[1]) if len(sys.argv) > 1 else bundles.BUILD / bundles.TWIN))
