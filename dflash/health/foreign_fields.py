"""Which field of somebody else's log is the loss: guessed from the names, and shown; or given, and then taken as it is.

The hard decision: a guess is made from names alone and prefers what was trained on (never an evaluation's loss, a loss
scale or a part of the loss) because a wrong guess judges the wrong curve; where no name fits, none is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dflash.errors import DataError

QUANTITIES = ("step", "loss", "grad_norm", "lr", "time")

# By preference; compared as lower-case words joined by single underscores.
_KNOWN: dict[str, tuple[str, ...]] = {
    "step": (
        "global_step", "step", "steps", "iteration", "iter", "train_global_step", "trainer_global_step", "update", "num_updates",
        "train_step", "train_steps", "training_step", "optimizer_step", "x_step", "record_step", "it",
    ),
    "loss": (
        "loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "lm_loss_training", "reduced_train_loss", "ce",
        "train_ce", "ce_loss", "train_ce_loss", "train_loss_step", "cross_entropy", "train_cross_entropy", "nll", "nll_loss",
        "train_nll_loss", "metrics_loss", "total_loss", "train_total_loss", "loss_mean",
    ),
    "grad_norm": (
        "grad_norm", "gradient_norm", "train_grad_norm", "train_gradient_norm", "gnorm", "train_gnorm", "total_norm",
        "grad_norm_total", "global_grad_norm", "train_global_grad_norm", "metrics_grad_norm", "optim_total_grad_norm",
    ),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate", "lr_0", "metrics_lr", "optim_lr"),
    "time": ("timestamp", "time", "wall_time", "created_at", "wall_time_s"),
}  # fmt: skip
_NOT_TRAINED_ON = frozenset(
    {"eval", "val", "valid", "validation", "test", "dev", "best", "scale", "aux", "loss_scale", "ema", "min", "max"}
)
_WANDB_EXTRA = ("__MIN", "__MAX")
_GIVEN = re.compile(r"\s*([a-z_]+)\s*=\s*(.+?)\s*", re.DOTALL)
_SHOWN_NAMES = 20


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Names of the fields that hold each quantity; None where the log has no such field.

    Attributes:
        given: quantities that a person named.
    """

    step: str | None = None
    loss: str | None = None
    grad_norm: str | None = None
    lr: str | None = None
    time: str | None = None
    given: tuple[str, ...] = ()

    def pairs(self) -> list[tuple[str, str]]:
        """(quantity, field) of everything that is mapped."""
        named = ((quantity, getattr(self, quantity)) for quantity in QUANTITIES)
        return [(quantity, field) for quantity, field in named if field is not None]

    def text(self) -> str:
        """The mapping as the command line would take it."""
        return ", ".join(f"{quantity} = {field}" for quantity, field in self.pairs()) or "nothing"


def parse_map(texts: Sequence[str]) -> FieldMap:
    r"""Read `loss=train/ce,step=global_step`; a comma inside a field's name is written `\,`.

    Raises:
        DataError: it is not of that form, or names an unknown quantity.
    """
    mapping = FieldMap()
    for part in (part for text in texts for part in re.split(r"(?<!\\),", text) if part.strip()):
        match = _GIVEN.fullmatch(part)
        if match is None or match.group(1) not in QUANTITIES:
            raise DataError(
                f"{part.strip()!r} is no mapping of a field", remedy=f"write e.g. loss=train/ce; known are {', '.join(QUANTITIES)}"
            )
        quantity, field = match.group(1), match.group(2).replace("\\,", ",")
        mapping = replace(mapping, **{quantity: field}, given=(*mapping.given, quantity))
    return mapping


def guess_fields(names: Iterable[str], *, given: FieldMap, origin: str) -> FieldMap:
    """Complete a mapping from the names that a log has.

    Args:
        names: fields that hold numbers, in the order of the log.
        given: what a person named; it is not guessed again.
        origin: name of the log, for errors.

    Raises:
        DataError: a given field is not in the log.
    """
    known = list(dict.fromkeys(names))
    for quantity, field in given.pairs():
        if field not in known:
            shown = ", ".join(repr(name) for name in known[:_SHOWN_NAMES]) or "none"
            raise DataError(
                f"{origin} has no field {field!r} ({quantity})", remedy=f"name one of its fields that hold numbers: {shown}"
            )
    return FieldMap(
        step=given.step or _best("step", known),
        loss=given.loss or _best("loss", known),
        grad_norm=given.grad_norm or _best("grad_norm", known),
        lr=given.lr or _best("lr", known),
        time=given.time or _best("time", known),
        given=given.given,
    )


def _best(quantity: str, names: Sequence[str]) -> str | None:
    candidates = [(rank, place, name) for place, name in enumerate(names) if (rank := _rank(quantity, name)) is not None]
    return min(candidates)[2] if candidates else None


def _rank(quantity: str, name: str) -> int | None:
    """How well a name fits: lower is better, None not at all."""
    if name.endswith(_WANDB_EXTRA):
        return None
    preferred = _KNOWN[quantity]
    # Tables exported from W&B put the run's name and " - " before the metric's.
    words = _words(name.rpartition(" - ")[2])
    joined = "_".join(words)
    if joined in preferred:
        # `_step` is the tracker's own count; a step that the trainer logs goes before it.
        return preferred.index(joined) + len(preferred) * name.startswith("_")
    if quantity != "loss" or _NOT_TRAINED_ON.intersection(words):
        return None
    if words[-1:] == ["loss"]:
        return len(preferred) + len(words)
    return None


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
