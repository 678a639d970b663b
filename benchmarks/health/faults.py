"""Faults of training: what happens to losses, gradients and updates. Each changes a run and returns its label.

A fault is given the run, its own random numbers, the step it begins at, and a strength from 0 to 2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.health.labels import SHOWS, Label
from benchmarks.health.runs import Run

Fault = Callable[[Run, np.random.Generator, int, int], Label]

TRANSIENT = frozenset({"transient"})
INSTABILITY = frozenset({"instability"})


def factor_of(run: Run, wanted: float) -> float:
    """Spikes stand out from what a run with hard batches shows all its life."""
    return max(wanted, 2.2 * run.mix.outlier_factor) if run.mix.outlier_frac else wanted


def labelled(kind: str, steps: tuple[int, int], detectors: set[str], **changes: object) -> Label:
    """A label of what deserves a warning, or what `changes` say instead."""
    base: dict[str, object] = {
        "due": steps[0], "severity": "warn", "tolerated": SHOWS, "causes": frozenset(), "rolls_back": False, "culprits": (),
    }  # fmt: skip
    return Label(kind=kind, onset=steps[0], end=steps[1], detectors=frozenset(detectors), **(base | changes))  # type: ignore[arg-type]


def damaging(kind: str, steps: tuple[int, int], detectors: set[str], **changes: object) -> Label:
    """A label of damage, which calls for a rollback."""
    return labelled(kind, steps, detectors, severity="critical", rolls_back=True, **({"causes": INSTABILITY} | changes))


def _batches(run: Run, step: int) -> tuple[int, ...]:
    return tuple(int(batch) for batch in run.columns.batch_id[step])


def last_of(run: Run) -> int:
    """Last row of a run."""
    return len(run.columns.step) - 1


def nan_once(run: Run, _rng: np.random.Generator, step: int, _strength: int) -> Label:
    """One update skipped for a NaN."""
    run.columns.nonfinite[step] = run.columns.skipped[step] = True
    return labelled("NaN once, skipped", (step, step), {"non-finite"}, causes=frozenset({"transient", "unknown"}))


def nan_forever(run: Run, _rng: np.random.Generator, step: int, _strength: int) -> Label:
    """NaN from a step on, every update skipped."""
    run.columns.nonfinite[step:] = run.columns.skipped[step:] = True
    return damaging("NaN from a step on", (step, last_of(run)), {"non-finite"}, culprits=_batches(run, step))


def nan_in_weights(run: Run, _rng: np.random.Generator, step: int, _strength: int) -> Label:
    """An update that was applied although it was not finite."""
    run.columns.nonfinite[step:] = True
    return damaging("NaN in the weights", (step, last_of(run)), {"non-finite"}, culprits=_batches(run, step))


def inf_gradient(run: Run, rng: np.random.Generator, step: int, strength: int) -> Label:
    """An infinite gradient, and NaN a few steps later."""
    run.columns.grad_norm[step] = np.inf
    run.columns.skipped[step] = True
    later = step + int(rng.integers(1, (5, 12, 21)[strength]))
    run.columns.nonfinite[later:] = run.columns.skipped[later:] = True
    return damaging("Inf gradient, then NaN", (step, last_of(run)), {"non-finite"}, due=later, culprits=_batches(run, step))


def single_spike(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """One micro-batch far above its bucket, back at once."""
    factor = factor_of(run, (3.0, 5.5, 10.0)[strength])
    run.columns.loss[step, 0] *= factor
    run.columns.grad_norm[step] *= factor
    return labelled("single spike", (step, step), {"loss spike"}, causes=TRANSIENT)


def slow_spike(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A spike that decays within fifty steps."""
    factor, decay = factor_of(run, (4.0, 6.0, 10.0)[strength]), (3.0, 6.0, 10.0)[strength]
    age = np.arange(len(run.columns.step) - step)
    run.columns.loss[step:] *= (factor ** np.exp(-age / decay))[:, None]
    run.columns.grad_norm[step] *= factor
    return labelled("slow-recovering spike", (step, step + 50), {"loss spike", "sustained rise"}, causes=TRANSIENT)


def stuck_spike(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A spike that is far from over after fifty steps."""
    factor, decay = factor_of(run, (4.0, 6.0, 10.0)[strength]), (80.0, 120.0, 200.0)[strength]
    age = np.arange(len(run.columns.step) - step)
    run.columns.loss[step:] *= (factor ** np.exp(-age / decay))[:, None]
    run.columns.grad_norm[step] *= factor
    return damaging(
        "spike that does not recover", (step, step + 200), {"loss spike", "sustained rise"}, culprits=_batches(run, step)
    )


def level_shift(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """The loss of every bucket jumps and stays."""
    run.columns.loss[step:] *= (1.4, 1.8, 3.0)[strength]
    return damaging(
        "level shift", (step, last_of(run)), {"loss spike", "sustained rise", "divergence"}, culprits=_batches(run, step)
    )


def ramp(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """The loss grows exponentially, up to four times."""
    doubling = (120.0, 80.0, 40.0)[strength]
    age = np.arange(len(run.columns.step) - step)
    run.columns.loss[step:] *= np.minimum(2 ** (age / doubling), 4.0)[:, None]
    detectors = {"loss spike", "sustained rise", "divergence"}
    return damaging("exponential ramp", (step, last_of(run)), detectors, due=step + int(doubling / 4))


def explosion(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """The gradient norm explodes, the loss follows and stays up."""
    run.columns.grad_norm[step : step + 8] *= (10.0, 30.0, 100.0)[strength]
    run.columns.loss[step + 2 :] *= (2.0, 2.5, 4.0)[strength]
    detectors = {"loss spike", "sustained rise"}
    return damaging("gradient explosion, then loss", (step, last_of(run)), detectors, due=step + 2, culprits=_batches(run, step))


def clipped_away(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Clipping leaves nothing of the updates for sixty steps; the loss does not show it yet."""
    run.columns.grad_norm[step : step + 60] *= (60.0, 100.0, 300.0)[strength]
    return damaging("gradients clipped away", (step, step + 60), {"gradient explosion"}, culprits=_batches(run, step))


def gradient_outlier(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A gradient far out that does nothing."""
    run.columns.grad_norm[step] *= (6.0, 10.0, 17.0)[strength]
    return labelled("harmless gradient outlier", (step, step), {"gradient spike"}, causes=TRANSIENT)


def adversarial(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Three bad batches within twenty steps."""
    factor = factor_of(run, (5.0, 7.0, 10.0)[strength])
    steps = [step, step + 7, step + 15]
    for bad in steps:
        run.columns.loss[bad, 0] *= factor
        run.columns.grad_norm[bad] *= factor
    culprits = tuple(batch for bad in steps for batch in _batches(run, bad))
    return damaging("three spikes in twenty steps", (step, steps[-1]), {"loss spike"}, due=steps[-1], culprits=culprits)


def recurring(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """The same samples spike again in the next epoch."""
    c = run.columns
    factor = factor_of(run, (5.0, 7.0, 10.0)[strength])
    half = len(c.step) // 2
    c.epoch[half:] = 1
    c.first_row[half:] -= c.first_row[half, 0]
    run.events.append((half, "epoch", {"epoch": 1}))
    first = half - 250 + step % 50
    again = max(min(step, len(c.step) - 60), half + 60)
    sample, other = c.first_row[first, 0], c.first_row[again, 0]
    c.first_row[half:][c.first_row[half:] == sample] = other
    c.first_row[again, 0] = sample
    for bad in (first, again):
        c.loss[bad, 0] *= factor
        c.grad_norm[bad] *= factor
    causes = frozenset({"adversarial batch", "transient"})
    return labelled("adversarial samples in two epochs", (first, again), {"loss spike"}, causes=causes, culprits=())


def accuracy_collapse(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Accuracy collapses, the loss does not move."""
    run.columns.accuracy[step : step + 150] *= (0.3, 0.1, 0.0)[strength]
    return labelled("accuracy collapse at flat loss", (step, step + 150), {"accuracy drop", "dead metric"})


def soak_fault(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A level shift shortly after a save: inside that checkpoint's soak."""
    at = step - step % 200 + (20, 80, 150)[strength]
    run.columns.loss[at:] *= 2.0
    return damaging("fault inside the soak", (at, last_of(run)), {"loss spike", "sustained rise"}, culprits=_batches(run, at))


TRAINING: tuple[Fault, ...] = (
    nan_once, nan_forever, nan_in_weights, inf_gradient, single_spike, slow_spike, stuck_spike, level_shift, ramp, explosion,
    clipped_away, gradient_outlier, adversarial, recurring, accuracy_collapse, soak_fault,
)  # fmt: skip
WINDOWED: tuple[Fault, ...] = (nan_forever, level_shift, ramp)
"""Those that outlast a window by far, so that a log of means over a few steps still shows them."""
