"""Evaluation alone: a run's drafter before and after training, on held-out prompts."""

from __future__ import annotations

import argparse
import sys

from prefect import flow

from dflash.records import EvaluationResult
from flows.parameters import RunPath
from flows.settings import flow_settings
from tasks.evaluate_drafter import evaluate_drafter
from tasks.local import run_program


@flow(name="evaluate", **flow_settings())
def evaluate(run_dir: RunPath) -> list[EvaluationResult]:
    """Measure acceptance and speed-up of a run's untrained and newest drafter, lossless.

    Args:
        run_dir: the run's folder, e.g. `runs/demo-001`.
    """
    return evaluate_drafter(run_dir)


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = argparse.ArgumentParser(description="Evaluate a run's drafter on held-out prompts.")
    parser.add_argument("run_dir", help="folder of the run, e.g. runs/demo-001")
    arguments = parser.parse_args()

    def body() -> None:
        for result in evaluate(arguments.run_dir):
            low, high = result.acceptance_ci
            print(f"{result.drafter}: acceptance length {result.acceptance_length:.2f} [{low:.2f}, {high:.2f}]")

    return run_program(body, check=lambda: None)


if __name__ == "__main__":
    sys.exit(main())
