"""What the drafter learns in training is what it does in decoding: same anchors, same context, same positions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from families import MASK_ID, VOCAB, WIDTH, drafting, make_drafter, make_target, prompts
from torch import Tensor
from transformers import GenerationConfig, MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from dflash.config import DrafterConfig, LossConfig
from dflash.evaluate.decode import DecodeLimits, plain_decode, speculative_decode
from dflash.evaluate.proposal import Committed, Proposal
from dflash.evaluate.proposers import DrafterProposer
from dflash.model.anchors import AnchorSet, block_labels, block_token_ids
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.loss import block_loss
from dflash.model.target import Target

torch.set_num_threads(1)
LIMITS = DecodeLimits(max_new_tokens=40, stop_ids=frozenset())
BLOCK = 6
FIT_STEPS = 200


class Recording:
    """A drafter's proposer that remembers what it proposed, by the anchor's position."""

    needs_features = True

    def __init__(self, inner: DrafterProposer) -> None:
        self._inner = inner
        self.max_drafts = inner.max_drafts
        self.proposals: dict[int, list[int]] = {}

    def begin(self, keys: Sequence[str]) -> None:
        self._inner.begin(keys)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._inner.select_rows(rows)

    def propose(self, committed: Committed) -> Proposal:
        proposal = self._inner.propose(committed)
        self.proposals[len(committed.texts[0]) - 1] = proposal.tokens[0].tolist()
        return proposal


def training_drafts(target: Target, drafter: Drafter, text: list[int], positions: list[int]) -> list[list[int]]:
    """Argmax of the training forward at the given anchors of one sequence."""
    ids = torch.tensor([text])
    anchors = AnchorSet(torch.tensor([positions]), torch.ones(1, len(positions), dtype=torch.bool))
    embeds = target.embed(block_token_ids(ids, anchors, block_size=BLOCK, mask_token_id=MASK_ID))
    with torch.no_grad():
        hidden = drafter(target.features(ids, torch.tensor([len(text)])), embeds, *anchors)
    return target.logits(hidden)[0, :, 1:].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["qwen3", "gemma3_sliding", "qwen3_5_hybrid"])
@pytest.mark.parametrize("sliding", [False, True])
def test_decoding_drafts_what_the_training_forward_predicts_at_the_same_anchors(family: str, sliding: bool) -> None:
    target = make_target(family)
    config = DrafterConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        block_size=BLOCK, target_layer_ids=(0, 2), rope_theta=10_000.0,
        layer_types=("sliding_attention", "full_attention") if sliding else None, sliding_window=7 if sliding else None,
        initializer_range=0.2,
    )  # fmt: skip
    drafter = Drafter(config, target_hidden_size=WIDTH)
    drafter.init_weights(4)
    (prompt,) = prompts(1, seed=12)
    recording = Recording(drafting(target, drafter.eval(), block_size=BLOCK))
    limits = DecodeLimits(max_new_tokens=15, stop_ids=frozenset())
    answer = speculative_decode(target, recording, prompt, limits=limits, rollback=target.keep).tokens
    positions = sorted(recording.proposals)
    assert len(positions) >= 5
    wanted = training_drafts(target, drafter, [*prompt, *answer], positions)
    found = [recording.proposals[position] for position in positions]
    assert found == wanted


@dataclass(frozen=True)
class Fitted:
    """A drafter that knows a few answers by heart."""

    target: Target
    drafter: Drafter
    questions: list[list[int]]
    answers: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    target = make_target("qwen3")
    questions = prompts(2, seed=21, longest=12)
    answers = [plain_decode(target, question, limits=LIMITS).tokens for question in questions]
    width = max(len(question) for question in questions) + LIMITS.max_new_tokens
    ids = torch.zeros(len(questions), width, dtype=torch.long)
    mask = torch.zeros(len(questions), width, dtype=torch.bool)
    lengths = torch.tensor([len(question) + LIMITS.max_new_tokens for question in questions])
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        ids[row, : lengths[row]] = torch.tensor([*question, *answer])
        mask[row, len(question) : lengths[row]] = True
    return Fitted(target, trained(target, ids, mask, lengths), questions, answers)


def test_a_drafter_that_overfits_a_few_answers_accepts_nearly_whole_blocks(fitted: Fitted) -> None:
    """Guards against shifted labels, leaking context and unlike positions: any of them keeps this near 1."""
    proposer = drafting(fitted.target, fitted.drafter, block_size=BLOCK)
    verifications = 0
    for question, answer in zip(fitted.questions, fitted.answers, strict=True):
        trace = speculative_decode(fitted.target, proposer, question, limits=LIMITS, rollback=fitted.target.keep)
        assert trace.tokens == answer
        verifications += len(trace.verifications)
    acceptance_length = len(fitted.questions) * (LIMITS.max_new_tokens - 1) / verifications
    assert acceptance_length > 0.8 * BLOCK


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_librarys_own_dflash_generation_accepts_the_same_blocks(fitted: Fitted, noise: float) -> None:
    """An independent implementation of the drafter and of the loop, on the same weights: a perfect drafter and a spoiled one."""
    drafter, target, config = copy.deepcopy(fitted.drafter), fitted.target, fitted.drafter.config
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    assistant = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=WIDTH, intermediate_size=config.intermediate_size, num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps, block_size=BLOCK, mask_token_id=MASK_ID,
            target_layer_ids=list(config.target_layer_ids), layer_types=["full_attention"] * config.num_hidden_layers,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, max_position_embeddings=512,
        )
    ).eval()  # fmt: skip
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    assistant.load_state_dict({names.get(name, name): value for name, value in drafter.state_dict().items()})
    proposer = drafting(target, drafter, block_size=BLOCK)
    seen: set[int] = set()
    for question in (*fitted.questions, *prompts(1, seed=5)):
        starts: list[int] = []
        handle = target.model.register_forward_pre_hook(
            lambda _module, _args, named, starts=starts: starts.append(int(named["position_ids"][0, 0])), with_kwargs=True
        )
        theirs = target.model.generate(
            torch.tensor([question]), attention_mask=torch.ones(1, len(question)), assistant_model=assistant,
            generation_config=GenerationConfig(
                speculation_type="dflash", do_sample=False, max_new_tokens=LIMITS.max_new_tokens, pad_token_id=0
            ),
        )[0, len(question) :].tolist()  # fmt: skip
        handle.remove()
        ours = speculative_decode(target, proposer, question, limits=LIMITS, rollback=target.keep)
        assert list(ours.tokens) == theirs
        accepted = [later - start for start, later in itertools.pairwise(starts[1:])]
        committed = [step.committed for step in ours.verifications]
        # What the last verification committed shows in no later start, and the library's may end one verification earlier.
        compared = min(len(accepted), len(committed) - 1)
        assert compared >= len(committed) - 2
        assert accepted[:compared] == committed[:compared]
        seen |= set(committed)
    assert seen >= ({1, 2, 3, 4, 5} if noise else {1, BLOCK})


def trained(target: Target, ids: Tensor, mask: Tensor, lengths: Tensor) -> Drafter:
    """A drafter fitted to every answer position of a few sequences."""
    drafter = make_drafter(block_size=BLOCK).train()
    features = target.features(ids, lengths)
    # Every supervised position with a supervised successor is an anchor, but the last.
    candidates = mask[:, :-1] & mask[:, 1:]
    count = int(candidates.sum(1).min())
    anchors = AnchorSet(
        torch.stack([row.nonzero().squeeze(1)[:count] for row in candidates]), torch.ones(len(ids), count, dtype=torch.bool)
    )
    labels = block_labels(ids, mask, lengths, anchors, block_size=BLOCK)
    embeds = target.embed(block_token_ids(ids, anchors, block_size=BLOCK, mask_token_id=MASK_ID))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    loss = LossConfig(gamma=4.0)
    for step in range(FIT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / FIT_STEPS)
        head = FrozenHead(target.head_weight, target.logit_rule)
        sums = block_loss(drafter(features, embeds, *anchors), labels, anchors.keep, head, loss=loss, target=None)
        (sums.objective_sum / sums.objective_weight).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def test_the_vocabulary_of_the_toys_has_a_mask_that_no_prompt_uses() -> None:
    assert MASK_ID < VOCAB
    assert all(MASK_ID not in prompt for prompt in prompts(20))
