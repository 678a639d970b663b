"""Whether a registered drafter takes the champion's place: a pure ruling on two measurements.

Invariant: the champion changes only where the whole interval of the difference, prompt by prompt on the same prompts and settings,
lies above zero. Everything else leaves it, and says why.
"""

from __future__ import annotations

from dflash.config import EvaluateConfig
from dflash.evaluate.probe import paired_gain
from dflash.records import RegisteredEvidence, Ruling

OTHER_TARGET = Ruling(False, "not compared: it was trained for another target than the champion", None)


def rule(
    challenger: RegisteredEvidence, champion: RegisteredEvidence | None, *, evaluate: EvaluateConfig, min_prompts: int
) -> Ruling:
    """Compare a challenger with the champion.

    Args:
        challenger: what it reached.
        champion: what the champion reached; None where there is none.
        evaluate: bootstrap and confidence.
        min_prompts: common prompts below which nobody is better.
    """
    if champion is None:
        return Ruling(True, "there was no champion", None)
    if challenger.drafter_sha256 == champion.drafter_sha256:
        return Ruling(False, "it is the champion itself", None)
    if challenger.target_fingerprint != champion.target_fingerprint:
        return OTHER_TARGET
    if challenger.prompts_sha256 != champion.prompts_sha256:
        return Ruling(False, "not compared: it was measured on other prompts or settings than the champion", None)
    prompts = len(challenger.figures.counted)
    if prompts < min_prompts:
        return Ruling(False, f"not compared: {prompts} prompts, fewer than {min_prompts}", None)
    gain = paired_gain(challenger.figures, champion.figures, evaluate=evaluate)
    if gain is None:
        return Ruling(False, f"not compared: of {prompts} prompts both verified fewer than two", None)
    low, high = gain
    where = (
        f"{_lengths(challenger, champion)}, difference {low:+.3f} to {high:+.3f} at {evaluate.confidence:.0%} on {prompts} prompts"
    )
    if low > 0:
        return Ruling(True, f"better: {where}", (low, high))
    return Ruling(False, f"{'worse' if high < 0 else 'no difference shown'}: {where}", (low, high))


def _lengths(challenger: RegisteredEvidence, champion: RegisteredEvidence) -> str:
    return f"acceptance length {challenger.figures.acceptance_length:.3f} against {champion.figures.acceptance_length:.3f}"
