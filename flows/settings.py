"""What every flow is decorated with besides its name: `@flow(name=..., **flow_settings())`.

A flow is never retried as a whole: its tasks are, and training continues from its checkpoints. Results lie in the run's folder.
"""

from __future__ import annotations

from typing import Any

from flows.parameters import flow_run_name
from tasks.code_version import code_version
from tasks.console import outlive_lost_console
from tasks.policies import show_library_log
from tasks.slots import outlive_lost_slots


def flow_settings() -> dict[str, Any]:
    """Arguments of `prefect.flow`, anew for each flow: Prefect keeps the list of hooks that it is given."""
    outlive_lost_slots()  # here, because every process that runs a flow of ours comes by
    outlive_lost_console()
    return {
        "version": code_version(),
        "flow_run_name": flow_run_name,
        "retries": 0,
        "persist_result": False,
        "on_running": [show_library_log],
    }
