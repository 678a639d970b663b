"""Prompts that join where others have ended: the tokens of each are those that it gets alone, and rows stay filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import WIDTH, drafting, make_drafter, make_target, prompts

from dflash.evaluate.decode import DecodeLimits, plain_decode_batch, speculative_decode_batch
from dflash.evaluate.proposal import Committed, Joining
from dflash.evaluate.proposers import LookupProposer, OracleProposer
from dflash.evaluate.stopwatch import SharedTime, Stopwatch
from dflash.model.cache_layers import _gathered, _slid
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY, Sampling
from dflash.model.target import Target

torch.set_num_threads(1)
TOKENS = 20
QUESTIONS = prompts(7)
KEYS = [f"row {row}" for row in range(7)]
SAMPLED = Sampling(temperature=0.9, seed=5)
FAMILIES = ("qwen3", "gemma3_sliding", "lfm2_conv", "qwen3_5_hybrid")


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return make_target(request.param)


def uneven(answers: list[list[int]]) -> frozenset[int]:
    """Stop ids that end the answers at different lengths."""
    return frozenset({answers[0][3], answers[1][7], answers[2][11]})


def cut(answer: list[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    ends = [place for place, token in enumerate(answer) if token in stop_ids]
    return tuple(answer[: ends[0] + 1] if ends else answer)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_joining_changes_no_token_and_no_verification(target: Target, sampling: Sampling) -> None:
    answers = generate_batch(
        target, QUESTIONS, keys=KEYS, max_new_tokens=TOKENS, temperature=sampling.temperature, seed=sampling.seed, stop_ids=()
    )  # fmt: skip
    limits = DecodeLimits(TOKENS, uneven(answers))
    wanted = [cut(answer, limits.stop_ids) for answer in answers]
    assert len({len(answer) for answer in wanted}) > 1
    settings: dict[str, Any] = {"keys": KEYS, "limits": limits, "sampling": sampling}
    oracle = OracleProposer(
        target, dict(zip(KEYS, [[*answer, *[0] * 9] for answer in answers], strict=True)),
        {key: len(question) for key, question in zip(KEYS, QUESTIONS, strict=True)}, max_drafts=4, right_frac=0.7, seed=2,
    )  # fmt: skip
    drafter = drafting(target, make_drafter(), block_size=5)
    for rows in (1, 3, None):
        plain = plain_decode_batch(target, QUESTIONS, rows=rows, **settings)
        assert [trace.tokens for trace in plain] == wanted
    for proposer in (oracle, drafter, LookupProposer(target, block_size=5)):
        found = {
            rows: speculative_decode_batch(target, proposer, QUESTIONS, rows=rows, rollback=target.keep, **settings)
            for rows in (1, 3)
        }
        for traces in found.values():
            assert [trace.tokens for trace in traces] == wanted
        assert [trace.verifications for trace in found[1]] == [trace.verifications for trace in found[3]]


def test_rows_stay_filled_and_the_next_prompt_joins_at_once() -> None:
    target = make_target("qwen3")
    answers = generate_batch(target, QUESTIONS, keys=KEYS, max_new_tokens=TOKENS, temperature=0.0, seed=0, stop_ids=())
    limits = DecodeLimits(TOKENS, uneven(answers))
    seen: list[int] = []

    class Counting(LookupProposer):
        def propose(self, committed: Committed) -> Any:
            seen.append(len(committed.texts))
            return super().propose(committed)

    traces = speculative_decode_batch(
        target, Counting(target, block_size=4), QUESTIONS, keys=KEYS, limits=limits, sampling=GREEDY, rollback=target.keep, rows=3
    )  # fmt: skip
    lengths = [len(trace.verifications) for trace in traces]
    assert sum(seen) == sum(lengths) and max(seen) == 3
    # Rows run dry only when nobody waits any more: from then on at most the longest answer's verifications are left.
    assert seen == sorted(seen, reverse=True) and sum(count < 3 for count in seen) <= max(lengths)


def test_an_answer_that_ends_with_its_first_token_makes_room_for_the_next() -> None:
    target = make_target("qwen3")
    answers = generate_batch(target, QUESTIONS, keys=KEYS, max_new_tokens=4, temperature=0.0, seed=0, stop_ids=())
    limits = DecodeLimits(4, frozenset({answers[0][0], answers[3][0]}))
    wanted = [cut(answer, limits.stop_ids) for answer in answers]
    for rows in (1, 2):
        plain = plain_decode_batch(target, QUESTIONS, keys=KEYS, limits=limits, sampling=GREEDY, rows=rows)
        fast = speculative_decode_batch(
            target, drafting(target, make_drafter(), block_size=3), QUESTIONS, keys=KEYS, limits=limits, sampling=GREEDY,
            rollback=target.keep, rows=rows,
        )  # fmt: skip
        assert [trace.tokens for trace in plain] == [trace.tokens for trace in fast] == wanted


class TickingWatch(Stopwatch):
    """Every reading is one second later; half of it went to the target."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.readings = 0.0

    def now_s(self) -> float:
        self.readings += 1.0
        return self.readings

    def seconds(self, name: str) -> float:
        return self.readings / 2 if name == "target" else 0.0


def test_time_is_divided_among_the_rows_that_it_served_and_skipped_time_among_none() -> None:
    clock = SharedTime(TickingWatch(), stages=("target",))
    clock.charge([0, 1, 2, 3])
    clock.skip()
    clock.charge([1, 2])
    assert clock.of(0) == [0.25, 0.125] and clock.of(3) == [0.25, 0.125]
    assert clock.of(1) == clock.of(2) == [0.75, 0.375]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "wanted"), [(0, 9), (2, 7), (0, 6), (3, 2), (5, 4)])
def test_rows_moved_in_place_hold_what_the_gather_gives(first: int, wanted: int, dtype: torch.dtype) -> None:
    columns, shifts, pads = 9, torch.tensor([0, 3, 1, 7]), [0, 2, 5, -1]
    values = torch.randn(4, 2, columns, 3, generator=torch.Generator().manual_seed(first)).to(dtype)
    index = torch.arange(first, first + wanted) - shifts[:, None]
    gathered = _gathered(values, index.clamp(0, columns - 1)[:, None, :, None])
    moved = _slid(values, [(row, pads[row], shift) for row, shift in enumerate(shifts.tolist()) if shift], first, wanted)
    assert moved.shape == gathered.shape
    for row in range(4):
        filled = index[row] >= max(pads[row], 0)  # in front of them a row is empty
        assert torch.equal(moved[row][:, filled], gathered[row][:, filled])


def test_no_row_can_join_a_proposer_that_began_with_one() -> None:
    target = make_target("qwen3")
    proposer = drafting(target, make_drafter(), block_size=3)
    proposer.begin(["alone"])
    with pytest.raises(TypeError, match="no row can join a single one"):
        proposer.replace_rows([Joining(0, "late", torch.zeros(1, 4, 2 * WIDTH))])


def test_a_drafter_that_joins_without_features_is_refused() -> None:
    proposer = drafting(make_target("qwen3"), make_drafter(), block_size=3)
    proposer.begin(["one", "two"])
    with pytest.raises(TypeError, match="reads the target's taps"):
        proposer.replace_rows([Joining(1, "late", None)])
