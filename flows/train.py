"""The main flow: data, batch plan, training, evaluation, health, summary.

Run it without any set-up (`python -m flows.train --config configs/demo.yaml`) or through its deployments
(`prefect deployment run train-v2`); it is the same flow.
"""

from __future__ import annotations

import sys

from prefect import flow

from dflash.records import RunSummary
from flows.parameters import ConfigPath, Overrides, RunName, check, command_line
from flows.settings import flow_settings
from tasks.attempt import working_on
from tasks.check_health import check_health, require_healthy
from tasks.console import say
from tasks.evaluate_drafter import evaluate_drafter
from tasks.local import run_program
from tasks.open_run import begin_run
from tasks.own_state import stay_cancelled
from tasks.plan_batches import plan_batches
from tasks.prepare_data import prepare_data
from tasks.run_doctor import run_doctor
from tasks.summarise_run import closing_table, summarise_run
from tasks.train_drafter import train_drafter


@flow(name="train", **flow_settings(), on_failure=[stay_cancelled])
def train(config: ConfigPath, overrides: Overrides | None = None, run_name: RunName | None = None) -> RunSummary:
    """Examine, prepare data, plan batches, train a drafter, evaluate it before and after, judge the run, sum it up.

    Args:
        config: configuration file, relative to the checkout.
        overrides: dotted assignments on top of it.
        run_name: name instead of the configured one.
    """
    run_dir = begin_run(config, overrides=overrides or [], run_name=run_name)
    with working_on(run_dir):
        run_doctor(run_dir, part="start")
        plan_batches(run_dir, prepare_data(run_dir))
        run_doctor(run_dir, part="data")
        train_drafter(run_dir)
        evaluate_drafter(run_dir)
        health = check_health(run_dir, act=False, ended=True)
        summary = summarise_run(run_dir)
        say(closing_table(run_dir, summary))
        require_healthy([health])
    return summary


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = command_line("Train a drafter from a configuration, end to end.")
    parser.add_argument("--run-name", help="name of the run instead of the configured one")
    arguments = parser.parse_args()
    return run_program(lambda: train(arguments.config, arguments.overrides, arguments.run_name), check=lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
