"""Step records as the log holds them, and a store that remembers what it was told and can be away."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.records import DataManifest
from dflash.tracking import Tracker
from dflash.tracking.names import TRAIN_SKIPPED
from dflash.tracking.store import MetricPoint, StoreRefusalError, StoreUnreachableError


def step_record(step: int, *, segment: int = 0, ce: float | None = 2.0, buckets: Sequence[int] = (0, 3)) -> dict[str, Any]:
    micro = [{"bucket": bucket, "ce_sum": None if ce is None else ce * 10, "n_tokens": 10} for bucket in buckets]
    return {
        "kind": "step",
        "schema_version": 1,
        "segment": segment,
        "step": step,
        "wall_time_s": 1_700_000_000.0 + step,
        "ce": ce,
        "objective": ce,
        "accuracy": 0.25,
        "accepted_length": 1.5,
        "grad_norm": 0.5,
        "clip_coef": 1.0,
        "lr": 1e-3,
        "tokens_per_s": 900.0,
        "step_time_s": 0.1,
        "wait_time_s": 0.01,
        "padding_frac": 0.02,
        "ready_depth": 2,
        "feature_depth": 1,
        "skipped": ce is None,
        "micro_batches": micro,
    }


def line_of(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


@dataclass
class FakeStore:
    """An experiment store in memory; `away` makes every call fail, `fail_after` the n-th batch of metrics from now."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    away: bool = False
    fail_after: int | None = None

    def connect(self) -> FakeStore:
        self._check()
        return self

    def _check(self) -> None:
        if self.away:
            raise StoreUnreachableError("store is away", remedy="wait")

    def begin_run(self, *, name: str, tags: Mapping[str, str]) -> str:
        self._check()
        run_id = f"run{len(self.runs)}"
        empty = {"params": {}, "points": [], "artifacts": [], "datasets": [], "status": "RUNNING"}
        self.runs[run_id] = {"name": name, "tags": dict(tags), **empty}
        return run_id

    def find_run(self, tags: Mapping[str, str]) -> str | None:
        self._check()
        return next((run_id for run_id, run in self.runs.items() if tags.items() <= run["tags"].items()), None)

    def continue_run(self, run_id: str) -> str | None:
        self._check()
        if run_id not in self.runs:
            return None
        found = str(self.runs[run_id]["status"])
        self.runs[run_id]["status"] = "RUNNING"
        return found

    def last_step(self, run_id: str) -> int:
        self._check()
        return max((point.step for point in self.runs[run_id]["points"]), default=-1)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        self._check()
        known = self.runs[run_id]["params"]
        if any(known.get(key, value) != value for key, value in params.items()):
            raise StoreRefusalError("parameters are immutable", remedy="start another run")
        known.update(params)

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        self._check()
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after, self.away = None, True
                self._check()
        self.runs[run_id]["points"].extend(points)

    def log_dataset(self, run_id: str, manifest: DataManifest, location: str, preview_html: str | None) -> None:
        self._check()
        self.runs[run_id]["datasets"].append(manifest.fingerprint)

    def log_artifact(self, run_id: str, path: Path, folder: str) -> None:
        self._check()
        self.runs[run_id]["artifacts"].append(f"{folder}/{path.name}")

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._check()
        self.runs[run_id]["tags"].update(tags)

    def end_run(self, run_id: str, status: str) -> None:
        self._check()
        self.runs[run_id]["status"] = status

    def steps(self, run_id: str = "run0") -> list[int]:
        return [point.step for point in self.runs[run_id]["points"] if point.name == TRAIN_SKIPPED]


def no_rollback(event: Mapping[str, Any]) -> Tracker:
    """For logs without a rollback."""
    raise AssertionError(f"unexpected {event}")
