"""An evaluation as plain files: JSON, Parquet, JSON lines, PNG.

Invariant: `result.json` is written last, so a folder that has it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash.evaluate.hardware import describe_machine
from dflash.evaluate.metrics import VerificationTable
from dflash.evaluate.page import evaluation_page
from dflash.evaluate.plots import draw_plots
from dflash.evaluate.prompts import EvalPrompt, drawn_together
from dflash.evaluate.run import Evaluation
from dflash.evaluate.stored import EVIDENCE_FILE, PROMPTS_FILE, REPORT_FILE, RESULT_FILE, VERIFICATIONS_FILE
from dflash.records import to_json
from dflash.storage import atomic_write_bytes, atomic_write_text

VERIFICATIONS_SCHEMA_VERSION = 2


def write_evaluation(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write an evaluation into a folder, which is made if it is missing.

    Args:
        evaluation: from `evaluate_drafter` or `evaluate_candidates`.
        folder: e.g. `eval/trained-step-600`; files of an earlier evaluation there are replaced.

    Returns:
        The files: `result.json` (the record), `evidence.json` (timing and proof of losslessness), `verifications.parquet`
        (one row a verification), `prompts.jsonl` (one line a prompt), plots, and all of it for people in `report.html`.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / RESULT_FILE, *folder.glob("*.png")):
        old.unlink(missing_ok=True)  # a picture of something that was not measured this time
    pictures = draw_plots(evaluation.result)
    contents = {
        VERIFICATIONS_FILE: verifications_parquet(
            evaluation.table, [contest.prompt for contest in evaluation.contests], drafter=evaluation.result.drafter
        ),
        PROMPTS_FILE: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _prompt_rows(evaluation)).encode(),
        EVIDENCE_FILE: (json.dumps(evidence(evaluation), indent=2) + "\n").encode(),
        **pictures,
        REPORT_FILE: evaluation_page(evaluation.result, pictures).encode(),
    }
    for name, content in contents.items():
        atomic_write_bytes(folder / name, content)
    atomic_write_text(folder / RESULT_FILE, to_json(evaluation.result, indent=2) + "\n")
    return [folder / name for name in (RESULT_FILE, *contents)]


def evidence(evaluation: Evaluation) -> dict[str, Any]:
    """When and where it was measured, and what stands behind the speed-up and behind `lossless`, as JSON-able values."""
    state, timing = evaluation.state, evaluation.timing
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "timing": None if timing is None else asdict(timing),
        "state_test": {
            "relative_difference": _finite(state.relative),
            "controls": {name: _finite(value) for name, value in state.controls.items()},
            "judged": state.judged,
            "holds": state.holds,
        },
        "differing_prompts": [
            {
                "prompt": evaluation.contests[index].prompt.id,
                "first_differing_token": near_tie.position,
                "margin": _finite(near_tie.margin),
                "rounding": _finite(near_tie.rounding),
                "router_gap": _finite(near_tie.router_gap),
                "excused": near_tie.excused,
            }
            for index, near_tie in sorted(evaluation.near_ties.items())
        ],
    }


def verifications_parquet(table: VerificationTable, asked: Sequence[EvalPrompt], *, drafter: str) -> bytes:
    """A Parquet file with one row a verification, each with what its prompt is.

    Args:
        table: verifications.
        asked: the prompts that its indices mean.
        drafter: for the file's metadata.
    """
    prompts = [asked[index] for index in table.prompt.tolist()]
    columns = {
        "prompt": pa.array(table.prompt, pa.int32()),
        "prompt_id": pa.array([prompt.id for prompt in prompts], pa.string()),
        "kind": pa.array([prompt.kind for prompt in prompts], pa.string()),
        "dataset": pa.array([prompt.dataset for prompt in prompts], pa.string()),
        "turn": pa.array([prompt.turn for prompt in prompts], pa.int32()),
        "language": pa.array([prompt.language for prompt in prompts], pa.string()),
        "domain": pa.array([prompt.domain for prompt in prompts], pa.string()),
        "context_tokens": pa.array(table.context_tokens, pa.int32()),
        "drafted": pa.array(table.drafted, pa.int32()),
        "accepted": pa.array(table.accepted, pa.int32()),
        "counted": pa.array(table.counted, pa.int32()),
    }
    metadata = {"dflash_schema_version": str(VERIFICATIONS_SCHEMA_VERSION), "drafter": drafter}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _prompt_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    rows = []
    groups = drawn_together([contest.prompt for contest in evaluation.contests])
    for index, contest in enumerate(evaluation.contests):
        trace = contest.speculative[evaluation.position]
        verifications = len(trace.verifications)
        counted = sum(step.counted for step in trace.verifications)
        rows.append(
            {
                "prompt": index,
                "id": contest.prompt.id,
                "kind": contest.prompt.kind,
                "dataset": contest.prompt.dataset,
                "turn": contest.prompt.turn,
                "drawn_as": groups[index],
                "language": contest.prompt.language,
                "domain": contest.prompt.domain,
                "prompt_hash": contest.prompt.prompt_hash,
                "prompt_tokens": len(contest.prompt.prompt_ids),
                "answer_tokens": len(trace.tokens),
                "answer_ids": list(trace.tokens),
                "verifications": verifications,
                "acceptance_length": counted / verifications if verifications else None,
                "plain_decode_s": contest.plain.decode_s,
                "speculative_decode_s": trace.decode_s,
                "equals_plain": trace.tokens == contest.plain.tokens,
            }
        )
    return rows


def _finite(value: float) -> float | None:
    """A number that JSON can hold; None stands for infinite."""
    return value if value - value == 0 else None
