"""Stages that return plausible results at once and remember the order of their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.config import DataConfig
from dflash.data.plan_stats import BucketPlan, PlanStats
from dflash.records import (
    BucketStats,
    CheckResult,
    DetectorSummary,
    EvaluationResult,
    Finding,
    HealthReport,
    PlanManifest,
    RunSummary,
)
from dflash.records.health import Verdict
from dflash.stages import DataStage, PlanStage, PlanView, Run, TrainStage
from dflash.train.doctor import DoctorReport, Part
from dflash.train.progress import TrainProgress


def health_report(run: str, verdict: Verdict) -> HealthReport:
    finding = Finding("non_finite", "critical", "training", "loss is not finite", 7, 9, 7, None, {}, ())
    return HealthReport(
        run=run,
        verdict=verdict,
        headline=f"the loss is {verdict}",
        checked_at="2026-01-01T00:00:00+00:00",
        segment=0,
        first_step=0,
        last_step=9,
        records=10,
        coverage_frac=1.0,
        detectors=(DetectorSummary("non_finite", "any non-finite value", 10, 1, 1, ""),),
        findings=(finding,) if verdict == "unhealthy" else (),
        damage=None,
        decision=None,
        stats={},
    )


def evaluation(which: str) -> EvaluationResult:
    return EvaluationResult(
        drafter=which, step=10, dataset="synthetic", prompts=2, block_size=3, temperature=0.0, template_flags={},
        verifications=4, drafted=8, accepted=6, committed_tokens=10, acceptance_length=2.5,
        acceptance_length_untruncated=2.6, accepted_length=1.5, acceptance_length_macro=2.4, acceptance_ci=(2.1, 2.9),
        confidence=0.95, survival_per_position=(0.9, 0.6), conditional_per_position=(0.9, 0.7),
        acceptance_histogram=(1, 1, 2), slices={}, plain_s_per_token=0.02, speculative_s_per_token=0.01, speedup=2.0,
        lossless=True, differing_prompts=0, near_tie_prompts=0, warnings=(),
    )  # fmt: skip


@dataclass
class FakeStages:
    """One method a stage; `errors` maps a stage's name to what it raises (once per entry)."""

    calls: list[str] = field(default_factory=list)
    errors: dict[str, list[Exception]] = field(default_factory=dict)
    verdict: Verdict = "healthy"
    checked: list[tuple[str, bool, bool | None]] = field(default_factory=list)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.errors.get(name):
            raise self.errors[name].pop(0)

    def doctor_stage(self, run: Run, *, part: Part) -> DoctorReport:
        self._called(f"doctor {part}")
        results = (CheckResult("clock", "ok", "fine", ""), CheckResult("rope", "warn", "another base", "set it"))
        return DoctorReport(results, 0.5)

    def prepare_stage(self, run: Run, *, progress: Callable[[str, int, int], None]) -> DataStage:
        self._called("prepare")
        progress("answers", 1, 2)
        progress("answers", 2, 2)
        buckets = (BucketStats(0, 16, 1, 12, 8), BucketStats(1, 32, 2, 18, 12))
        return DataStage("/data/x", "f" * 64, 3, 30, 20, buckets, 1, "/data/x/preview.html", reused=False)

    @contextmanager
    def open_spread(self, data: DataConfig) -> Iterator[str]:
        self._called(f"open {data.runner}")
        yield f"{data.workers} workers"
        self._called(f"close {data.runner}")

    def spread_stage(self, run: Run, *, spread: str, progress: Callable[[str, int, int], None]) -> DataStage:
        self._called(f"spread over {spread}")
        return self.prepare_stage(run, progress=progress)

    def plan_stage(self, run: Run, data: DataStage) -> PlanStage:
        self._called("plan")
        assert data.samples == 3
        manifest = PlanManifest(
            plan_sha256="a" * 64, settings={}, data_fingerprint=data.fingerprint, seed=1, epochs=1, batches=2,
            batches_per_epoch=(2,), samples=3, tokens=30, padded_tokens=32, padding_efficiency=0.94, padded_lengths_tokens=(16,),
            longest_bucket_run=2, bucket_run_feasible=True, bucket_run_limit=3, bucket_run_note="", arrays=(),
        )  # fmt: skip
        return PlanStage(manifest, reused=True)

    def view_plan(self, run: Run, data: DataStage) -> PlanView:
        bucket = BucketPlan(1, 32, 2, 18, 1, 24, 0.75, 0.5, 1, 0.0)
        stats = PlanStats(
            buckets=(bucket,), samples=3, tokens=30, batches=2, padded_tokens=32, efficiency=0.94, naive_efficiency=0.5,
            edges_efficiency=0.8, longest_run=1, padded_lengths_tokens=(16,), run_counts=((1, 2),), length_counts=(3,),
            length_edges=(0.0, 16.0), mix=((0.5, 0.5),),
        )  # fmt: skip
        return PlanView(stats, b"\x89PNG", "plan/plan.png")

    def train_stage(self, run: Run, *, on_progress: Callable[[TrainProgress], None]) -> TrainStage:
        self._called("train")
        on_progress(TrainProgress(0, 0, None, None, None, None))
        on_progress(TrainProgress(5, 10, 2.5, 1.5, 900.0, 4.0))
        on_progress(TrainProgress(10, 10, 2.0, 1.75, 950.0, 0.0))
        return TrainStage(10, 1.5, 0.02, "checkpoints/step-10", 0, 0, "")

    def open_bench(self, run: Run) -> Any:
        self._called("bench")
        return object()

    def evaluate_stage(self, run: Run, bench: Any, *, which: str, progress: Callable[[str, int, int], None]) -> EvaluationResult:
        self._called(which)
        progress(f"decoding ({which})", 2, 2)
        return evaluation(which)

    def health_stage(self, run_dir: str, *, act: bool, ended: bool | None) -> HealthReport:
        self._called("health")
        self.checked.append((Path(run_dir).name, act, ended))
        return health_report(Path(run_dir).name, self.verdict)

    def summarise_stage(self, run: Run) -> RunSummary:
        self._called("summarise")
        return RunSummary(
            run=run.name, acceptance_length=2.5, acceptance_length_untrained=1.1, acceptance_ci95=(2.1, 2.9),
            acceptance_per_position=(0.9, 0.6), speedup=2.0, lossless=True, padding_efficiency=0.94, longest_bucket_run=2,
            feature_wait_frac=0.02, health_verdict=self.verdict, checkpoint="checkpoints/step-10", steps=10, train_time_s=1.5,
            reused=(), mlflow_run_id=None,
        )  # fmt: skip

    def closing_text(self, run: Run, summary: RunSummary) -> str:
        return f"closing table of {summary.run}"
