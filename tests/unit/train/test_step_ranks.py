"""Options of the step, and its sums over ranks, against the plain mean gradient of one rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from dflash.train.features import FeatureBatch
from dflash.train.group import Alone
from dflash.train.inputs import Inputs
from dflash.train.models import Models, load_models
from dflash.train.step import Stepper
from tests.unit.train.test_train_step import inputs, make, mean_gradient, models, stepper_of

__all__ = ["inputs", "make", "models"]  # fixtures


def test_recomputed_layers_give_the_same_gradients_bit_for_bit(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    batch = make(0)
    plain = mean_gradient(inputs, models, [batch])
    models.drafter.recompute_layers = True
    again = mean_gradient(inputs, models, [batch])
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    config = inputs.config.model_copy(update={"train": inputs.config.train.model_copy(update={"recompute_layers": True})})
    assert load_models(config).drafter.recompute_layers


def test_a_norm_over_the_limit_skips_the_update_and_changes_nothing(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    stepper = stepper_of(inputs, models)
    before = {name: tensor.clone() for name, tensor in (models.weights | models.moments).items()}
    stepper.accumulate(make(0))
    update = stepper.update(lr=0.01, norm_limit=1e-9)
    assert update.over_limit and update.skipped and update.nonfinite == ()
    assert math.isnan(update.clip_coef) and math.isfinite(update.grad_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in (models.weights | models.moments).items())


class Pair(Alone):
    """Two ranks in one: whatever this one has, the other has too."""

    size = 2

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def gather(self, word: object) -> list[object]:
        return json.loads(json.dumps([word, word]))  # type: ignore[no-any-return]


def test_gradients_and_denominators_of_all_ranks_are_summed_and_divided_once(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    stepper = Stepper(
        models.drafter,
        models.optimizer,
        head=models.head(),
        loss=inputs.config.train.loss,
        clip_norm=1e9,
        autocast_dtype=None,
        group=Pair(),
    )
    for position in (0, 1):
        expected = mean_gradient(inputs, models, [make(position)])
        stepper.accumulate(make(position))
        update = stepper.update(lr=0.0, norm_limit=math.inf)
        # Twice the numerators over twice the denominators: the mean gradient of one, and the records of both.
        norm = math.sqrt(sum(float(gradient.double().norm()) ** 2 for gradient in expected.values()))
        assert update.grad_norm == pytest.approx(norm, rel=1e-5)
        assert len(update.sums) == 2 and update.sums[0] == update.sums[1]


def test_infinite_and_missing_numbers_of_another_rank_travel_and_forbid_the_update(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    class Ill(Pair):
        def gather(self, word: object) -> list[object]:
            pair = json.loads(json.dumps([word, word]))
            pair[1][0][1]["ce_sum"] = math.nan
            return json.loads(json.dumps(pair))  # type: ignore[no-any-return]

    stepper = stepper_of(inputs, models)
    stepper._group = Ill()
    stepper.accumulate(make(0))
    assert stepper.update(lr=0.01, norm_limit=math.inf).nonfinite == ("ce",)
