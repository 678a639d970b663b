"""The health check: runs that are being trained are judged, and a decision becomes a request to the supervisor.

A run whose flow has died without a word is brought back first: nobody else would.
"""

from __future__ import annotations

import sys

from prefect import flow

from dflash.records import HealthReport
from flows.parameters import ConfigPath, Overrides, RunFolder, check, command_line
from flows.settings import flow_settings
from tasks.check_health import check_each
from tasks.live_runs import find_live_runs, revive_runs
from tasks.local import run_program


@flow(name="health-check", **flow_settings())
def health_check(
    config: ConfigPath, overrides: Overrides | None = None, run: RunFolder | None = None, act: bool = True
) -> list[HealthReport]:
    """Bring back what has died, judge every run of a configuration that is being trained; fail if one of them is unhealthy.

    Args:
        config: configuration file; its `run.root` and `run.name` say which runs are looked at.
        overrides: dotted assignments on top of it.
        run: one run's folder name, looked at whether it is being trained or not.
        act: ask the supervisor to carry out what the check decides.
    """
    revivals = revive_runs(config, overrides=overrides or [], run=run) if act else []
    runs = find_live_runs(config, overrides=overrides or [], run=run)
    return check_each(runs, revivals, act=act)


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = command_line("Check the health of the runs that are being trained.")
    parser.add_argument("--run", help="folder name of one run")
    parser.add_argument("--look-only", action="store_true", help="never ask the supervisor for anything")
    arguments = parser.parse_args()

    def body() -> None:
        for report in health_check(arguments.config, arguments.overrides, arguments.run, not arguments.look_only):
            print(f"{report.run}: {report.verdict}: {report.headline}")

    return run_program(body, check=lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
