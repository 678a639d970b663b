from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from families import MASK_ID, committed, drafting, make_drafter, make_target, prompts

from dflash.errors import EvaluationError
from dflash.evaluate.candidates import drafter_candidate, lookup_candidate
from dflash.evaluate.proposers import LookupProposer
from dflash.model.target import Target

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target("qwen3")


def test_a_proposal_does_not_depend_on_how_the_context_arrived(target: Target) -> None:
    """The features of the prompt in one piece, or piece by piece as verifications commit them."""
    text = prompts(1, seed=4, longest=25)[0] + prompts(1, seed=5, longest=25)[0]
    features = target.features(torch.tensor([text]), torch.tensor([len(text)]))
    proposer = drafting(target, make_drafter(), block_size=6)
    end = len(text) - 1
    proposer.begin([""])
    whole = proposer.propose(committed([text], features[:, :end])).tokens
    proposer.begin([""])
    start = 0
    for stop in (3, 4, 9, end):
        pieces = proposer.propose(committed([text[: stop + 1]], features[:, start:stop])).tokens
        start = stop
    assert pieces.tolist() == whole.tolist()
    assert whole.shape == (1, 5)


def test_beginning_again_forgets_the_previous_prompt(target: Target) -> None:
    (text,) = prompts(1, seed=6, longest=20)
    features = target.features(torch.tensor([text]), torch.tensor([len(text)]))[:, :-1]
    proposer = drafting(target, make_drafter(), block_size=4)
    proposer.begin([""])
    first = proposer.propose(committed([text], features)).tokens
    proposer.begin([""])
    proposer.propose(committed([[5, 6, 7]], features[:, :2]))
    proposer.begin([""])
    assert proposer.propose(committed([text], features)).tokens.tolist() == first.tolist()


def test_the_drafter_needs_the_targets_taps(target: Target) -> None:
    proposer = drafting(target, make_drafter(), block_size=4)
    proposer.begin([""])
    with pytest.raises(TypeError, match="taps"):
        proposer.propose(committed([[1, 2, 3]]))


def test_a_drafter_in_another_precision_than_its_target_can_draft() -> None:
    half = make_target("qwen3")
    half.model.to(torch.bfloat16)
    (text,) = prompts(1, seed=7)
    features = half.features(torch.tensor([text]), torch.tensor([len(text)]))[:, :-1]
    proposer = drafting(half, make_drafter(), block_size=6)
    proposer.begin([""])
    assert proposer.propose(committed([text], features)).tokens.shape == (1, 5)


def test_lookup_proposes_on_the_targets_device_and_never_too_many(target: Target) -> None:
    proposer = LookupProposer(target, block_size=4)
    proposer.begin([""])
    found = proposer.propose(committed([[1, 2, 3, 4, 5, 1, 2]])).tokens
    assert found.tolist() == [[3, 4, 5]] and found.dtype == torch.long and found.device == target.device
    assert proposer.propose(committed([[1, 2, 3]])).tokens.shape == (1, 0)


def test_candidates_carry_their_label_step_and_block_size(target: Target) -> None:
    trained = drafter_candidate(
        target, make_drafter(block_size=6), block_size=None, mask_token_id=MASK_ID, label="trained", step=40
    )
    assert (trained.label, trained.step, trained.proposer.max_drafts) == ("trained", 40, 5)
    shorter = drafter_candidate(target, make_drafter(), block_size=3, mask_token_id=MASK_ID, label="short", step=40)
    assert shorter.proposer.max_drafts == 2
    lookup = lookup_candidate(target, block_size=3)
    assert (lookup.step, lookup.proposer.max_drafts, lookup.proposer.needs_features) == (None, 2, False)
    with pytest.raises(EvaluationError, match="block size 9"):
        drafter_candidate(target, make_drafter(), block_size=9, mask_token_id=MASK_ID, label="long", step=40)


def test_the_benchmark_says_what_is_missing_and_leaves_its_result_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = ROOT / "benchmarks" / "results" / "acceptance.json"
    before = stored.read_bytes() if stored.is_file() else None
    monkeypatch.setattr("sys.argv", ["acceptance.py", "--run", str(tmp_path / "no-such-run")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "acceptance.py"), run_name="__main__")
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "no-such-run is not a run" in said and "Traceback" not in said
    assert (stored.read_bytes() if stored.is_file() else None) == before
