"""Checkpoint selection: due checkpoints are probed on a device of their own, and the best challenges the registry's champion.

Each due checkpoint of a training starts this flow, once the automation is installed (`make automations`) and the run's
configuration says `probe.runner: flow`; with the supervisor's own probes it registers what they found.
"""

from __future__ import annotations

import argparse
import sys

from prefect import flow

from flows.parameters import RunPath
from flows.settings import flow_settings
from tasks.local import run_program
from tasks.select_checkpoint import give_way, select_checkpoint


@flow(name="select", **flow_settings())
def select(run_dir: RunPath, challenge: bool = True) -> int | None:
    """Probe a run's due checkpoints and choose the best. Returns its step.

    Args:
        run_dir: the run's folder, e.g. `runs/demo-001`.
        challenge: let the best one challenge the champion in MLflow's registry.
    """
    return select_checkpoint(run_dir, register=challenge).best


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = argparse.ArgumentParser(description="Probe a run's due checkpoints and choose the best.")
    parser.add_argument("run_dir", help="folder of the run, e.g. runs/demo-001")
    parser.add_argument("--no-register", action="store_true", help="leave MLflow's registry alone")
    arguments = parser.parse_args()

    def body() -> None:
        give_way(arguments.run_dir)
        best = select(arguments.run_dir, not arguments.no_register)
        print("no due checkpoint could be measured" if best is None else f"step-{best} is the best checkpoint by its probe")

    return run_program(body, check=lambda: None)


if __name__ == "__main__":
    sys.exit(main())
