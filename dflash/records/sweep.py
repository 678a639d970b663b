"""Records of what decoding settings and rival drafters are worth beside each other."""

from __future__ import annotations

from dataclasses import dataclass

SWEEP_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One way of decoding; block size 1 is plain decoding.

    Attributes:
        acceptance_ci, tokens_per_s_ci, speedup_ci: bootstrap intervals over prompts; None where one prompt tells nothing.
        tokens_per_s: of all rows together, prefill excluded.
        speedup: over plain decoding at the same temperature and batch size, in alternation.
        vs_best_ci: interval of its tokens/s over those of the fastest cell of its temperature and batch size, in pairs.
        lossless: as in an evaluation; `differing_prompts` is the number behind it.
    """

    block_size: int
    temperature: float
    batch_size: int
    acceptance_length: float
    acceptance_ci: tuple[float, float] | None
    tokens_per_s: float
    tokens_per_s_ci: tuple[float, float] | None
    speedup: float
    speedup_ci: tuple[float, float] | None
    vs_best_ci: tuple[float, float] | None
    lossless: bool
    differing_prompts: int


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A drafter's sweep on one machine.

    Attributes:
        trained_block_size: K.
        machine: what the speeds hang on.
        cells: by temperature, batch size and block size, in the order of the configuration, plain decoding first.
        best: of the lossless cells the one with the most tokens/s.
    """

    drafter: str
    step: int | None
    dataset: str
    prompts: int
    max_new_tokens: int
    trained_block_size: int
    confidence: float
    machine: str
    cells: tuple[SweepCell, ...]
    best: SweepCell
    schema_version: int = SWEEP_SCHEMA_VERSION

    def best_at(self, *, temperature: float, batch_size: int) -> SweepCell | None:
        """The fastest lossless cell of a temperature and batch size; None if they were not part of the sweep."""
        group = [cell for cell in self.cells if (cell.temperature, cell.batch_size) == (temperature, batch_size) and cell.lossless]
        return max(group, key=lambda cell: cell.tokens_per_s) if group else None


@dataclass(frozen=True, slots=True)
class RivalRow:
    """One contestant of an evaluation with baselines: plain decoding, a baseline, or the drafter that is judged.

    Attributes:
        step: optimizer step of its weights; None if it has none.
        acceptance_ci, tokens_per_s_ci, speedup_ci: bootstrap intervals over prompts; None where one prompt tells nothing.
        speedup: over plain decoding.
        gain, gain_ci: the judged drafter's acceptance length minus this one's, prompt by prompt; None in its own row.
        faster, faster_ci: its tokens/s over this one's; likewise.
        lossless: None for plain decoding, which defines it.
    """

    label: str
    step: int | None
    block_size: int
    prompts: int
    acceptance_length: float
    acceptance_ci: tuple[float, float] | None
    tokens_per_s: float
    tokens_per_s_ci: tuple[float, float] | None
    speedup: float
    speedup_ci: tuple[float, float] | None
    gain: float | None
    gain_ci: tuple[float, float] | None
    faster: float | None
    faster_ci: tuple[float, float] | None
    lossless: bool | None


@dataclass(frozen=True, slots=True)
class RivalTable:
    """`baselines.json` of an evaluation: everyone on the same prompts, the judged drafter last.

    Attributes:
        dataset, temperature, batch_size, confidence: of the evaluation.
        machine: what the speeds hang on.
    """

    dataset: str
    temperature: float
    batch_size: int
    confidence: float
    machine: str
    rows: tuple[RivalRow, ...]
    schema_version: int = SWEEP_SCHEMA_VERSION
