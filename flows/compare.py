"""Runs side by side: whether one is better, and what was different."""

from __future__ import annotations

import argparse
import sys

from prefect import flow

from flows.parameters import RunPaths
from flows.settings import flow_settings
from tasks.compare_runs import compare_runs
from tasks.local import run_program


@flow(name="compare", **flow_settings())
def compare(run_dirs: RunPaths) -> str:
    """Compare trained runs: verdict with its statistic, curves by tokens seen, acceptance, differences, segments.

    Args:
        run_dirs: folders of two or more runs, e.g. `runs/demo-001`; the first is the reference.
    """
    return compare_runs(run_dirs)


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare trained runs.")
    parser.add_argument("run_dirs", nargs="+", help="folders of two or more runs; the first is the reference")
    arguments = parser.parse_args()
    return run_program(lambda: print(compare(arguments.run_dirs)), check=lambda: None)


if __name__ == "__main__":
    sys.exit(main())
