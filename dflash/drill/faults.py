"""The faults of a drill: what each one does, and what must happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash.config import Config
from dflash.errors import ConfigError
from dflash.records import FaultName, FaultPlan

Blow = Literal["kill-trainer", "kill-worker", "corrupt-and-kill-trainer"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        says: the fault in words.
        bad_batches: consecutive batches of the plan that are bad whenever they are trained on.
        blow: what the drill itself does to the run once it is at the fault's step; None where the trainer plants everything.
        acts: whether going back to a clean checkpoint is right; it is wrong otherwise.
        exact: whether the run must end with the very weights of the fault-free run.
        seen_as: detectors of which one must have reported the fault; empty where the log has nothing to show.
    """

    name: FaultName
    says: str
    bad_batches: int
    blow: Blow | None
    acts: bool
    exact: bool
    seen_as: tuple[str, ...]


_ALL = (
    Fault("none", "no fault: nothing may happen", bad_batches=0, blow=None, acts=False, exact=True, seen_as=()),
    Fault(
        "nan", "the features of three batches in a row are NaN, whenever they are trained on",
        bad_batches=3, blow=None, acts=True, exact=False, seen_as=(),
    ),
    Fault(
        "explosion", "the gradient of one batch explodes, whenever it is trained on",
        bad_batches=1, blow=None, acts=True, exact=False, seen_as=(),
    ),
    Fault(
        "ramp", "the weights rot, slowly at first, until the trainer is started again",
        bad_batches=0, blow=None, acts=True, exact=False, seen_as=(),
    ),
    Fault(
        "bad-resume", "a killed trainer comes back with damaged weights",
        bad_batches=0, blow="kill-trainer", acts=True, exact=False, seen_as=(),
    ),
    Fault(
        "hung-save", "the disk hangs for 45 s inside a save",
        bad_batches=0, blow=None, acts=False, exact=True, seen_as=("save stall", "save failure"),
    ),
    Fault(
        "killed-worker", "kill -9 of the worker and of the flow run that it started",
        bad_batches=0, blow="kill-worker", acts=False, exact=True, seen_as=(),
    ),
    Fault(
        "corrupt-checkpoint", "bytes of the newest checkpoint flip, then the trainer is killed",
        bad_batches=0, blow="corrupt-and-kill-trainer", acts=False, exact=True, seen_as=(),
    ),
    Fault(
        "save-artefact", "records after saves tell of a few tokens with a high loss: no damage at all",
        bad_batches=0, blow=None, acts=False, exact=True, seen_as=(),
    ),
)  # fmt: skip

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}


def fault_named(name: str) -> Fault:
    """The fault of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in FAULTS:
        raise ConfigError(f"there is no fault {name!r}", remedy=f"choose one of {', '.join(FAULTS)}")
    return FAULTS[name]


def plan_fault(fault: Fault, config: Config) -> FaultPlan:
    """Where the fault goes in a run of a configuration.

    Batches are consumed in plan order, so until the first skip the batches of step s are the next ones after those of s - 1.

    Raises:
        ConfigError: the configuration allows no faults.
    """
    if not config.drill.faults:
        raise ConfigError(f"run {config.run.name} is no drill (drill.faults is false)", remedy="use configs/drill.yaml")
    first = config.drill.fault_step * config.micro_batches_per_step
    return FaultPlan(
        name=fault.name,
        step=config.drill.fault_step,
        first_position=first,
        end_position=first + fault.bad_batches * config.micro_batches_per_step,
        seed=config.run.seed,
    )
