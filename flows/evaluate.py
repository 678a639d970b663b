"""Evaluation alone: a run's drafter before and after training, on held-out prompts."""

from __future__ import annotations

import argparse
import sys
from typing import Literal

from prefect import flow

from dflash.records import EvaluationResult
from flows.parameters import RunPath, ServerUrl
from flows.settings import flow_settings
from tasks.evaluate_drafter import evaluate_drafter
from tasks.evaluate_server import evaluate_server
from tasks.local import run_program
from tasks.sweep_drafter import sweep_drafter


@flow(name="evaluate", **flow_settings())
def evaluate(
    run_dir: RunPath,
    sweep: bool = False,
    engine: Literal["in_process", "vllm", "sglang"] = "in_process",
    url: ServerUrl | None = None,
    plain_url: ServerUrl | None = None,
) -> list[EvaluationResult]:
    """Measure acceptance and speed-up of a run's untrained and newest drafter, lossless; or of the one that a server runs.

    Args:
        run_dir: the run's folder, e.g. `runs/demo-001`.
        sweep: also measure every setting of `evaluate.sweep`, and which one is the best on this machine; never on a server.
        engine: who decodes; a server's kind needs its address.
        url: of a server with the drafter.
        plain_url: of one without, to judge losslessness by.
    """
    if engine != "in_process" or url is not None or plain_url is not None:
        return [evaluate_server(run_dir, engine=engine, url=url, plain_url=plain_url)]
    results = evaluate_drafter(run_dir)
    if sweep:
        sweep_drafter(run_dir)
    return results


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = argparse.ArgumentParser(description="Evaluate a run's drafter on held-out prompts.")
    parser.add_argument("run_dir", help="folder of the run, e.g. runs/demo-001")
    parser.add_argument("--sweep", action="store_true", help="also find the best block size, batch size and temperature")
    parser.add_argument("--engine", choices=("in_process", "vllm", "sglang"), default="in_process", help="who decodes")
    parser.add_argument("--url", help="address of a server with the drafter")
    parser.add_argument("--plain-url", help="address of one without, to judge losslessness by")
    arguments = parser.parse_args()
    where = {"engine": arguments.engine, "url": arguments.url, "plain_url": arguments.plain_url}

    def body() -> None:
        for result in evaluate(arguments.run_dir, sweep=arguments.sweep, **where):
            print(f"{result.drafter}: {result.headline}")

    return run_program(body, check=lambda: None)


if __name__ == "__main__":
    sys.exit(main())
