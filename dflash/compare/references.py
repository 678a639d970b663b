"""Published results of others, as they stand in their papers and repositories: data, and the one conversion between conventions.

Invariant: a figure is here only with the address where it stands, the hardware that its source names (or that it names none), and
what its source counts. Nothing is read off a plot, averaged or inferred. They are other people's measurements on other people's
hardware: acceptance may be compared with caution where target, prompts and temperature are the same, speed never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NOT_STATED = "not stated"
READ_IN = "2026-11"
"""Month in which the sources were read."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures stand.

    Attributes:
        counts_bonus: whether the target's own token is part of the published length, as it is of ours.
        hardware: as the source names it.
        note: what else decides the figures.
    """

    label: str
    address: str
    hardware: str
    counts_bonus: bool
    note: str


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """One published figure.

    Attributes:
        drafted_tokens: tokens proposed a verification; None for trees.
        published_length: acceptance length as printed; None where only a speed is published.
        speedup: over the source's own plain decoding; None where none is published.
        temperature: None where the source does not say.
    """

    source: Source
    method: str
    target: str
    prompts: str
    drafted_tokens: int | None
    temperature: float | None
    published_length: float | None
    speedup: float | None

    @property
    def acceptance_length(self) -> float | None:
        """In our convention: tokens committed a verification, the target's own among them."""
        if self.published_length is None:
            return None
        return self.published_length + (0.0 if self.source.counts_bonus else 1.0)

    @property
    def block_size(self) -> int | None:
        """In our convention: the anchor and the drafted tokens."""
        return None if self.drafted_tokens is None else self.drafted_tokens + 1


ZLAB = Source(
    "z-lab DFlash, table 1",
    "https://arxiv.org/abs/2602.06036",
    "NVIDIA H200",
    counts_bonus=True,
    note="thinking off, at most 2048 new tokens, transformers; drafts behind a stop token count",
)
ZLAB_SERVED = Source(
    "z-lab DFlash, table 3",
    "https://arxiv.org/abs/2602.06036",
    "one NVIDIA B200",
    counts_bonus=True,
    note="SGLang, FlashAttention-4, concurrency 1",
)
DSPARK = Source(
    "DSpark, table 1",
    "https://arxiv.org/abs/2607.05147",
    NOT_STATED,
    counts_bonus=True,
    note="thinking off; every drafter trained by its authors on the same 1.3 M prompts, answers by the target",
)
MODELOPT = Source(
    "NVIDIA ModelOpt, z-lab's script",
    "https://github.com/NVIDIA/Model-Optimizer/blob/main/examples/speculative_decoding/doc/dflash_results.md",
    "trained on 64 H100; evaluation not stated",
    counts_bonus=True,
    note="at most 512 new tokens; decoded by z-lab's benchmark script",
)
MODELOPT_OWN = Source(
    "NVIDIA ModelOpt, own validation",
    "https://github.com/NVIDIA/Model-Optimizer/blob/main/examples/speculative_decoding/doc/dflash_results.md",
    "trained on 64 H100; evaluation not stated",
    counts_bonus=True,
    note="at most 512 new tokens; no drafter cache, so no speculative decoding proper",
)
MODELOPT_SERVED = Source(
    "NVIDIA ModelOpt, vLLM",
    "https://github.com/NVIDIA/Model-Optimizer/blob/main/examples/speculative_decoding/doc/dflash.md",
    "one NVIDIA H100",
    counts_bonus=True,
    note="80 prompts, at most 1024 new tokens, tensor parallel 1",
)
MODELOPT_DSPARK = Source(
    "NVIDIA ModelOpt DSpark",
    "https://github.com/NVIDIA/Model-Optimizer/blob/main/examples/speculative_decoding/doc/dspark.md",
    NOT_STATED,
    counts_bonus=True,
    note="overall of SPEED-Bench, vLLM's acceptance length (it counts the target's token)",
)
INTEL = Source(
    "Intel, OpenVINO",
    "https://huggingface.co/blog/ofirzaf/intel-dflash-ptl",
    "Intel Panther Lake laptop",
    counts_bonus=True,
    note="speeds only; the figure of the 27B target is its best case (`up to`)",
)

Rows = Mapping[str, tuple[float | None, float | None]]
"""Prompt set -> (published length, speed-up)."""


def _rows(
    source: Source, method: str, target: str, rows: Rows, *, drafted: int | None, temperature: float | None
) -> tuple[ReferenceResult, ...]:  # fmt: skip
    return tuple(
        ReferenceResult(source, method, target, prompts, drafted, temperature, length, speedup)
        for prompts, (length, speedup) in rows.items()
    )


def _lengths(**lengths: float) -> Rows:
    """Prompt sets by the names that they have here."""
    return {name.replace("_", "-"): (length, None) for name, length in lengths.items()}


REFERENCES: tuple[ReferenceResult, ...] = (
    *_rows(
        ZLAB, "DFlash", "Qwen3-4B",
        {"gsm8k": (6.53, 5.15), "math500": (7.84, 6.09), "humaneval": (6.64, 5.21), "mbpp": (6.09, 4.78), "mt-bench": (4.35, 2.85)},
        drafted=15, temperature=0.0,
    ),
    *_rows(
        ZLAB, "DFlash", "Qwen3-4B",
        {"gsm8k": (6.00, 4.71), "math500": (6.67, 5.09), "humaneval": (6.04, 4.74), "mbpp": (5.66, 4.42), "mt-bench": (4.07, 2.67)},
        drafted=15, temperature=1.0,
    ),
    *_rows(
        ZLAB, "DFlash", "Qwen3-8B",
        {"gsm8k": (6.54, 5.15), "math500": (7.87, 6.08), "humaneval": (6.50, 5.14), "mbpp": (5.95, 4.65), "mt-bench": (4.24, 2.75)},
        drafted=15, temperature=0.0,
    ),
    *_rows(
        ZLAB, "DFlash", "Qwen3-8B",
        {"gsm8k": (5.98, 4.67), "math500": (6.40, 4.84), "humaneval": (5.52, 4.32), "mbpp": (5.21, 4.04), "mt-bench": (3.80, 2.47)},
        drafted=15, temperature=1.0,
    ),
    *_rows(
        ZLAB, "EAGLE-3 (tree of 60)", "Qwen3-8B",
        {"gsm8k": (3.71, 2.23), "math500": (3.49, 2.05), "humaneval": (3.65, 2.17), "mbpp": (3.25, 1.93), "mt-bench": (3.26, 1.90)},
        drafted=None, temperature=0.0,
    ),
    *_rows(ZLAB_SERVED, "DFlash", "Qwen3-8B", {"math500": (8.01, 5.1), "humaneval": (6.50, 4.2)}, drafted=15, temperature=None),
    *_rows(
        DSPARK, "DSpark", "Qwen3-4B",
        _lengths(gsm8k=6.11, math500=5.70, humaneval=5.38, mbpp=5.13, mt_bench=3.64, alpaca=3.54), drafted=7, temperature=1.0,
    ),
    *_rows(
        DSPARK, "DFlash", "Qwen3-4B",
        _lengths(gsm8k=5.40, math500=4.85, humaneval=4.74, mbpp=4.40, mt_bench=3.07, alpaca=2.96), drafted=7, temperature=1.0,
    ),
    *_rows(
        DSPARK, "DSpark", "Qwen3-8B",
        _lengths(gsm8k=6.17, math500=5.78, humaneval=5.52, mbpp=5.16, mt_bench=3.72, alpaca=3.58), drafted=7, temperature=1.0,
    ),
    *_rows(
        DSPARK, "DFlash", "Qwen3-8B",
        _lengths(gsm8k=5.33, math500=4.91, humaneval=4.64, mbpp=4.36, mt_bench=3.11, alpaca=2.98), drafted=7, temperature=1.0,
    ),
    *_rows(
        DSPARK, "EAGLE-3", "Qwen3-8B",
        _lengths(gsm8k=5.30, math500=4.77, humaneval=4.33, mbpp=3.96, mt_bench=2.66, alpaca=2.54), drafted=7, temperature=1.0,
    ),
    *_rows(MODELOPT, "DFlash (ModelOpt)", "Qwen3-8B", _lengths(gsm8k=4.08, mt_bench=2.99), drafted=7, temperature=None),
    *_rows(MODELOPT, "DFlash (z-lab's weights)", "Qwen3-8B", _lengths(gsm8k=5.00, mt_bench=3.28), drafted=15, temperature=None),
    *_rows(MODELOPT_OWN, "DFlash (ModelOpt)", "Qwen3-8B", _lengths(gsm8k=5.19, mt_bench=4.36), drafted=7, temperature=None),
    *_rows(MODELOPT_SERVED, "DFlash (ModelOpt)", "Qwen3-8B", {"mt-bench": (None, 3.1)}, drafted=7, temperature=None),
    *_rows(MODELOPT_SERVED, "DFlash (z-lab's weights)", "Qwen3-8B", {"mt-bench": (None, 2.9)}, drafted=15, temperature=None),
    *_rows(MODELOPT_DSPARK, "DSpark", "Qwen3.5-9B", {"speed-bench": (4.1519, None)}, drafted=7, temperature=0.0),
    *_rows(MODELOPT_DSPARK, "DSpark", "Qwen3.5-9B", {"speed-bench": (3.5567, None)}, drafted=7, temperature=1.0),
    *_rows(MODELOPT_DSPARK, "DSpark", "Qwen3.5-35B-A3B", {"speed-bench": (3.9702, None)}, drafted=7, temperature=0.0),
    *_rows(MODELOPT_DSPARK, "DSpark", "Qwen3.5-35B-A3B", {"speed-bench": (3.4866, None)}, drafted=7, temperature=1.0),
    *_rows(
        INTEL, "DFlash", "Qwen3.6-35B-A3B", {"humaneval": (None, 2.2), "mt-bench": (None, 1.3), "gsm8k": (None, 1.6)},
        drafted=None, temperature=None,
    ),
    *_rows(INTEL, "DFlash", "Qwen3.6-27B", {"humaneval": (None, 5.5)}, drafted=None, temperature=None),
)  # fmt: skip

HOW_READ = (
    (
        "The papers' tables were read in public transcriptions and not in the papers' own files: in two that agree, but for "
        "z-lab's table 3 and DSpark's rows for Qwen3-4B, of which one was at hand."
    ),
    "The other pages were read as their repositories and sites show them.",
)
NOT_FOUND = (
    "An acceptance length of any drafter for Qwen3.6-27B, the target of `configs/train-v2.yaml`, with prompts and settings.",
    "Intervals: none of these sources publishes one.",
    "The hardware of DSpark's and of ModelOpt's acceptance measurements.",
)
"""What was looked for and is not in the table."""
