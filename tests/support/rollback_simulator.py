"""A whole run in miniature: trainer, checker and supervisor over shared durable state, with faults and sudden deaths.

Every actor is a generator that yields after each durable effect, so the scheduler can kill it between any two lines.
What survives a death is exactly what `World` holds; a killed actor begins again from nothing.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from dflash.checkpoint import Evidence, checkpoints_to_delete
from dflash.checkpoint.clean import propose_transitions
from dflash.config import CheckpointConfig
from dflash.config.rollback import RollbackConfig
from dflash.records import LedgerEntry
from dflash.records.rollback import Damage, LedgerLine, RollbackEntry, RollbackPlan, SavedState
from dflash.rollback import (
    Acknowledge,
    Facts,
    MoveAside,
    NoteCheckpoint,
    NoteRollback,
    Situation,
    StopTrainer,
    VerifyTarget,
    decide,
    next_action,
    skips_in_force,
)
from dflash.rollback.ladder import clean_steps


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    `batch` damages whoever consumes plan position `at`; `step` damages the update of step `at`, `times` times;
    `always` damages every update from step `at` on; `disk` spoils the files of the first checkpoint saved at or after `at`.
    The damage shows in the log `latency` records later.
    """

    kind: Literal["batch", "step", "always", "disk"]
    at: int
    latency: int = 1
    times: int = 1


@dataclass(frozen=True)
class Record:
    """One line of the log: shows damage that began at `onset`, if any."""

    segment: int
    step: int
    position: int
    onset: int | None


@dataclass
class Checkpoint:
    """A complete folder; `damaged_since` and `spoiled` are the truth that no actor sees."""

    segment: int
    position: int
    damaged_since: int | None
    latency: int
    spoiled: bool


@dataclass
class Trainer:
    """A living trainer process; all of this is lost with it."""

    segment: int
    step: int
    position: int
    damaged_since: int | None
    latency: int
    skip: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Return:
    """A finished rollback beside the truth: was its checkpoint damaged, and which was the newest truly clean one."""

    entry: RollbackEntry
    damaged: bool
    best: int


@dataclass
class World:
    """Everything durable, and the truth."""

    faults: list[Fault]
    total_steps: int
    rule: RollbackConfig
    saves: CheckpointConfig
    batches_per_epoch: int
    ledger: list[LedgerLine] = field(default_factory=list)
    disk: dict[int, Checkpoint] = field(default_factory=dict)
    aside: list[tuple[int, int]] = field(default_factory=list)
    live: list[Record] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    requests: dict[str, RollbackPlan] = field(default_factory=dict)
    acks: dict[str, str] = field(default_factory=dict)
    trainer: Trainer | None = None
    step_faults_left: dict[int, int] = field(default_factory=dict)
    spoiling: list[Fault] = field(default_factory=list)
    now_s: float = 0.0
    over: str | None = None
    returns: list[Return] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step_faults_left = {index: fault.times for index, fault in enumerate(self.faults) if fault.kind == "step"}
        self.spoiling = [fault for fault in self.faults if fault.kind == "disk"]
        self.disk[0] = Checkpoint(0, 0, None, 0, spoiled=False)

    @property
    def segment(self) -> int:
        named = [segment for segment, _ in self.starts]
        named += [line.next_segment for line in self.ledger if isinstance(line, RollbackEntry) and line.next_segment is not None]
        return max(named, default=-1)

    @property
    def rollbacks(self) -> list[RollbackEntry]:
        return [line for line in self.ledger if isinstance(line, RollbackEntry) and line.phase == "end"]

    def newest_lines(self) -> dict[int, LedgerEntry]:
        """The last ledger line of every checkpoint."""
        return {line.step: line for line in self.ledger if isinstance(line, LedgerEntry)}

    def saved(self) -> dict[int, SavedState]:
        """Checkpoints in place, as an actor sees them."""
        return {step: SavedState(point.segment, point.position) for step, point in self.disk.items()}

    def start(self, segment: int, step: int) -> None:
        """Begin a segment; the records from `step` on are dead. Live records are contiguous: record s is `live[s]`."""
        self.starts.append((segment, step))
        del self.live[step:]

    def shown(self) -> list[Record]:
        """Live records that show damage; once a state is damaged, so is every later one."""
        first = bisect.bisect_left(self.live, True, key=lambda record: record.onset is not None)
        return self.live[first:]


def train_one(world: World) -> None:
    """One optimizer step, and its save where one is due."""
    trainer = world.trainer
    if trainer is None or trainer.step >= world.total_steps or world.over:
        return
    while any(first <= trainer.position < end for first, end in trainer.skip):
        trainer.position += 1
    if trainer.damaged_since is None:
        fault = _strikes(world, trainer)
        if fault is not None:
            # The update of record s spoils state s + 1; the loss shows it from the next record on at the earliest.
            trainer.damaged_since, trainer.latency = trainer.step + 1, fault.latency
    since = trainer.damaged_since
    shows = since is not None and trainer.step >= since - 1 + trainer.latency
    world.live.append(Record(trainer.segment, trainer.step, trainer.position, since if shows else None))
    trainer.step += 1
    trainer.position += 1
    if trainer.step % world.saves.interval_steps == 0 or trainer.step == world.total_steps:
        spoiling = next((fault for fault in world.spoiling if fault.at <= trainer.step), None)
        if spoiling is not None:
            world.spoiling.remove(spoiling)
        world.disk[trainer.step] = Checkpoint(
            trainer.segment, trainer.position, trainer.damaged_since, trainer.latency, spoiled=spoiling is not None
        )


def _strikes(world: World, trainer: Trainer) -> Fault | None:
    for index, fault in enumerate(world.faults):
        if fault.kind == "batch" and fault.at == trainer.position:
            return fault
        if fault.kind == "always" and trainer.step >= fault.at:
            return fault
        if fault.kind == "step" and fault.at == trainer.step and world.step_faults_left[index] > 0:
            world.step_faults_left[index] -= 1
            return fault
    return None


def observed_damage(world: World) -> Damage | None:
    """What a perfect detector says of the live records."""
    bad = world.shown()
    if not bad:
        return None
    alarm, onset = bad[0].step, min(record.onset for record in bad if record.onset is not None)
    consumed = [record.position for record in world.live[max(0, onset - 1) : alarm + 1]]
    return Damage(
        segment=world.segment,
        onset_step=onset,
        alarm_step=alarm,
        first_position=min(consumed),
        end_position=max(consumed) + 1,
        last_step=world.live[-1].step,
        reason="damage",
    )


def checker(world: World) -> Iterator[None]:
    """The scheduled health check: look, decide, request."""
    while not world.over:
        damage, ledger = observed_damage(world), list(world.ledger)
        saved = world.saved()
        yield
        if damage is not None:
            situation = Situation("run", ledger, saved, batches_per_epoch=world.batches_per_epoch, alive=True, now_s=world.now_s)
            plan = decide(damage, situation, rule=world.rule)
            if plan is not None:
                yield
                world.requests.setdefault(plan.key, plan)  # created exclusively: the first one stands
        yield


def supervisor(world: World) -> Iterator[None]:
    """One life of a supervisor; the one before it, and its trainer, are gone."""
    world.trainer = None
    verified: dict[int, str | None] = {}
    while not world.over:
        yield from _note_new(world)
        yield from _judge(world)
        while (action := next_action(_facts(world, verified))) is not None:
            _perform(world, action, verified)
            yield
        if any(isinstance(line, RollbackEntry) and line.phase == "halt" for line in world.ledger):
            if not set(world.requests) - set(world.acks):
                world.over = "halted"
            return
        if world.trainer is None:
            yield from _launch(world)
        elif world.trainer.step >= world.total_steps and not world.shown():
            yield from _note_new(world)
            world.over = "finished"
        yield


def _facts(world: World, verified: dict[int, str | None]) -> Facts:
    return Facts(
        requests=[plan for key, plan in world.requests.items() if key not in world.acks],
        ledger=list(world.ledger),
        segment=world.segment,
        trainer_alive=world.trainer is not None,
        saved=world.saved(),
        verified=dict(verified),
        now_s=world.now_s,
    )


def _perform(world: World, action: object, verified: dict[int, str | None]) -> None:
    match action:
        case NoteRollback(entry):
            if entry.phase == "end":
                world.returns.append(_truth_of(world, entry))
            world.ledger.append(entry)
        case NoteCheckpoint(step, segment, state, reason):
            world.ledger.append(LedgerEntry(step, segment, state, "", reason))
        case StopTrainer():
            world.trainer = None
        case VerifyTarget(step):
            verified[step] = "hash differs" if world.disk[step].spoiled else None
        case MoveAside(step, segment):
            assert world.disk[step].segment == segment
            world.aside.append((step, segment))
            del world.disk[step]
        case Acknowledge(key, outcome):
            world.acks[key] = outcome


def _truth_of(world: World, entry: RollbackEntry) -> Return:
    assert entry.target_step is not None
    sound = [step for step, point in world.disk.items() if point.damaged_since is None and not point.spoiled]
    # Those whose soak was over when the damage began; the start of the run is clean by definition.
    soaked = [step for step in sound if step == 0 or step + world.saves.soak_steps <= entry.plan.onset_step]
    return Return(entry, damaged=world.disk[entry.target_step].damaged_since is not None, best=max(soaked))


def _note_new(world: World) -> Iterator[None]:
    newest = world.newest_lines()
    for step, point in sorted(world.disk.items()):
        known = newest.get(step)
        ahead = {"writing": ("durable", "probation"), "durable": ("probation",)}
        fresh = known is None or known.segment < point.segment
        states = ("writing", "durable", "probation") if fresh or known is None else ahead.get(known.state, ())
        for state in states:
            world.ledger.append(LedgerEntry(step, point.segment, state, "", ""))  # type: ignore[arg-type]
            yield


def _judge(world: World) -> Iterator[None]:
    evidence = Evidence(
        critical_spans=[(record.onset, record.step) for record in world.shown() if record.onset is not None],
        judged_records=len(world.live),
        coverage_frac=lambda _first, _end: 1.0,
        min_coverage_frac=0.99,
        ended=False,
    )
    current = {step: line for step, line in world.newest_lines().items() if step in world.disk}
    problem = lambda step: "hash differs" if world.disk[step].spoiled else None  # noqa: E731
    for move in propose_transitions(current, evidence=evidence, rule=world.saves, problem_of=problem):
        world.ledger.append(LedgerEntry(move.step, move.segment, move.state, "", move.reason))
        yield
    states = {step: line.state for step, line in world.newest_lines().items()}
    clean = clean_steps(world.ledger, world.saved())
    for step in checkpoints_to_delete(
        list(world.disk), states, keep_clean=world.saves.keep_clean, keep_other=world.saves.keep_other, pinned=()
    ):
        assert step > 0 and step not in clean[-world.saves.keep_clean :] and step < clean[-1], "something needed was deleted"
        del world.disk[step]
        yield


def _launch(world: World) -> Iterator[None]:
    yield from _note_new(world)  # the dead trainer may have saved once more
    newest = world.newest_lines()
    for step in sorted(world.disk, reverse=True):
        point = world.disk[step]
        if newest[step].state == "bad":
            continue
        if point.spoiled:
            world.ledger.append(LedgerEntry(step, point.segment, "bad", "", "hash differs"))
            yield
            continue
        segment = world.segment + 1
        world.start(segment, step)
        skip = skips_in_force(world.ledger)
        world.trainer = Trainer(segment, step, point.position, point.damaged_since, point.latency, skip)
        return


def simulate(world: World, *, rng: random.Random | None, kill_frac: float, max_ticks: int) -> int:
    """Run to the end; returns the ticks used.

    Args:
        rng: decides who acts and who dies; None lets everyone act in turn and nobody die.
        kill_frac: chance that the actor whose turn it is dies instead.
        max_ticks: turns before the simulation counts as endless.
    """
    actors = {"checker": checker(world), "supervisor": supervisor(world)}
    makers = {"checker": checker, "supervisor": supervisor}
    for tick in range(max_ticks):
        world.now_s += 1.0
        if world.over:
            return tick
        if rng is None:
            train_one(world)
            if tick % 5:
                continue
            # Everything that there is to do is done before the next step: nobody lags behind.
            for name in ("supervisor", "checker", "supervisor"):
                for _ in range(12):
                    _advance(actors, makers, name, world)
            continue
        name = rng.choices(("trainer", "supervisor", "checker"), weights=(6, 4, 1))[0]
        if rng.random() < kill_frac:
            if name == "trainer":
                world.trainer = None
            else:
                actors[name].close()
                actors[name] = makers[name](world)
        elif name == "trainer":
            train_one(world)
        else:
            _advance(actors, makers, name, world)
    raise AssertionError(f"endless: {world.faults}, {len(world.rollbacks)} rollbacks, segment {world.segment}")


def _advance(actors: dict[str, Iterator[None]], makers: dict[str, object], name: str, world: World) -> None:
    if next(actors[name], "ended") == "ended" and not world.over:
        actors[name] = makers[name](world)  # type: ignore[operator]
