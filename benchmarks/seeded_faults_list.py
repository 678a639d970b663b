"""Thirty faults that a careless edit could make, each one replacement in one file, with the smallest tests that should see it.

Invariant: `old` stands exactly once in its file, so that a change of the source makes the list fail instead of testing nothing.
They are of the kinds that survive a glance: a limit off by one, a comparison turned round, a case left out, a key that is too
short. None makes a file that cannot be imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        name: of the fault.
        file: relative to the checkout.
        old, new: the replacement.
        tests: files that are run, relative to `tests/unit`.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DETECTORS = ("health/test_health_detectors.py",)
BASELINE = ("health/test_health_baseline.py",)
DECISION = ("health/test_health_decision.py",)
LADDER = ("rollback/test_rollback_ladder.py",)
EXECUTION = ("rollback/test_rollback_execution.py",)
LEDGER = ("checkpoint/test_checkpoint_ledger.py",)
INTERLEAVE = ("data/test_interleave.py",)
PACKING = ("data/test_packing.py",)

FAULTS = (
    Fault(
        "an update applied to the weights passes for a skipped one", "dflash/health/detectors/nonfinite.py",
        "        if not record.skipped:\n", "        if record.skipped and consecutive:\n", DETECTORS,
    ),
    Fault(
        "one skipped update more than configured", "dflash/health/detectors/nonfinite.py",
        "len(memory.skips) >= self._skips", "len(memory.skips) > self._skips", DETECTORS,
    ),
    Fault(
        "a run of one bucket may be one longer", "dflash/health/detectors/run_length.py",
        "                if length > limit:\n", "                if length > limit + 1:\n", DETECTORS,
    ),
    Fault(
        "an even number of values has the upper middle as median", "dflash/health/baseline.py",
        "return (ordered[middle - 1] + ordered[middle]) / 2", "return ordered[middle]", BASELINE,
    ),
    Fault(
        "an explosion enters the baseline at its full height", "dflash/health/baseline.py",
        "value = min(value, level.median", "value = max(value, level.median", BASELINE,
    ),
    Fault(
        "points of few samples are given the narrow spread", "dflash/health/baseline.py",
        "math.sqrt(self.count / count)", "math.sqrt(count / self.count)", BASELINE,
    ),
    Fault(
        "damage is dated by the last alarm", "dflash/health/decision.py",
        "alarm = min(_alarm_step(finding)", "alarm = max(_alarm_step(finding)", DECISION,
    ),
    Fault(
        "operational findings count as damage", "dflash/health/decision.py",
        'return finding.severity == "critical" and finding.domain == "training"', 'return finding.severity == "critical"', DECISION,
    ),
    Fault(
        "the batch of the alarm itself is not skipped", "dflash/health/decision.py",
        "end_position=max(consumed, default=-1) + 1", "end_position=max(consumed, default=0)", DECISION,
    ),
    Fault(
        "a loss that was not finite reads as zero", "dflash/health/lines.py",
        "cleaned[name] = None if name in _NULLABLE else 0.0", "cleaned[name] = 0.0", ("health/test_health_lines.py",),
    ),
    Fault(
        "the rest of a line too long to hold is read as a line of its own", "dflash/health/reader.py",
        'start = data.find(b"\\n") + 1 if skipping else 0', "start = 0", ("health/test_health_reader.py",),
    ),
    Fault(
        "a rise is confirmed long before its time", "dflash/health/detectors/sustained.py",
        "        if record.step - onset < rise.confirm_steps:\n", "        if record.step - onset < rise.confirm_steps // 10:\n",
        ("health/test_health_rises.py", "health/test_health_detectors.py"),
    ),
    Fault(
        "a checkpoint inside the damage may be the target", "dflash/rollback/ladder.py",
        "if step <= damage.onset_step]", "if step <= damage.alarm_step]", LADDER,
    ),
    Fault(
        "one rollback more in a region than its budget", "dflash/rollback/ladder.py",
        "region.rollbacks >= rule.max_per_region", "region.rollbacks > rule.max_per_region", LADDER,
    ),
    Fault(
        "an abandoned checkpoint of the same step passes for clean", "dflash/rollback/ladder.py",
        ' and newest[step].segment == state.segment\n', "\n", LADDER,
    ),
    Fault(
        "two runs share the key of a decision", "dflash/rollback/ladder.py",
        'hashlib.sha256(f"{run}\\n{segment}".encode())', 'hashlib.sha256(f"{segment}".encode())', LADDER,
    ),
    Fault(
        "skipped ranges that touch stay apart", "dflash/rollback/skips.py",
        "first <= result[-1][1]", "first < result[-1][1]", LADDER,
    ),
    Fault(
        "a widened skip reaches into the state that is kept", "dflash/rollback/skips.py",
        "merged([(max(not_before, min(first, end - at_least)), end)])", "merged([(min(first, end - at_least), end)])", LADDER,
    ),
    Fault(
        "the learning rate warms up past its cap", "dflash/rollback/overlay.py",
        "return min(ramp, overlay.cap)", "return ramp", LADDER,
    ),
    Fault(
        "a checkpoint in probation closes a region", "dflash/rollback/regions.py",
        'if line.state == "clean":', 'if line.state in ("clean", "probation"):', LADDER,
    ),
    Fault(
        "the first abandoned checkpoint stays in place", "dflash/rollback/execution.py",
        "        if step > target and facts.saved[step].segment <= plan.segment:\n",
        "        if step > target and facts.saved[step].segment < plan.segment:\n", EXECUTION,
    ),
    Fault(
        "the shortest possible run forgets the gap before the first other batch", "dflash/data/interleave.py",
        "(epochs * others + 1))", "max(1, epochs * others))", INTERLEAVE,
    ),
    Fault(
        "a run across the join of two epochs is not counted", "dflash/data/interleave.py",
        "joined = after.length if int(buckets[0]) == after.bucket else 0\n    return max(after.length, joined",
        "joined = 0\n    return max(after.length, joined", INTERLEAVE,
    ),
    Fault(
        "the last two batches are balanced past the token budget", "dflash/data/packing.py",
        "np.minimum((size[last - 1] - size[last]) // 2, room)", "(size[last - 1] - size[last]) // 2", PACKING,
    ),
    Fault(
        "a batch may hold more sequences than allowed", "dflash/data/packing.py",
        "return np.minimum(plan.tokens_per_batch // self.tokens, plan.max_sequences)",
        "return plan.tokens_per_batch // self.tokens", (*PACKING, "data/test_plan.py"),
    ),
    Fault(
        "the first batch of an epoch belongs to the one before", "dflash/data/plan_arrays.py",
        'np.searchsorted(self._firsts, position, side="right")', 'np.searchsorted(self._firsts, position, side="left")',
        ("data/test_plan.py",),
    ),
    Fault(
        "a suspect checkpoint may become clean", "dflash/checkpoint/ledger.py",
        '"suspect": frozenset({"bad"})', '"suspect": frozenset({"bad", "clean"})', LEDGER,
    ),
    Fault(
        "a finding that touches the first record of the window is overlooked", "dflash/checkpoint/clean.py",
        "span[1] >= first]", "span[1] > first]", LEDGER,
    ),
    Fault(
        "a checkpoint is clean before its soak is over", "dflash/checkpoint/clean.py",
        "if judged_end < end and not evidence.ended:", "if judged_end < step and not evidence.ended:", LEDGER,
    ),
    Fault(
        "the oldest clean checkpoints are kept instead of the newest", "dflash/checkpoint/retention.py",
        "set(clean[-keep_clean:])", "set(clean[:keep_clean])", LEDGER,
    ),
)  # fmt: skip
