"""Training and grading of the demo target on one CPU thread.

Invariant: nothing reads a clock to decide anything; the number of steps and the seed fix the result on a given machine.
Hard decision: fp32. bf16 matrix products are about a hundred times slower on CPUs without bf16 units, and a second
torch thread slows models this small down.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from dflash.demo.examples import Batch
from dflash.demo.recipe import TargetRecipe

logger = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 50
_ADAM_BETAS = (0.9, 0.98)
_FLOOR_FRAC = 0.01
"""The cosine ends at this part of the peak learning rate."""


def learning_rate(recipe: TargetRecipe, *, step: int) -> float:
    """Return the learning rate of step 0..steps-1: linear warm-up, then a cosine down to 1 % of the peak."""
    if step < recipe.warmup_steps:
        return recipe.peak_lr * (step + 1) / recipe.warmup_steps
    done_frac = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.peak_lr * (_FLOOR_FRAC + (1 - _FLOOR_FRAC) * 0.5 * (1 + math.cos(math.pi * done_frac)))


def _answer_logits(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and labels [n] of the supervised tokens only; the head never sees the others."""
    supervised = batch.answer_of[:, 1:] >= 0
    hidden = model.get_decoder()(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden[supervised]), batch.ids[:, 1:][supervised]


def _optimizer(model: PreTrainedModel, recipe: TargetRecipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=_ADAM_BETAS, fused=True)


def _accumulate_gradients(model: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Add up the gradients of one step's weighted mean cross-entropy over all its batches, and return that mean."""
    total_weight = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
    mean = 0.0
    for batch in batches:
        logits, labels = _answer_logits(model, batch)
        weights = batch.weights[:, 1:][batch.answer_of[:, 1:] >= 0]
        loss = (functional.cross_entropy(logits, labels, reduction="none") * weights).sum() / total_weight
        loss.backward()  # type: ignore[no-untyped-call]
        mean += loss.item()
    return mean


def train(
    model: PreTrainedModel,
    steps: Iterator[Sequence[Batch]],
    *,
    recipe: TargetRecipe,
    on_checkpoint: Callable[[int], None],
) -> tuple[int, int]:
    """Train `model` in place for `recipe.steps` steps; call `on_checkpoint(step)` every so many finished steps.

    Returns the numbers of conversations and of tokens (padding counted) that were consumed.
    """
    model.train()
    optimizer = _optimizer(model, recipe)
    conversations = tokens = 0
    started = time.monotonic()
    for step in range(recipe.steps):
        batches = next(steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step=step)
        optimizer.zero_grad(set_to_none=True)
        loss = _accumulate_gradients(model, batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        conversations += sum(batch.ids.shape[0] for batch in batches)
        tokens += sum(batch.ids.numel() for batch in batches)
        if step % _LOG_EVERY_STEPS == 0 or step == recipe.steps - 1:
            seconds = time.monotonic() - started
            logger.info("step %d loss %.4f tokens/s %.0f after %.0f s", step, loss, tokens / seconds, seconds)
        if (step + 1) % recipe.checkpoint_every_steps == 0 and step + 1 < recipe.steps:
            on_checkpoint(step + 1)
    return conversations, tokens


@torch.no_grad()
def exact_answers(model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, tuple[int, int]]:
    """Return per task kind (exact answers, all answers), each answer given the true turns before it.

    An answer is exact iff greedy decoding would produce all its tokens and its end. Under teacher forcing that is the
    same as "every argmax of the answer is right": up to the first wrong argmax both see the same prefix.
    """
    model.eval()
    exact: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for batch in batches:
        logits, labels = _answer_logits(model, batch)
        wrong = torch.zeros(batch.ids.shape[0], batch.ids.shape[1] - 1, dtype=torch.bool)
        wrong[batch.answer_of[:, 1:] >= 0] = logits.argmax(-1) != labels
        for row, kind in enumerate(batch.kinds):
            numbers = batch.answer_of[row, 1:]
            for answer in range(int(numbers.max()) + 1):
                total[kind] += 1
                exact[kind] += not bool(wrong[row][numbers == answer].any())
    return {kind: (exact[kind], total[kind]) for kind in sorted(total)}
