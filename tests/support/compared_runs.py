"""Run folders as a comparison reads them: a configuration, a log, a ledger and a stored evaluation, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dflash.config import dump_config, parse_config
from dflash.records import EvaluationResult, MicroBatchRecord, RunPaths, StepRecord, to_json

CONFIG = """
run: {name: tiny}
target: {path: demo, mask_token_id: 9}
data: {source: synthetic, num_conversations: 8}
tracking: {enabled: false}
"""

RESULT = EvaluationResult(
    drafter="trained", step=12, dataset="synthetic-11", prompts=0, block_size=4, temperature=0.0, template_flags={},
    verifications=0, drafted=0, accepted=0, committed_tokens=0, acceptance_length=2.4, acceptance_length_untruncated=2.5,
    accepted_length=1.4, acceptance_length_macro=2.3, acceptance_ci=(2.1, 2.7), confidence=0.95,
    survival_per_position=(0.8, 0.4, 0.2), conditional_per_position=(0.8, 0.5, 0.5), acceptance_histogram=(2, 4, 2, 2), slices={},
    plain_s_per_token=0.002, speculative_s_per_token=0.001, speedup=2.0, lossless=True, differing_prompts=0, near_tie_prompts=0,
    warnings=(),
)  # fmt: skip


def step_line(step: int, *, segment: int = 0, loss: float | None = 1.0, bucket: int = 0, tokens: int = 100) -> str:
    """A step record of one micro-batch as the trainer writes it."""
    batch = MicroBatchRecord(
        batch_id=step, bucket=bucket, epoch=0, rows=(step,), padded_length_tokens=16, length_min_tokens=8, length_max_tokens=16,
        length_sum_tokens=tokens, n_seqs=1, n_tokens=50, n_blocks=4, supervised_tokens=60, covered_tokens=50,
        ce_sum=None if loss is None else 50 * loss, objective_sum=None, objective_weight=None, accepted_sum=4.0, correct=(1,),
        valid=(2,),
    )  # fmt: skip
    record = StepRecord(
        segment=segment, step=step, wall_time_s=0.0, mono_time_s=0.0, ce=loss, objective=None, accuracy=0.5, accepted_length=1.5,
        coverage_frac=1.0, grad_norm=1.0, clip_coef=1.0, lr=1e-3, warmup_factor=1.0, skipped=False, nonfinite=(),
        micro_batches=(batch,), plan_position=step + 1, padding_frac=0.0, step_time_s=0.1, wait_time_s=0.0, tokens_per_s=1000.0,
        ready_depth=1, feature_depth=1, target_depths=(1,),
    )  # fmt: skip
    return to_json(record) + "\n"


def write_evaluation_files(
    folder: Path, answers: Mapping[str, tuple[str, Sequence[int]]], result: EvaluationResult = RESULT
) -> None:
    """A stored evaluation: for each prompt hash its kind, and the tokens committed by each verification."""
    folder.mkdir(parents=True)
    prompts = [index for index, (_, counted) in enumerate(answers.values()) for _ in counted]
    counted = [tokens for _, each in answers.values() for tokens in each]
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.int32()), "counted": counted}), folder / "verifications.parquet")
    rows = [{"prompt": i, "prompt_hash": name, "kind": kind} for i, (name, (kind, _)) in enumerate(answers.items())]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "result.json").write_text(to_json(result))


def write_run(
    root: Path, log: str, *, answers: Mapping[str, tuple[str, Sequence[int]]] | None = None, overrides: Sequence[str] = ()
) -> RunPaths:
    """A run's folder with this log and, if given, an evaluation."""
    paths = RunPaths(root)
    paths.checkpoints_dir.mkdir(parents=True)
    paths.config.write_text(dump_config(parse_config(CONFIG, origin="test", overrides=overrides)))
    paths.log.write_text(log)
    if answers is not None:
        write_evaluation_files(paths.eval_dir / "trained-step-12", answers)
    return paths
