"""What a drill leaves behind: everything that its verdict is made from, gathered from the run's own files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash.checkpoint import list_checkpoints, read_ledger, read_manifest
from dflash.checkpoint.layout import DRAFTER_FILE
from dflash.errors import CheckpointError
from dflash.evaluate.stored import RESULT_FILE
from dflash.records import (
    SEGMENT_STARTS,
    ControlRequest,
    EvaluationResult,
    FaultPlan,
    HealthReport,
    LedgerEntry,
    PlantedFault,
    RollbackEntry,
    RunPaths,
    from_json,
)
from dflash.train.follow import parse_lines
from dflash.train.planted_log import planted_lines
from dflash.train.processes import recorded_processes
from dflash.train.requests import ACK_SUFFIX

COMPLETED = "Completed"


@dataclass(frozen=True, slots=True)
class Requested:
    """A request of the health check, and the wall time at which its file appeared."""

    request: ControlRequest
    at_s: float


@dataclass(frozen=True, slots=True)
class Log:
    """What a run's log says.

    Attributes:
        loss: of every live record, None where it was not finite.
        first_step_at_s: wall time of each segment's first record.
        resumed_from: checkpoint that each later segment began from.
        last_record: newest record of each segment, live or not: its step and its wall time.
        durable: steps of the checkpoints that were written before the first rollback; a slow disk makes the trainer leave some out.
    """

    loss: Mapping[int, float | None]
    first_step_at_s: Mapping[int, float]
    last_record: Mapping[int, tuple[int, float]]
    resumed_from: Mapping[int, int]
    durable: frozenset[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the training ended.

    Attributes:
        steps: of the last checkpoint, None without any.
        weights_sha256: of its drafter.
        acceptance_length, acceptance_ci: of the final drafter; None if it was not evaluated.
    """

    steps: int | None
    weights_sha256: str | None
    acceptance_length: float | None
    acceptance_ci: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class DrillFacts:
    """One drill, over.

    Attributes:
        ended: name of the flow run's last state in Prefect.
        struck_step: step at which the drill struck from outside, None if it did not.
        hit_checkpoint: checkpoint that it damaged then, None if it damaged none.
        found_by: detectors with findings in the last report.
        processes_left: recorded processes of the run that still live.
    """

    plan: FaultPlan
    ended: str
    struck_step: int | None
    hit_checkpoint: int | None
    planted: tuple[PlantedFault, ...]
    requests: tuple[Requested, ...]
    rollbacks: tuple[RollbackEntry, ...]
    bad_checkpoints: frozenset[int]
    found_by: frozenset[str]
    processes_left: int
    log: Log
    outcome: Outcome


def gather(paths: RunPaths, plan: FaultPlan, *, ended: str, struck_step: int | None, hit_checkpoint: int | None) -> DrillFacts:
    """Read everything from a run's folder."""
    ledger = read_ledger(paths.ledger)
    report = paths.health_dir / "report.json"
    findings = from_json(HealthReport, report.read_bytes(), origin=str(report)).findings if report.is_file() else ()
    return DrillFacts(
        plan=plan,
        ended=ended,
        struck_step=struck_step,
        hit_checkpoint=hit_checkpoint,
        planted=tuple(planted_lines(paths)),
        requests=_requests(paths),
        rollbacks=tuple(line for line in ledger if isinstance(line, RollbackEntry)),
        bad_checkpoints=frozenset(line.step for line in ledger if isinstance(line, LedgerEntry) and line.state == "bad"),
        found_by=frozenset(finding.detector for finding in findings),
        processes_left=len(recorded_processes(paths)),
        log=read_log(paths),
        outcome=read_outcome(paths),
    )


def read_log(paths: RunPaths) -> Log:
    """Losses of the live records, where the segments began and ended, and what was saved before the first rollback."""
    loss: dict[int, float | None] = {}
    first_step_at_s: dict[int, float] = {}
    last_record: dict[int, tuple[int, float]] = {}
    resumed_from: dict[int, int] = {}
    durable: set[int] = set()
    gone_back = False
    for line in parse_lines(paths.log.read_bytes()) if paths.log.is_file() else ():
        segment, step = int(line["segment"]), int(line["step"])
        if line["kind"] == "step":
            first_step_at_s.setdefault(segment, float(line["wall_time_s"]))
            last_record[segment] = (step, float(line["wall_time_s"]))
            loss[step] = line["ce"]
        elif line["event"] in SEGMENT_STARTS:
            loss = {known: value for known, value in loss.items() if known < step}
            if line["event"] == "resume":
                resumed_from[segment] = step
            gone_back |= line["event"] == "rollback_end"
        elif line["event"] == "save_durable" and not gone_back:
            durable.add(step)
    return Log(loss, first_step_at_s, last_record, resumed_from, frozenset(durable))


def read_outcome(paths: RunPaths) -> Outcome:
    """The last checkpoint and what its drafter is worth."""
    steps, sha256 = _last_weights(paths)
    evaluation = paths.eval_dir / f"trained-step-{steps}" / RESULT_FILE
    if not evaluation.is_file():
        return Outcome(steps, sha256, None, None)
    result = from_json(EvaluationResult, evaluation.read_bytes(), origin=str(evaluation))
    return Outcome(steps, sha256, result.acceptance_length, result.acceptance_ci)


def _requests(paths: RunPaths) -> tuple[Requested, ...]:
    files = sorted(paths.requests_dir.glob("*.json")) if paths.requests_dir.is_dir() else []
    found = [
        Requested(from_json(ControlRequest, file.read_bytes(), origin=str(file)), file.stat().st_mtime)
        for file in files
        if not file.name.endswith(ACK_SUFFIX)
    ]
    return tuple(sorted(found, key=lambda item: item.at_s))


def _last_weights(paths: RunPaths) -> tuple[int | None, str | None]:
    """Step and hash of the drafter of the newest complete checkpoint."""
    for step in reversed(list_checkpoints(paths.checkpoints_dir)):
        try:
            manifest = read_manifest(paths.checkpoint(step))
        except CheckpointError:
            continue
        entry = next((entry for entry in manifest.files if entry.name == DRAFTER_FILE), None)
        return manifest.step, None if entry is None else entry.sha256
    return None, None
