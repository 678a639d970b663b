"""Any bytes as a training log, ours or somebody else's, are judged or refused, with a report that can be written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import pytest

from dflash.cli.health_log import LogJudge
from dflash.errors import DflashError
from dflash.health import Piece, parse_map, render_text
from dflash.records import to_json
from tests.support.compared_runs import step_line
from tests.support.fuzz import TIMEOUT_S, changed_bytes, changed_json, explained, fuzz, json_text

OWN = [json.loads(step_line(step, bucket=step % 3, loss=None if step == 5 else 3.0 - 0.1 * step)) for step in range(12)]
EVENTS = [
    {"kind": "event", "segment": 0, "step": step, "wall_time_s": 0.1 * step, "event": name, "details": details, "schema_version": 1}
    for step, (name, details) in enumerate(
        [
            ("config", {"total_steps": 12}), ("save_begin", {"step": 4}), ("save_durable", {"step": 4, "write_time_s": 0.2}),
            ("lr_change", {"lr": 1e-3}), ("resume", {"from_step": 4}), ("epoch", {"epoch": 1}), ("heartbeat", {}),
            ("rollback_begin", {"key": "k", "target_step": 4}), ("rollback_end", {"key": "k"}), ("skip", {"positions": [[3, 5]]}),
        ]
    )
]  # fmt: skip
OTHERS = [
    [{"step": step, "loss": 2.0 - 0.1 * step, "grad_norm": 1.0, "lr": 1e-3, "bucket": "a"} for step in range(8)],
    [{"train/global_step": step, "train/loss": "nan" if step == 3 else 1.5, "_timestamp": 1.7e9 + step} for step in range(8)],
]
TRAINER_STATE = {"log_history": [{"step": step, "loss": 2.0, "learning_rate": 1e-4} for step in range(6)] + [{"train_loss": 1.0}]}


def lines(rows: list[object]) -> bytes:
    return b"".join(json_text(row) + b"\n" for row in rows)


FILES = [
    lines([*OWN[:6], *EVENTS, *OWN[6:]]),
    *map(lines, OTHERS),
    json_text(TRAINER_STATE),
    json_text({"lm loss": {"values": {"1": 2.0, "2": 1.9}}}),
    b"step,loss,grad_norm\n" + b"".join(b"%d,%.2f,1.0\n" % (step, 2 - 0.1 * step) for step in range(6)),
    b"step\tloss\n1\t2.0\n2\tnan\n",
]


@dataclass(frozen=True)
class MemoryLog:
    """A log that lies in memory."""

    data: bytes
    name: str = "fuzzed.jsonl"

    def read_at(self, offset: int, *, before: int, max_bytes: int) -> Piece | None:
        tail = self.data[max(0, offset - before) : offset]
        return Piece(1, tail, self.data[offset : offset + max_bytes])

    def beside(self, _name: str) -> bytes | None:
        return None


def judged(data: bytes, *, given: tuple[str, ...] = ()) -> str | None:
    """The report's text; None if the log was refused."""
    judge = LogJudge(MemoryLog(data), given=parse_map(given), name="fuzzed")  # type: ignore[arg-type]
    try:
        report = judge.judge(now_s=1.7e9, ended=True).report
    except DflashError as error:
        explained(error)
        return None
    to_json(report).encode("utf-8")
    text = render_text(report)
    text.encode("utf-8")
    return text


def check(data: bytes) -> None:
    for given in ((), ("loss=loss", "step=step")):
        text = judged(data, given=given)
        assert text == judged(data, given=given), "the same log has the same report"


pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_any_bytes() -> None:
    fuzz(changed_bytes(FILES), check, usual=40, share=0.5)


def test_any_values() -> None:
    whole = [[*OWN[:6], *EVENTS, *OWN[6:]], *OTHERS]
    fuzz(changed_json(whole).map(lambda rows: lines(rows if isinstance(rows, list) else [rows])), check, usual=60, share=0.5)


@pytest.mark.parametrize("declared", [[{}], [[1]], [1, "ce"], {"a": 1}, None, "ce"])
def test_what_a_record_declares_as_not_finite_may_be_anything(declared: object) -> None:
    """A record with the word NaN in it is repaired, and what it declares beside that is somebody's too."""
    row = OWN[3] | {"ce": float("nan"), "nonfinite": declared}
    assert judged(lines([*OWN[:3], row, *OWN[4:]])) is not None


def test_the_examples_are_read() -> None:
    for data in FILES[:1] + FILES[1:4]:
        assert judged(data) is not None, data[:80]
    assert len({hashlib.sha256(data).hexdigest() for data in FILES}) == len(FILES)
