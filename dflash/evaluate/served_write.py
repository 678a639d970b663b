"""An evaluation through a server as plain files, the same ones as of one in process; what the engine did not tell has no file.

Invariant: `result.json` is written last, so a folder that has it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash.evaluate.lossless import NearTie
from dflash.evaluate.page import evaluation_page
from dflash.evaluate.plots import draw_plots
from dflash.evaluate.served import ServedEvaluation
from dflash.evaluate.served_replies import ServedReply
from dflash.evaluate.stored import EVIDENCE_FILE, PROMPTS_FILE, REPORT_FILE, RESULT_FILE, VERIFICATIONS_FILE
from dflash.evaluate.write import verifications_parquet
from dflash.records import to_json
from dflash.storage import atomic_write_bytes, atomic_write_text


def write_served(evaluation: ServedEvaluation, folder: Path) -> list[Path]:
    """Write an evaluation into a folder, which is made if it is missing.

    Args:
        evaluation: from `evaluate_served`.
        folder: e.g. `eval/vllm`; files of an earlier evaluation there are replaced.

    Returns:
        The files, `result.json` (the record) first.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / RESULT_FILE, folder / VERIFICATIONS_FILE, *folder.glob("*.png")):
        old.unlink(missing_ok=True)  # an engine may tell less than it told the time before
    result, asked = evaluation.result, evaluation.asked
    pictures = draw_plots(result)
    rows = [_row(evaluation, index) for index in range(len(asked.prompts))]
    contents = {
        PROMPTS_FILE: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(),
        EVIDENCE_FILE: (json.dumps(served_evidence(evaluation), indent=2) + "\n").encode(),
        **pictures,
        REPORT_FILE: evaluation_page(result, pictures).encode(),
    }
    if evaluation.table is not None:
        contents[VERIFICATIONS_FILE] = verifications_parquet(evaluation.table, asked.prompts, drafter=result.drafter)
    for name, content in contents.items():
        atomic_write_bytes(folder / name, content)
    atomic_write_text(folder / RESULT_FILE, to_json(result, indent=2) + "\n")
    return [folder / name for name in (RESULT_FILE, *contents)]


def served_evidence(evaluation: ServedEvaluation) -> dict[str, Any]:
    """Where the figures come from, and what stands behind `lossless`, as JSON-able values.

    `output_tokens_per_s` is the client's view: queue, prefill and network included, at the stated number of prompts at once.
    """
    asked = evaluation.asked
    differing = evaluation.comparison.differing or {}
    told = "answer" if len(evaluation.accounts) == len(asked.replies) else "server"
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": evaluation.server,
        "account_of_each": "verification" if evaluation.table is not None else told,
        "account_from": "counters" if asked.counters else "replies",
        "asked_for_s": asked.seconds,
        "output_tokens_per_s": _tokens(asked.replies) / asked.seconds if asked.plain is None and asked.seconds else None,
        "compared_with_plain_decoding": asked.plain is not None,
        "differing_prompts": [
            {"prompt": asked.prompts[index].id, "near_tie": None if tie is None else _judged(tie)}
            for index, tie in sorted(differing.items())
        ],
    }


def _row(evaluation: ServedEvaluation, index: int) -> dict[str, Any]:
    asked = evaluation.asked
    prompt, reply = asked.prompts[index], asked.replies[index]
    account = evaluation.accounts[index] if len(evaluation.accounts) == len(asked.replies) else None
    differing = evaluation.comparison.differing
    return {
        "prompt": index,
        "id": prompt.id,
        "kind": prompt.kind,
        "dataset": prompt.dataset,
        "prompt_hash": prompt.prompt_hash,
        "prompt_tokens": reply.prompt_tokens,
        "answer_tokens": reply.completion_tokens,
        "answer_ids": None if reply.ids is None else list(reply.ids),
        "answer_text": reply.text,
        "verifications": None if account is None else account.verifications,
        "acceptance_length": None if account is None or not account.verifications else account.counted / account.verifications,
        "speculative_decode_s": reply.decode_s,
        "plain_decode_s": None if asked.plain is None else asked.plain[index].decode_s,
        "equals_plain": None if differing is None else index not in differing,
    }


def _judged(tie: NearTie) -> dict[str, Any]:
    """JSON has no infinity: None stands for it."""
    return {name: value if value - value == 0 else None for name, value in asdict(tie).items()}


def _tokens(replies: Sequence[ServedReply]) -> int:
    return sum(reply.completion_tokens for reply in replies)
