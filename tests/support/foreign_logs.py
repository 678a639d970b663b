"""Training logs as other people write them, made from one curve of our own numbers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def curve(*, records: int, seed: int, every: int = 10) -> list[Row]:
    """A healthy run recorded every `every` steps: falling loss, settling gradient, a warm-up."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(records):
        loss = (2.0 + 8.0 * np.exp(-index / 40)) * np.exp(0.02 * rng.standard_normal())
        norm = (3.0 + 20.0 * np.exp(-index / 15)) * np.exp(0.1 * rng.standard_normal())
        lr = 1e-3 * min(1.0, (index + 1) / 30)
        rows.append({"step": every * (index + 1), "loss": float(loss), "grad_norm": float(norm), "lr": lr})
    return rows


def spiked(rows: Sequence[Row], *, record: int, factor: float) -> list[Row]:
    """One record's loss multiplied."""
    return [row | {"loss": row["loss"] * factor} if index == record else dict(row) for index, row in enumerate(rows)]


def json_lines(rows: Iterable[Row]) -> bytes:
    """One object a line, bare NaN tokens as Python writes them."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows: Sequence[Row], *, delimiter: str = ",") -> bytes:
    """A CSV with a line of names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def trainer_state(rows: Sequence[Row]) -> bytes:
    """A Hugging Face `trainer_state.json` with evaluations between, and the run's average at the end."""
    history: list[Row] = []
    for index, row in enumerate(rows):
        history.append(
            {"epoch": index / 10, "learning_rate": row["lr"]} | {name: row[name] for name in ("step", "loss", "grad_norm")}
        )
        if index % 20 == 19:
            history.append({"epoch": index / 10, "eval_loss": 99.0, "eval_runtime": 3.0, "step": row["step"]})
    average = {"train_loss": 3.3, "loss": 50.0, "train_runtime": 12.0, "total_flos": 1.0, "step": rows[-1]["step"] + 1}
    return json.dumps({"global_step": rows[-1]["step"], "log_history": [*history, average]}, indent=1).encode()


def golden(rows: Sequence[Row], *, as_list: bool = False) -> bytes:
    """Golden values: a series of values by step, numbers or the text "nan"."""
    every = rows[1]["step"] - rows[0]["step"]
    series: Row = {}
    for name in ("loss", "grad_norm"):
        values: Any = {str(row["step"]): row[name] for row in rows}
        values = list(values.values()) if as_list else values
        series["lm loss" if name == "loss" else "grad-norm"] = {
            "start_step": rows[0]["step"], "end_step": rows[-1]["step"], "step_interval": every, "values": values,
        }  # fmt: skip
    return json.dumps(series).encode()


def history_entries(rows: Sequence[Row]) -> list[Row]:
    """MLflow's metric history: one value an entry, metric after metric."""
    return [
        {"key": f"train/{name}", "value": row[name], "timestamp": 1_700_000_000_000 + row["step"], "step": row["step"]}
        for name in ("loss", "grad_norm")
        for row in rows
    ]


def wandb_rows(rows: Sequence[Row]) -> list[Row]:
    """An exported W&B history: prefixed names, its own step, machine readings between."""
    out: list[Row] = []
    for index, row in enumerate(rows):
        own = {"_step": index, "_timestamp": 1_700_000_000.0 + index, "train/global_step": row["step"]}
        out.append(own | {"train/loss": row["loss"], "train/grad_norm": row["grad_norm"], "eval/loss": None})
        if index % 10 == 9:
            out.append(own | {"eval/loss": 77.0})
    return out
