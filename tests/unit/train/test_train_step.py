"""The optimizer step, its features and its log record, against plain formulas."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash.config import OptimizerConfig
from dflash.data.reader import Batch, collate
from dflash.errors import CheckpointError, RunStateError
from dflash.model.loss import block_loss
from dflash.train.features import FeatureBatch, make_maker
from dflash.train.group import Alone
from dflash.train.inputs import Inputs, open_inputs
from dflash.train.metrics import BatchFacts, RankReport, StepContext, step_record
from dflash.train.models import Models, load_models
from dflash.train.optimizer import build_optimizer, optimizer_tensors, restore
from dflash.train.step import Stepper, Update
from tests.support.tiny_run import MASK_TOKEN_ID, build_tiny_run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    run = build_tiny_run(tmp_path_factory.mktemp("step"))
    return open_inputs(run.config, run.paths)


@pytest.fixture
def models(inputs: Inputs) -> Models:
    made = load_models(inputs.config)
    made.drafter.init_weights(3)
    return made


@pytest.fixture
def make(inputs: Inputs, models: Models) -> Callable[[int], FeatureBatch]:
    maker = make_maker(
        target=models.targets[0],
        target_index=0,
        config=inputs.config,
        mask_token_id=MASK_TOKEN_ID,
        drafter_device=models.device,
        dtype=models.compute_dtype,
    )
    return lambda position: maker.make(batch_at(inputs, position))


def batch_at(inputs: Inputs, position: int) -> Batch:
    return collate(inputs.plan[position], inputs.store, pad_id=0)


def stepper_of(inputs: Inputs, models: Models, *, clip_norm: float = 1e9) -> Stepper:
    return Stepper(
        models.drafter,
        models.optimizer,
        head=models.head(),
        loss=inputs.config.train.loss,
        clip_norm=clip_norm,
        autocast_dtype=None,
        group=Alone(),
    )


def mean_gradient(inputs: Inputs, models: Models, batches: list[FeatureBatch]) -> dict[str, torch.Tensor]:
    """Gradient of (sum of objectives) / (sum of weights), in one graph."""
    head = models.head()
    sums = [
        block_loss(
            models.drafter(batch.features, batch.block_embeds, batch.anchors.positions, batch.anchors.keep),
            batch.labels,
            batch.anchors.keep,
            head,
            loss=inputs.config.train.loss,
            target=batch.target_states,
        )
        for batch in batches
    ]
    total = sum(item.objective_sum for item in sums) / sum(item.objective_weight for item in sums)
    gradients = torch.autograd.grad(total, list(models.drafter.parameters()))
    return {name: gradient for (name, _), gradient in zip(models.drafter.named_parameters(), gradients, strict=True)}


def adamw_by_hand(weights: torch.Tensor, gradients: list[torch.Tensor], lr: float, config: OptimizerConfig) -> torch.Tensor:
    value, first, second = weights.double(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double()
    for number, gradient in enumerate(gradients, start=1):
        first = config.beta1 * first + (1 - config.beta1) * gradient.double()
        second = config.beta2 * second + (1 - config.beta2) * gradient.double() ** 2
        value = value * (1 - lr * config.weight_decay * (weights.ndim >= 2))
        corrected = (second / (1 - config.beta2**number)).sqrt() + config.eps
        value = value - lr * first / (1 - config.beta1**number) / corrected
    return value


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_two_updates_equal_adamw_by_hand_on_the_mean_gradient(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch], weight_decay: float
) -> None:
    config = inputs.config.train.optimizer.model_copy(update={"weight_decay": weight_decay})
    optimizer = build_optimizer(models.drafter, config, lr=1.0)
    models = dataclasses.replace(models, optimizer=optimizer)
    stepper = stepper_of(inputs, models)
    start = {name: tensor.clone() for name, tensor in models.weights.items()}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in start}
    for positions in ((0, 1, 2), (3,)):
        batches = [make(position) for position in positions]
        for name, gradient in mean_gradient(inputs, models, batches).items():
            seen[name].append(gradient)
        for batch in batches:
            stepper.accumulate(batch)
        update = stepper.update(lr=0.01, norm_limit=math.inf)
        norm = math.sqrt(sum(float(gradients[-1].double().norm()) ** 2 for gradients in seen.values()))
        assert update.grad_norm == pytest.approx(norm, rel=1e-5)
        assert (update.clip_coef, update.nonfinite) == (1.0, ())
    for name, weights in models.weights.items():
        expected = adamw_by_hand(start[name], seen[name], 0.01, config)
        torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=2e-7)


def test_a_large_gradient_is_scaled_to_the_clip_norm_and_the_norm_before_is_reported(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    stepper = stepper_of(inputs, models, clip_norm=0.125)
    stepper.accumulate(make(0))
    gradient = mean_gradient(inputs, models, [make(0)])
    update = stepper.update(lr=0.01, norm_limit=math.inf)
    assert update.clip_coef == pytest.approx(0.125 / update.grad_norm)
    assert update.grad_norm > 0.125
    beta1 = inputs.config.train.optimizer.beta1
    for name, value in gradient.items():
        expected = (1 - beta1) * value * update.clip_coef
        torch.testing.assert_close(models.moments[f"{name}.exp_avg"], expected, rtol=1e-4, atol=1e-8)


def test_bfloat16_compute_keeps_float32_master_weights_and_nearly_the_gradient(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    exact = mean_gradient(inputs, models, [make(0)])
    half = dataclasses.replace(make(0), features=make(0).features.bfloat16(), block_embeds=make(0).block_embeds.bfloat16())
    stepper = Stepper(
        models.drafter,
        models.optimizer,
        head=models.head(),
        loss=inputs.config.train.loss,
        clip_norm=1e9,
        autocast_dtype=torch.bfloat16,
        group=Alone(),
    )
    stepper.accumulate(half)
    update = stepper.update(lr=0.01, norm_limit=math.inf)
    assert update.nonfinite == ()
    beta1 = inputs.config.train.optimizer.beta1
    for name, gradient in exact.items():
        assert models.weights[name].dtype == models.moments[f"{name}.exp_avg"].dtype == torch.float32
        error = models.moments[f"{name}.exp_avg"] / (1 - beta1) - gradient
        assert float(error.norm()) < 0.1 * float(gradient.norm()) + 1e-6


def poisoned(batch: FeatureBatch) -> FeatureBatch:
    features = batch.features.clone()
    features[0, 0, 0] = math.nan
    return dataclasses.replace(batch, features=features)


def test_a_non_finite_update_changes_nothing_and_says_what_was_not_finite(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    stepper = stepper_of(inputs, models)
    stepper.accumulate(make(0))
    stepper.update(lr=0.01, norm_limit=math.inf)
    before = {name: tensor.clone() for name, tensor in (models.weights | models.moments).items()}
    stepper.accumulate(make(1))
    stepper.accumulate(poisoned(make(2)))
    update = stepper.update(lr=0.01, norm_limit=math.inf)
    assert set(update.nonfinite) >= {"ce", "objective", "grad_norm"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in (models.weights | models.moments).items())
    # The gradients are forgotten: the next update equals one that never saw the poisoned batch.
    stepper.accumulate(make(3))
    clean = stepper.update(lr=0.01, norm_limit=math.inf)
    restore(models.weights, {name: before[name] for name in models.weights}, what="drafter")
    restore(models.moments, {name: before[name] for name in models.moments}, what="optimizer")
    stepper.accumulate(make(3))
    assert stepper.update(lr=0.01, norm_limit=math.inf) == clean


def test_a_step_without_any_supervised_slot_is_skipped(inputs: Inputs, models: Models) -> None:
    batch = batch_at(inputs, 0)
    bare = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    maker = make_maker(
        target=models.targets[0],
        target_index=0,
        config=inputs.config,
        mask_token_id=MASK_TOKEN_ID,
        drafter_device=models.device,
        dtype=models.compute_dtype,
    )
    stepper = stepper_of(inputs, models)
    stepper.accumulate(maker.make(bare))
    update = stepper.update(lr=0.01, norm_limit=math.inf)
    assert update.nonfinite == ("grad_norm",)
    assert math.isnan(update.ce)


def test_features_depend_on_the_batch_alone(inputs: Inputs, make: Callable[[int], FeatureBatch]) -> None:
    first, again = make(2), make(2)
    assert torch.equal(first.features, again.features)
    assert torch.equal(first.anchors.positions, again.anchors.positions)
    batch = batch_at(inputs, 2)
    assert first.lengths == tuple(batch.lengths.tolist())
    assert first.supervised_tokens == int(batch.loss_mask.sum())
    assert first.features.shape == (*batch.input_ids.shape, 32)
    assert first.nbytes > first.features.nbytes + first.block_embeds.nbytes
    assert not first.features.is_inference()
    positions, keep = first.anchors
    anchors_ok = torch.from_numpy(batch.loss_mask).gather(1, positions) & torch.from_numpy(batch.loss_mask).gather(
        1, (positions + 1).clamp(max=batch.input_ids.shape[1] - 1)
    )
    assert bool((anchors_ok | ~keep).all())


def test_the_acceptance_objective_runs_the_whole_target_and_trains(inputs: Inputs, models: Models) -> None:
    loss = inputs.config.train.loss.model_copy(update={"objective": "acceptance"})
    config = inputs.config.model_copy(update={"train": inputs.config.train.model_copy(update={"loss": loss})})
    target = models.targets[0]
    maker = make_maker(
        target=target,
        target_index=0,
        config=config,
        mask_token_id=MASK_TOKEN_ID,
        drafter_device=models.device,
        dtype=models.compute_dtype,
    )
    batch, made = batch_at(inputs, 0), maker.make(batch_at(inputs, 0))
    assert made.target_states is not None
    ids, lengths = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.lengths)
    features, final = target.features_with_final(ids, lengths)
    assert torch.equal(made.features, features)
    assert torch.equal(made.target_states.hidden, final)
    assert made.nbytes >= features.nbytes + final.nbytes + made.block_embeds.nbytes
    stepper = Stepper(
        models.drafter, models.optimizer, head=models.head(), loss=loss, clip_norm=1.0, autocast_dtype=None, group=Alone()
    )  # fmt: skip
    objectives = []
    for _ in range(6):
        stepper.accumulate(made)
        update = stepper.update(lr=3e-3, norm_limit=math.inf)
        assert update.nonfinite == ()
        objectives.append(update.objective)
    assert objectives[-1] < objectives[0]


def test_the_trainer_attends_with_what_the_probe_chose(models: Models) -> None:
    assert models.drafter.attention.name == "lean"


def test_the_optimizer_state_exists_from_the_start_and_restores_exactly(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    names = set(models.moments)
    assert len(names) == 3 * len(models.weights)
    assert all(float(tensor.abs().sum()) == 0 for tensor in models.moments.values())
    stepper = stepper_of(inputs, models)
    stepper.accumulate(make(0))
    stepper.update(lr=0.01, norm_limit=math.inf)
    assert set(optimizer_tensors(models.drafter, models.optimizer)) == names
    saved_weights = {name: tensor.clone() for name, tensor in models.weights.items()}
    saved_moments = {name: tensor.clone() for name, tensor in models.moments.items()}
    other = load_models(inputs.config)
    restore(other.weights, saved_weights, what="drafter")
    restore(other.moments, saved_moments, what="optimizer")
    for made in (models, other):
        next_step = stepper_of(inputs, made)
        next_step.accumulate(make(1))
        next_step.update(lr=0.01, norm_limit=math.inf)
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in models.weights.items())
    assert all(torch.equal(tensor, other.moments[name]) for name, tensor in models.moments.items())


def test_a_checkpoint_of_another_shape_is_refused_by_name(models: Models) -> None:
    saved = {name: tensor.clone() for name, tensor in models.weights.items()}
    with pytest.raises(CheckpointError, match=r"norm\.weight is \(3,\)"):
        restore(models.weights, saved | {"norm.weight": torch.zeros(3)}, what="drafter")
    with pytest.raises(CheckpointError, match=r"1 tensor names differ, e\.g\. extra"):
        restore(models.weights, saved | {"extra": torch.zeros(3)}, what="drafter")
    with pytest.raises(CheckpointError, match="float64"):
        restore(models.weights, {name: tensor.double() for name, tensor in saved.items()}, what="drafter")


def context(step: int = 4) -> StepContext:
    return StepContext(
        segment=1,
        step=step,
        wall_time_s=1.0,
        mono_time_s=2.0,
        lr=0.5,
        warmup_factor=1.0,
        plan_position=9,
        step_time_s=2.0,
    )


def report(*batches: FeatureBatch, wait_time_s: float = 0.5) -> RankReport:
    facts = tuple(BatchFacts.of(batch) for batch in batches)
    return RankReport(facts, wait_time_s=wait_time_s, depths=(3, 4), finished=(7,), stop=False)


def test_a_record_holds_sums_and_counts_of_exactly_this_step(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    stepper = stepper_of(inputs, models)
    batches = [make(0), make(5)]
    for batch in batches:
        stepper.accumulate(batch)
    update = stepper.update(lr=0.5, norm_limit=math.inf)
    record = step_record(context(), update, [report(*batches)])
    micro = record.micro_batches
    assert [item.batch_id for item in micro] == [0, 5]
    assert [item.rows for item in micro] == [batch.planned.rows for batch in batches]
    assert record.ce == pytest.approx(sum(item.ce_sum or 0 for item in micro) / sum(item.n_tokens for item in micro))
    assert record.objective == pytest.approx(
        sum(item.objective_sum or 0 for item in micro) / sum(item.objective_weight or 0 for item in micro)
    )
    assert sum(sum(item.valid) for item in micro) == sum(item.n_tokens for item in micro)
    assert record.accepted_length == pytest.approx(sum(item.accepted_sum for item in micro) / sum(item.n_blocks for item in micro))
    covered, supervised = (sum(getattr(item, name) for item in micro) for name in ("covered_tokens", "supervised_tokens"))
    assert 0 < covered < supervised
    assert record.coverage_frac == pytest.approx(covered / supervised)
    tokens = sum(sum(batch.lengths) for batch in batches)
    padded = sum(len(batch.lengths) * batch.planned.padded_length_tokens for batch in batches)
    assert record.padding_frac == pytest.approx(1 - tokens / padded)
    assert record.tokens_per_s == pytest.approx(tokens / 2.0)
    assert (record.skipped, record.nonfinite, record.plan_position, record.target_depths) == (False, (), 9, (7,))


def test_non_finite_numbers_become_null_with_their_names(
    inputs: Inputs, models: Models, make: Callable[[int], FeatureBatch]
) -> None:
    stepper = stepper_of(inputs, models)
    batch = poisoned(make(0))
    stepper.accumulate(batch)
    update: Update = stepper.update(lr=0.5, norm_limit=math.inf)
    record = step_record(context(), update, [report(batch)])
    assert (record.ce, record.objective, record.grad_norm, record.clip_coef) == (None, None, None, None)
    assert record.skipped
    assert {"ce", "objective", "grad_norm"} <= set(record.nonfinite)
    assert record.micro_batches[0].ce_sum is None


def test_open_inputs_refuses_a_plan_of_another_data_set(tmp_path: Path) -> None:
    run = build_tiny_run(tmp_path)
    pointer = json.loads(run.paths.data_pointer.read_text())
    run.paths.data_pointer.write_text(json.dumps(pointer | {"fingerprint": "0" * 64}))
    with pytest.raises(RunStateError, match="its plan says"):
        open_inputs(run.config, run.paths)
