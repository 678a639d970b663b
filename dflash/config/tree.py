"""The one configuration tree: read from YAML, overridden by dotted keys, validated once, frozen.

No default value exists anywhere below this package: functions receive sections or explicit arguments.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section
from dflash.config.data import DataConfig, PlanConfig
from dflash.config.drill import DrillConfig
from dflash.config.model import ClusterConfig, DrafterConfig, RunConfig, TargetConfig
from dflash.config.observe import EvaluateConfig, HealthConfig, TrackingConfig
from dflash.config.probe import ProbeConfig
from dflash.config.publish import PublishConfig
from dflash.config.rollback import RollbackConfig
from dflash.config.training import CheckpointConfig, TrainConfig

CONFIG_SCHEMA_VERSION = 1


class Config(Section):
    """Everything a run is made from."""

    schema_version: Literal[1] = Field(1, description="Version of this tree.")
    run: RunConfig = Field(RunConfig(), description="Run.")
    target: TargetConfig = Field(description="Target.")
    drafter: DrafterConfig = Field(DrafterConfig(), description="Drafter.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Devices.")
    data: DataConfig = Field(description="Data.")
    plan: PlanConfig = Field(PlanConfig(), description="Batch plan.")
    train: TrainConfig = Field(TrainConfig(), description="Training.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Checkpoints.")
    rollback: RollbackConfig = Field(RollbackConfig(), description="Rollback.")
    health: HealthConfig = Field(HealthConfig(), description="Health check.")
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="Evaluation.")
    probe: ProbeConfig = Field(ProbeConfig(), description="Acceptance probes.")
    tracking: TrackingConfig = Field(TrackingConfig(), description="MLflow.")
    publish: PublishConfig = Field(PublishConfig(), description="Publishing.")
    drill: DrillConfig = Field(DrillConfig(), description="Fire drills.")

    @property
    def micro_batches_per_step(self) -> int:
        """Consecutive micro-batches of the plan that one optimizer step consumes, over all replicas."""
        return self.cluster.replicas * self.train.accumulation_steps

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        longest = self.data.longest_sample_tokens
        if longest > self.plan.tokens_per_batch:
            raise ValueError(
                f"plan.tokens_per_batch {self.plan.tokens_per_batch} cannot hold one sample of the last bucket ({longest} tokens)"
            )
        if longest + self.drafter.block_size > self.drafter.max_position_embeddings:
            raise ValueError(
                f"drafter.max_position_embeddings {self.drafter.max_position_embeddings} is below the longest sample plus a block "
                f"({longest} + {self.drafter.block_size})"
            )
        if self.evaluate.block_size is not None and self.evaluate.block_size > self.drafter.block_size:
            raise ValueError(
                f"evaluate.block_size {self.evaluate.block_size} is above the trained drafter.block_size {self.drafter.block_size}"
            )
        if self.train.compile and self.cluster.device == "cpu":
            raise ValueError("train.compile is for GPUs: leave it out on a CPU")
        if self.train.compile and self.cluster.shard:
            raise ValueError("train.compile and cluster.shard have never been tried together: choose one")
        self._probe_has_its_own_device()
        expected = self.target.expected
        if expected is not None:
            if expected.hidden_size != self.drafter.hidden_size:
                raise ValueError(
                    f"drafter.hidden_size {self.drafter.hidden_size} differs from the target's hidden size {expected.hidden_size}"
                )
            # The last layer is seen by no engine before the final norm, so it is no tap (0-based numbers).
            if self.drafter.target_layer_ids[-1] >= expected.num_hidden_layers - 1:
                raise ValueError(
                    f"drafter.target_layer_ids names layer {self.drafter.target_layer_ids[-1]} of a target with "
                    f"{expected.num_hidden_layers} layers: 0..{expected.num_hidden_layers - 2} can be tapped"
                )
        return self

    def _probe_has_its_own_device(self) -> None:
        kind, _, index = self.probe.device.partition(":")
        if self.probe.every_steps and kind == "cuda" and int(index) < self.cluster.devices_per_node:
            raise ValueError(
                f"probe.device {self.probe.device} is one of the {self.cluster.devices_per_node} GPUs that the training uses: "
                f"give the probes another one, or the CPU"
            )
