"""Task: the pre-flight examination; a failure ends the flow before anything is spent on it, warnings do not."""

from __future__ import annotations

import logging

from prefect import task

from dflash.stages import doctor_stage, reopen_run
from dflash.train.doctor import Part
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S
from tasks.reporting import table

logger = logging.getLogger(__name__)


@task(name="doctor", timeout_seconds=SHORT_TIMEOUT_S, **NEVER_CACHED)
def run_doctor(run_dir: str, *, part: Part) -> None:
    """Examine machine, target and drafter (`start`), or the run's data set (`data`)."""
    report = doctor_stage(reopen_run(run_dir), part=part)
    rows = [
        {"check": result.name, "status": result.status, "found": result.message, "remedy": result.remedy}
        for result in report.results
    ]
    table(f"doctor-{part}", rows, description=f"pre-flight ({part}): {len(rows)} checks in {report.seconds:.1f} s")
    for result in report.results:
        if result.status == "warn":
            logger.warning("%s: %s (%s)", result.name, result.message, result.remedy)
    logger.info("doctor: %d checks of the %s in %.1f s, none failed", len(rows), part, report.seconds)
