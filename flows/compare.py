"""Finished runs side by side."""

from __future__ import annotations

import argparse
import sys

from prefect import flow

from flows.parameters import RunPaths, flow_run_name
from tasks.compare_runs import compare_runs
from tasks.local import run_program
from tasks.policies import show_library_log


@flow(name="compare", flow_run_name=flow_run_name, retries=0, persist_result=False, on_running=[show_library_log])
def compare(run_dirs: RunPaths) -> str:
    """One table of several finished runs: acceptance, speed-up, padding, health.

    Args:
        run_dirs: folders of finished runs, e.g. `runs/demo-001`.
    """
    return compare_runs(run_dirs)


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare finished runs.")
    parser.add_argument("run_dirs", nargs="+", help="folders of finished runs")
    arguments = parser.parse_args()
    return run_program(lambda: print(compare(arguments.run_dirs)), check=lambda: None)


if __name__ == "__main__":
    sys.exit(main())
