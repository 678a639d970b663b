"""Faults of everything around training: saves, data order, queues, speed, resumes, sensors. As in `faults`."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from benchmarks.health.faults import Fault, damaging, factor_of, labelled, last_of
from benchmarks.health.labels import Label
from benchmarks.health.runs import QUEUE_FULL, SAVE_INTERVAL, SAVE_STEPS, TARGETS, Columns, Run, rebucket
from dflash.health.lines import LogReplaced, TornLine

_NONE: frozenset[str] = frozenset()
_SAVES = frozenset({"step integrity", "save stall", "short window", "save correlation"})


def few_tokens(run: Run, rng: np.random.Generator, step: int, strength: int) -> Label:
    """Batches of a handful of tokens that happen to hit nothing: no news at all."""
    chosen = rng.choice(np.arange(step, step + 200), size=(5, 10, 20)[strength], replace=False)
    run.columns.n_tokens[chosen] = 8
    run.columns.accuracy[chosen] = 0.0
    return labelled("no hit among few tokens", (step, step + 200), set(), tolerated=_NONE)


def short_windows(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Records cut short by saves: few samples, high by chance."""
    for save in range(SAVE_INTERVAL, len(run.columns.step), SAVE_INTERVAL):
        rows = run.rows_of(save, save + 2)
        run.columns.n_tokens[rows] = np.maximum(run.columns.n_tokens[rows] // (30, 50, 80)[strength], 4)
        run.columns.loss[rows] *= (1.7, 2.0, 2.3)[strength]
    steps = (SAVE_INTERVAL, last_of(run))
    due = step - step % SAVE_INTERVAL
    changes = {"severity": "info", "tolerated": _SAVES, "due": due, "causes": frozenset({"window artefact"})}
    return labelled("short windows at saves", steps, {"short window"}, **changes)


def save_gap(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Records missing from the beginning of a save on."""
    save = step - step % SAVE_INTERVAL
    missing = (2, 8, 15)[strength]
    run.columns.present[save : save + missing] = False
    return labelled("save gap", (save, save + missing - 1), {"step integrity"}, severity="info", tolerated=_SAVES)


def save_stall(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Steps during saves take far longer from some save on."""
    first = step - step % SAVE_INTERVAL
    for save in range(first, len(run.columns.step), SAVE_INTERVAL):
        run.columns.step_time_s[run.rows_of(save, save + SAVE_STEPS)] *= (2.5, 5.0, 15.0)[strength]
    return labelled("save stall", (first, last_of(run)), {"save stall"}, due=first + SAVE_STEPS, tolerated=_SAVES)


def save_hung(run: Run, _rng: np.random.Generator, step: int, _strength: int) -> Label:
    """A save that never ends, and none after it."""
    save = step - step % SAVE_INTERVAL
    run.events = [each for each in run.events if each[0] <= save or each[1] not in ("save_begin", "save_durable")]
    due = save + int(max(10 * SAVE_STEPS, 60 / run.mix.step_s))
    return labelled("save hung", (save, last_of(run)), {"save stall"}, severity="critical", due=due, tolerated=_SAVES)


def save_linked(run: Run, rng: np.random.Generator, _step: int, strength: int) -> Label:
    """Real spikes right after 2, 5 or 20 saves; two prove nothing."""
    count, steps = (2, 5, 20)[strength], len(run.columns.step)
    interval = SAVE_INTERVAL if count < 20 else steps // 24
    run.events = [each for each in run.events if each[1] not in ("save_begin", "save_durable")]
    saves = [save for save in range(interval, steps - interval, interval) if save > 2 * SAVE_INTERVAL // 2][:]
    for save in saves:
        run.events += [(save, "save_begin", {"step": save}), (save + SAVE_STEPS, "save_durable", {"step": save})]
    chosen = [save for save in saves if save > 350][:count] if count < 20 else saves[-20:]
    for save in chosen:
        at = save + int(rng.integers(1, 8))
        run.columns.loss[at, 0] *= factor_of(run, 6.0)
        run.columns.grad_norm[at] *= 6.0
    detectors = {"loss spike"} if count < 5 else {"save correlation"}
    due = chosen[0] if count < 5 else chosen[4]
    causes = {"transient"} if count < 5 else {"save-linked", "transient"}
    return labelled(f"spikes at {count} saves", (chosen[0], chosen[-1] + 8), detectors, due=due + 8, causes=frozenset(causes))


def bucket_runs(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A long stretch of one bucket."""
    length = (8, 20, 60)[strength]
    kind = "long run of one bucket"
    if len(run.mix.buckets) == 1:
        return labelled(kind, (step, step), set(), tolerated=_NONE)
    count = -(-length // run.mix.micro_batches)
    rebucket(run, np.ones((count, run.mix.micro_batches), bool), int(run.columns.bucket[step, 0]), first=step)
    return labelled(
        kind, (step, step + count), {"bucket run"}, tolerated=frozenset({"share drift", "loss spike", "gradient spike"})
    )


def share_drift(run: Run, rng: np.random.Generator, step: int, strength: int) -> Label:
    """One bucket takes over a part of the others' batches."""
    c = run.columns
    kind = "bucket share drift"
    if len(run.mix.buckets) == 1:
        return labelled(kind, (step, step), set(), tolerated=_NONE)
    taken = rng.random(c.bucket[step:].shape) < (0.35, 0.5, 0.7)[strength]
    rebucket(run, taken, len(run.mix.buckets) - 2, first=step)
    due = step + 256 // run.mix.micro_batches
    return labelled(kind, (step, last_of(run)), {"share drift"}, due=due, tolerated=frozenset({"bucket run", "throughput"}))


def queue_decline(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """The ready queue sinks in a line from full to well below three quarters."""
    step -= 300  # a plan that runs out drains the queue by itself; the decline has to come before
    span, to = (500, 400, 250)[strength], (190, 150, 60)[strength]
    age = np.arange(len(run.columns.step) - step)
    level = QUEUE_FULL + np.minimum(age / span, 1.0) * (to - QUEUE_FULL)
    run.columns.ready[step:] = np.minimum(run.columns.ready[step:], level.astype(np.int64) + age % 3)
    due = step + int(span * 0.25 * QUEUE_FULL / (QUEUE_FULL - to))
    return labelled("queue decline", (step, last_of(run)), {"queue decline"}, due=due, tolerated=_NONE)


def saw_tooth(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A queue that empties and fills again all the time is no decline."""
    period = (20, 40, 60)[strength]
    age = np.arange(len(run.columns.step) - step)
    run.columns.ready[step:] = np.minimum(run.columns.ready[step:], QUEUE_FULL - 2 * (age % period))
    return labelled("saw-tooth queue", (step, last_of(run)), set(), tolerated=_NONE)


def slow_target(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """One of six target workers does far less than its share."""
    c = run.columns
    after = np.arange(len(c.step) - step)[:, None]
    share = np.ones(TARGETS)
    share[2] = (0.5, 0.3, 0.0)[strength]
    share /= share.sum()
    c.targets[step:] = c.targets[step - 1] + (after * share + np.arange(TARGETS) / TARGETS).astype(np.int64)
    return labelled("one slow target", (step, last_of(run)), {"target imbalance"}, due=step + 60, tolerated=_NONE)


def slow_run(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Throughput falls by 10 % (no news), 30 % or 60 %."""
    fall = (0.10, 0.30, 0.60)[strength]
    run.columns.step_time_s[step:] /= 1 - fall
    kind = f"throughput -{100 * fall:.0f} %"
    if strength == 0:
        return labelled(kind, (step, last_of(run)), set(), tolerated=_NONE)
    severity = "warn" if strength == 1 else "critical"
    return labelled(kind, (step, last_of(run)), {"throughput"}, severity=severity, due=step + 48, tolerated=_NONE)


def _resume(run: Run, *, from_step: int, died_at: int, position_back: int) -> int:
    """The trainer dies after `died_at` and goes on from `from_step`; returns the first row of the new segment."""
    c = run.columns
    order = np.concatenate([np.arange(died_at + 1), np.arange(from_step, len(c.step))])
    for each in fields(Columns):
        setattr(c, each.name, getattr(c, each.name)[order].copy())
    first = died_at + 1
    c.segment[first:] = 1
    shift = position_back * run.mix.micro_batches
    c.batch_id[first:] -= shift
    c.first_row[first:] = c.batch_id[first:] * (c.first_row[1, 0] // c.batch_id[1, 0])
    moved = [(at + died_at + 1 - from_step, name, details) for at, name, details in run.events if at >= from_step]
    run.events = [each for each in run.events if each[0] <= died_at and each[1] != "finish"] + moved
    run.events.append((first, "resume", {"step": from_step, "segment": 1, "total_steps": run.total_steps}))
    return first


def bad_resume(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A resume from a state that is not the one saved: the loss starts far higher and comes down slowly."""
    save = step - step % SAVE_INTERVAL
    first = _resume(run, from_step=save, died_at=save + 60, position_back=0)
    age = np.arange(len(run.columns.step) - first)
    height = (0.6, 1.0, 2.0)[strength]
    run.columns.loss[first:] *= (1 + height * np.exp(-age / 300))[:, None]
    # It ends where less than 15 % of it is left: 250 steps on, a rise of 200 % still doubles the loss.
    end = min(save + int(300 * np.log(height / 0.15)), len(run.columns.step) - 62)
    detectors = {"bad resume", "loss spike", "sustained rise"}
    return damaging("bad resume", (save, end), detectors, due=save + 30, causes=frozenset({"instability", "bad resume"}))


def clean_resume(run: Run, _rng: np.random.Generator, step: int, _strength: int) -> Label:
    """A resume that goes on exactly: no news."""
    save = step - step % SAVE_INTERVAL
    _resume(run, from_step=save, died_at=save + 60, position_back=0)
    return labelled("exact resume", (save, save), set(), tolerated=_NONE)


def replay(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A resume that has lost its place in the plan: batches come again, a little easier than before."""
    save = step - step % SAVE_INTERVAL
    back = (20, 100, 300)[strength]
    first = _resume(run, from_step=save, died_at=save + 60, position_back=back)
    run.columns.loss[first : first + back] *= 0.9
    causes = frozenset({"replayed data"})
    return damaging("data replay", (save, save + back), {"repeated data"}, causes=causes)


def lr_glitch(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """The learning rate is wrong for a while."""
    run.columns.lr[step : step + 30] *= (0.8, 2.0, 10.0)[strength]
    return labelled("lr glitch", (step, step + 29), {"lr mismatch"}, tolerated=_NONE)


def frozen_metric(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A metric stands still: the gradient norm at zero, or at its last value."""
    run.columns.grad_norm[step : step + 200] = 0.0 if strength == 0 else run.columns.grad_norm[step]
    due = step if strength == 0 else step + 50
    tolerated = frozenset({"gradient spike"})
    return labelled("frozen metric", (step, step + 199), {"dead metric"}, due=due, tolerated=tolerated)


def planned_change(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A declared change of data or learning rate moves the loss once: to be noted at most."""
    run.columns.loss[step:] *= (1.2, 1.4, 1.6)[strength]
    run.events.append((step, "lr_change" if strength == 1 else "epoch", {"phase": 1}))
    tolerated = frozenset({"loss spike", "sustained rise", "gradient spike"})
    return labelled("planned change", (step, step + 150), set(), tolerated=tolerated, causes=frozenset({"planned shift"}))


def disordered(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """A step twice, ten records from an earlier stretch again, or a second writer behind the first."""
    c = run.columns
    again = (np.array([step]), np.arange(step - 40, step - 30), np.arange(step - 60, step))[strength]
    order = np.insert(np.arange(len(c.step)), step + 1, again)
    for each in fields(Columns):
        setattr(c, each.name, getattr(c, each.name)[order].copy())
    run.events = [(at + (len(again) if at > step else 0), name, details) for at, name, details in run.events]
    severity = "warn" if strength == 0 else "critical"
    first = int(again[0])
    return labelled("records out of order", (first, step), {"step integrity"}, severity=severity, due=step, tolerated=_NONE)


def two_writers(run: Run, _rng: np.random.Generator, step: int, strength: int) -> Label:
    """Two trainers write one log, line by line: the second is some steps behind the first."""
    c = run.columns
    behind, count = (1, 20, 60)[strength], 40
    order = np.concatenate(
        [np.arange(step), np.stack([np.arange(step, step + count), np.arange(count) + step - behind], 1).ravel()]
    )
    order = np.concatenate([order, np.arange(step + count, len(c.step))])
    for each in fields(Columns):
        setattr(c, each.name, getattr(c, each.name)[order].copy())
    run.events = [(at + min(max(at - step, 0), count), name, details) for at, name, details in run.events]
    kind = "two writers, line by line"
    return labelled(kind, (step - behind, step + count), {"step integrity"}, severity="critical", due=step + 1, tolerated=_NONE)


def torn_lines(run: Run, rng: np.random.Generator, step: int, strength: int) -> Label:
    """Lines that cannot be read in the place of records: one, eight, or one where the log is rotated."""
    rows = [step] if strength != 1 else sorted(int(row) for row in rng.choice(np.arange(step, step + 40), size=8, replace=False))
    for row in rows:
        run.columns.present[row] = False
        run.broken.append((row, TornLine(offset=900 * row, length_bytes=412, reason="not a JSON object")))
    if strength == 2:
        run.broken.append((step + 1, LogReplaced("rotated")))
    return labelled("torn lines", (rows[0], rows[-1]), {"step integrity"}, tolerated=_NONE)


def torn_by_crash(run: Run, _rng: np.random.Generator, step: int, _strength: int) -> Label:
    """A trainer that dies while it writes a line, and its exact resume: to be noted at most."""
    save = step - step % SAVE_INTERVAL
    first = _resume(run, from_step=save, died_at=save + 60, position_back=0)
    run.broken.append((first, TornLine(offset=900 * first, length_bytes=203, reason="not a JSON object")))
    kind = "line torn by a crash, resumed"
    return labelled(kind, (save, save), {"step integrity"}, severity="info", due=save, tolerated=_NONE)


def queue_sinks(run: Run, _rng: np.random.Generator, _step: int, strength: int) -> Label:
    """The ready queue sinks from 300 to 200 or less over the whole run, part of a plan that goes on behind it."""
    c, first, to = run.columns, 150, (200, 170, 120)[strength]
    age = np.arange(len(c.step) - first)
    level = QUEUE_FULL + age / len(age) * (to - QUEUE_FULL)
    c.ready[first:] = np.maximum(level.astype(np.int64) - age % 4, 0)
    c.feature[first:] = 8
    due = first + int(len(age) * 0.25 * QUEUE_FULL / (QUEUE_FULL - to))
    return labelled("queue sinks over the run", (first, last_of(run)), {"queue decline"}, due=due, tolerated=_NONE)


OPERATIONS: tuple[Fault, ...] = (
    few_tokens, short_windows, save_gap, save_stall, save_hung, save_linked, bucket_runs, share_drift, queue_decline, saw_tooth,
    slow_target, slow_run, bad_resume, clean_resume, replay, lr_glitch, frozen_metric, planned_change, disordered, two_writers,
    torn_lines, torn_by_crash, queue_sinks,
)  # fmt: skip
