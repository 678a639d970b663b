"""Fire drill: plants a fault in a demo training on real servers, and judges what the health check and the supervisor do.

`python -m flows.drill --fault nan` starts all it needs on 127.0.0.1 and stops it again; docs/drill.md says what it proves.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from dflash.records import FaultName
from tasks.drill_program import drill_program

FAULTS = [name for name in get_args(FaultName) if name != "none"]


def main() -> int:
    """Command line of the drill; the exit code is 0 only if every verdict is right."""
    parser = argparse.ArgumentParser(description="Plant a fault in a demo training on real servers, and judge what happens.")
    parser.add_argument("--fault", action="append", required=True, choices=[*FAULTS, "none", "all"], help="may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="added to the configuration's run.seed")
    parser.add_argument("--config", default="configs/drill.yaml", help="a configuration that allows drill.faults")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--root", type=Path, default=Path("runs/drill"), help="folder of the drills' runs and servers")
    parser.add_argument("--limit", type=float, default=1200.0, metavar="SECONDS", help="longest time of one training")
    arguments = parser.parse_args()
    names = FAULTS if "all" in arguments.fault else arguments.fault
    return drill_program(
        names,
        config=arguments.config,
        overrides=arguments.overrides,
        seed=arguments.seed,
        root=arguments.root,
        limit_s=arguments.limit,
    )


if __name__ == "__main__":
    sys.exit(main())
