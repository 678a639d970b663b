"""Data preparation alone: conversations, answers by the target, buckets, batch plan."""

from __future__ import annotations

import sys

from prefect import flow

from flows.parameters import ConfigPath, Overrides, RunName, check, command_line
from flows.settings import flow_settings
from tasks.attempt import working_on
from tasks.local import run_program
from tasks.open_run import begin_run
from tasks.plan_batches import plan_batches
from tasks.prepare_data import prepare_data


@flow(name="prepare-data", **flow_settings())
def prepare(config: ConfigPath, overrides: Overrides | None = None, run_name: RunName | None = None) -> str:
    """Build the data set and the batch plan of a run; training continues in the same folder. Returns the folder.

    Args:
        config: configuration file, relative to the checkout.
        overrides: dotted assignments on top of it.
        run_name: name instead of the configured one.
    """
    run_dir = begin_run(config, overrides=overrides or [], run_name=run_name)
    with working_on(run_dir):
        plan_batches(run_dir, prepare_data(run_dir))
    return run_dir


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = command_line("Build the data set and the batch plan of a run.")
    parser.add_argument("--run-name", help="name of the run instead of the configured one")
    arguments = parser.parse_args()

    def body() -> None:
        print(prepare(arguments.config, arguments.overrides, arguments.run_name))

    return run_program(body, check=lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
