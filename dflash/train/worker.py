"""One rank of the trainer, started by torchrun: `python -m dflash.train.worker --run-dir DIR --segment S [--resume-step N]`.

Invariant: SIGTERM and SIGINT end it after the step in progress with its state saved; how it ended is written into
`control/trainer_exit.json`, because torchrun reports only that something failed: by rank 0, or by the rank whose own error it was.
Neither Prefect nor MLflow is imported.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # imports make 400,000 objects that stay: to look through them for garbage is a fifth of a rank's start

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dflash.config import load_config
from dflash.errors import EXIT_OK, DflashError, InterruptedRunError, NonFiniteLimitError
from dflash.records import RunPaths
from dflash.train.group import join_group
from dflash.train.inputs import open_inputs
from dflash.train.models import load_models, replica_devices
from dflash.train.outcome import write_exit
from dflash.train.processes import LAUNCHER_PID_VARIABLE, ORPHANED_EXIT, die_with_parent, identify, register_process
from dflash.train.segment import run_segment

logger = logging.getLogger("dflash.train.worker")  # run as a program, the module's own name is `__main__`


_SHARED_ERRORS = (InterruptedRunError, NonFiniteLimitError)
"""All ranks end with them together: rank 0, which saves, is the one that tells."""


def main(arguments: Sequence[str]) -> int:
    """Run one segment as a rank of torchrun; returns the exit code."""
    options = _parse(arguments)
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is not None and not die_with_parent(int(launcher)):
        return ORPHANED_EXIT
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    paths = RunPaths(options.run_dir)
    rank = int(os.environ["RANK"])
    identity = identify(os.getpid(), role="trainer" if rank == 0 else f"trainer-{rank}")
    if identity is not None:
        register_process(paths, identity)
    return train_segment(paths, segment=options.segment, resume_step=options.resume_step, on_operation=_ignore)


def train_segment(paths: RunPaths, *, segment: int, resume_step: int | None, on_operation: Callable[[str], None]) -> int:
    """Train one segment of a prepared run in this process, ended early by SIGTERM or SIGINT.

    Returns:
        0, or the exit code of the `DflashError` that ended it; either way the end is recorded.

    Raises:
        BaseException: any other error, with its own traceback; nothing is recorded then.
    """
    stop, first = threading.Event(), int(os.environ.get("RANK", "0")) == 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        config = load_config(paths.config)
        # Before any thread starts: the setting acts on the calling thread and on new ones.
        torch.set_num_threads(config.cluster.torch_threads)
        torch.use_deterministic_algorithms(config.cluster.device == "cpu")
        inputs = open_inputs(config, paths)
        with inputs.store:
            if config.cluster.device == "cuda":
                # Or whatever asks for "the" device (collectives, pinned memory, foreign kernels) would wake the first GPU.
                torch.cuda.set_device(replica_devices(config)[-1])
            group = join_group(config.cluster)
            models = load_models(config)
            state = run_segment(
                inputs, models, segment=segment, resume_step=resume_step, stop=stop, on_operation=on_operation, group=group
            )
            group.close()
    except DflashError as error:
        logger.error("%s: %s", type(error).__name__, error)
        if first or not isinstance(error, _SHARED_ERRORS):
            write_exit(paths, segment=segment, error=error)
        return error.exit_code
    logger.info("finished after %d steps", state.step)
    if first:
        write_exit(paths, segment=segment, error=None)
    return EXIT_OK


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dflash.train.worker", description="One rank of the trainer.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--segment", type=int, required=True, help="number of this stretch of the log")
    parser.add_argument("--resume-step", type=int, help="checkpoint to continue from; absent: start at step 0")
    return parser.parse_args(arguments)


def _ignore(_operation: str) -> None:
    """No one watches the file operations."""


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    code = main(sys.argv[1:])
    gc.freeze()  # what is alive at the end goes with the process: to look through it once more takes a second
    sys.exit(code)
