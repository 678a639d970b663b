"""What a target worker makes of a batch: everything the drafter's step needs, on the drafter's device.

Dimensions: B batch, S tokens, N blocks, K block size, M tapped layers, D width.
Invariant: the result depends on the batch and on (seed, epoch, batch id) alone, not on which worker made it or when; with a
feature cache a sample's states are those of the batch that it was in first, which differ in rounding only.
Hard decision: anchors, labels and block embeddings are made here, not in the drafter's loop: the target thread is off
the critical path whenever targets keep up, and the embedding lives on the target's device. The price: M*D values a
token cross the border (a 32k-token batch of five 5120-wide taps is 1.7 GB in bf16).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import torch

from dflash.config import Config
from dflash.data.reader import Batch
from dflash.model.acceptance import TargetStates
from dflash.model.anchors import AnchorSet, BlockLabels, block_labels, block_token_ids, covered_tokens, sample_anchors
from dflash.model.target import Target
from dflash.records import PlannedBatch
from dflash.train.feature_cache import CacheVisit, FeatureCache
from dflash.train.transfer import Courier, choose_courier


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """One micro-batch, ready for the drafter.

    Attributes:
        features: [B, S, M*D] target taps; block_embeds: [B, N, K, D].
        target_states: final states of the target [B, S, D], only where the objective needs its distribution.
        lengths: tokens of each sequence; supervised_tokens: with loss, in the whole batch; covered_tokens: of these, those
            that some block predicts.
        target_index: worker that made it.

    """

    planned: PlannedBatch
    features: torch.Tensor
    block_embeds: torch.Tensor
    anchors: AnchorSet
    labels: BlockLabels
    target_states: TargetStates | None
    lengths: tuple[int, ...]
    supervised_tokens: int
    covered_tokens: int
    target_index: int

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        tensors = [self.features, self.block_embeds, *self.anchors, *self.labels]
        if self.target_states is not None:
            tensors.append(self.target_states.hidden)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class FeatureMaker:
    """Turns batches into feature batches on one target.

    Attributes:
        drafter_device: where the results go.
        dtype: of features and embeddings as the drafter takes them.
        courier: the way there.
        computing: held while the target computes, so that several threads may make batches of one target: one of them
            computes while the others carry.
        cache: states of samples on disk; None: every batch is computed.

    """

    target: Target
    target_index: int
    config: Config
    mask_token_id: int
    drafter_device: torch.device
    dtype: torch.dtype
    courier: Courier
    computing: threading.Lock
    cache: FeatureCache | None = None

    @torch.no_grad()
    def make(self, batch: Batch) -> FeatureBatch:
        """Run the target over `batch` and prepare its blocks."""
        planned, block_size = batch.planned, self.config.drafter.block_size
        input_ids = torch.from_numpy(batch.input_ids)
        loss_mask = torch.from_numpy(batch.loss_mask)
        lengths = torch.from_numpy(batch.lengths)
        anchors = sample_anchors(
            loss_mask,
            lengths,
            anchors=self.config.train.anchors,
            seed=self.config.run.seed,
            epoch=planned.epoch,
            batch_id=planned.position,
        )
        labels = block_labels(input_ids, loss_mask, lengths, anchors, block_size=block_size)
        block_ids = block_token_ids(input_ids, anchors, block_size=block_size, mask_token_id=self.mask_token_id)
        real_lengths = tuple(int(length) for length in batch.lengths)
        visit = None if self.cache is None else self.cache.visit(planned.rows[: len(input_ids)], real_lengths)
        with self.computing, self.courier.computing():
            features, final = self._states(input_ids.to(self.target.device), lengths, visit)
            embeds = self.target.embed(block_ids.to(self.target.device)).to(self.dtype)
            made = self.courier.mark()
        carry = partial(self.courier.carry, after=made)
        on_drafter = AnchorSet(*map(carry, anchors))
        made_batch = FeatureBatch(
            planned=planned,
            features=carry(features),
            block_embeds=carry(embeds),
            anchors=on_drafter,
            labels=BlockLabels(*map(carry, labels)),
            target_states=None if final is None else TargetStates(carry(final), on_drafter.positions),
            lengths=real_lengths,
            supervised_tokens=int(batch.loss_mask.sum()),
            covered_tokens=covered_tokens(labels, anchors, tokens=input_ids.shape[1]),
            target_index=self.target_index,
        )
        if visit is not None:
            visit.keep()  # carrying has waited for the target
        return made_batch

    def _states(
        self, input_ids: torch.Tensor, lengths: torch.Tensor, visit: CacheVisit | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Taps and final states as `_run_target` gives them, as far as possible from the cache."""
        if visit is None:
            return self._run_target(input_ids, lengths)
        states = visit.complete(
            lambda rows: _joined(*self._run_target(input_ids[rows], lengths[rows])),
            tokens=input_ids.shape[1],
            device=input_ids.device,
        )
        taps_width = len(self.target.target_layer_ids) * self.target.info.hidden_size
        return states[..., :taps_width], states[..., taps_width:] if wants_final(self.config) else None

    def _run_target(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Taps, and the final states if the objective looks at the target's distribution (only then do all layers run)."""
        # Cast here: half the bytes travel.
        if not wants_final(self.config):
            return self.target.features(input_ids, lengths).to(self.dtype), None
        features, final = self.target.features_with_final(input_ids, lengths)
        return features.to(self.dtype), final.to(self.dtype)


def states_width(config: Config, target: Target) -> int:
    """Numbers a token that `FeatureMaker` takes from its target."""
    return (len(target.target_layer_ids) + wants_final(config)) * target.info.hidden_size


def wants_final(config: Config) -> bool:
    """Whether the objective looks at the target's distribution."""
    return config.train.loss.objective == "acceptance"


def _joined(features: torch.Tensor, final: torch.Tensor | None) -> torch.Tensor:
    return features if final is None else torch.cat([features, final], dim=-1)


def make_maker(
    *, target: Target, target_index: int, config: Config, mask_token_id: int, drafter_device: torch.device, dtype: torch.dtype
) -> FeatureMaker:
    """A maker with the best way from its target's device to the drafter's."""
    return FeatureMaker(
        target=target,
        target_index=target_index,
        config=config,
        mask_token_id=mask_token_id,
        drafter_device=drafter_device,
        dtype=dtype,
        courier=choose_courier(target.device, drafter_device),
        computing=threading.Lock(),
    )


def target_threads(device: torch.device) -> int:
    """Threads of one target: on GPUs a second one computes while the first one's features travel."""
    return 1 if device.type == "cpu" else 2
