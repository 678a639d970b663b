"""A probe of an exported drafter, of any layout, on a run's probe prompts: what a registered drafter is measured with.

Invariant: the drafter is read with its own taps, block size and mask token; target, prompts and limits are the run's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.probe import probe_drafter, probe_identity
from dflash.evaluate.prompts import EvalPrompt
from dflash.model.export import import_drafter
from dflash.model.target import load_target
from dflash.records import ProbeFigures
from dflash.stages.export import check_same_target, stored_in, tables_of, target_at
from dflash.stages.probe import probe_prompts
from dflash.stages.run import Run


class FolderProbe:
    """The run's side of such probes; prompts are rendered once, the target is loaded when something is measured.

    Args:
        run: whose target and prompts.

    Attributes:
        identity: SHA-256 of the prompts and settings.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prompts: list[EvalPrompt] = probe_prompts(run)[0]
        self.identity = probe_identity(run.config, self._prompts)

    def measure(self, folder: Path) -> ProbeFigures:
        """Decode the prompts with an exported drafter.

        Raises:
            DrafterError, RunStateError: the folder is incomplete or belongs to another target.
            EvaluationError: nothing was verified.
        """
        config = self._run.config
        info = target_at(config.target.location)
        published = import_drafter(folder, tables=tables_of(info, stored_in(folder)))
        check_same_target(published, info)
        taps = published.description.config.target_layer_ids
        torch.set_num_threads(config.probe.torch_threads)
        target = load_target(config.target, target_layer_ids=taps, device=torch.device(config.probe.device))
        head = target.head_weight
        candidate = drafter_candidate(
            target,
            published.drafter.to(device=head.device, dtype=head.dtype).eval(),
            block_size=config.evaluate.block_size,
            mask_token_id=published.description.mask_token_id,
            label="registered",
            step=None,
        )
        return probe_drafter(
            target,
            candidate.proposer,
            self._prompts,
            probe=config.probe,
            evaluate=config.evaluate,
            stop_ids=stop_token_ids(load_tokenizer(config.target), config.target),
        )
