"""The strict configuration tree of a run."""

from dflash.config.credentials import CREDENTIAL_PATTERNS
from dflash.config.data import AnswerConfig, DataConfig, PlanConfig, ReaderConfig, ServerConfig
from dflash.config.drill import DrillConfig
from dflash.config.load import dump_config, flat_params, load_config, parse_config, section_hash
from dflash.config.model import ClusterConfig, DrafterConfig, ExpectedTarget, RunConfig, TargetConfig
from dflash.config.observe import (
    EvaluateConfig,
    EvaluateServerConfig,
    HealthConfig,
    RiseConfig,
    SpikeConfig,
    TrackingConfig,
    WatchConfig,
)
from dflash.config.probe import ProbeConfig
from dflash.config.prompt_sets import KNOWN_SETS, PROMPT_PLACE, PromptSetConfig
from dflash.config.publish import PublishConfig
from dflash.config.reference import config_rows, reference_markdown
from dflash.config.rollback import RollbackConfig
from dflash.config.sweep import SweepConfig
from dflash.config.training import (
    AnchorConfig,
    CheckpointConfig,
    LossConfig,
    OptimizerConfig,
    QueueConfig,
    TrainConfig,
)
from dflash.config.tree import Config

__all__ = [
    "KNOWN_SETS",
    "CREDENTIAL_PATTERNS",
    "PROMPT_PLACE",
    "AnchorConfig",
    "AnswerConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DrafterConfig",
    "DrillConfig",
    "EvaluateConfig",
    "EvaluateServerConfig",
    "ExpectedTarget",
    "HealthConfig",
    "LossConfig",
    "OptimizerConfig",
    "PlanConfig",
    "ProbeConfig",
    "PromptSetConfig",
    "PublishConfig",
    "QueueConfig",
    "ReaderConfig",
    "RiseConfig",
    "RollbackConfig",
    "RunConfig",
    "ServerConfig",
    "SpikeConfig",
    "SweepConfig",
    "TargetConfig",
    "TrackingConfig",
    "TrainConfig",
    "WatchConfig",
    "config_rows",
    "dump_config",
    "flat_params",
    "load_config",
    "parse_config",
    "reference_markdown",
    "section_hash",
]
