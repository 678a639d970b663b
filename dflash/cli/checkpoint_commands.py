"""`python -m dflash checkpoint ...`: which checkpoints there are, what is stored in them, and why each is or is not clean."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.cli.arguments import add_command, add_group, add_run_dir
from dflash.cli.output import emit, progress_printer
from dflash.errors import EXIT_OK, EXIT_USER_ERROR, CheckpointError

if TYPE_CHECKING:
    from dflash.checkpoint import Explanation
    from dflash.stages.checkpoints import ListedCheckpoint, VerifiedCheckpoint

WIDTH = 80
_SHOWN = 8


def register(groups: Any) -> None:
    """Add the `checkpoint` group."""
    commands = add_group(groups, "checkpoint", "list checkpoints, look into them, and learn why each one is or is not clean")
    add_run_dir(add_command(commands, "list", "checkpoints of a run with their states", _list))
    verify = add_command(
        commands,
        "verify",
        "rescan every stored tensor: hashes, non-finite values, norm jumps; exit 1 if something is wrong",
        _verify,
    )
    verify.add_argument("folder", type=Path, help="a run's folder, one checkpoint, or any folder of safetensors files")
    why = add_command(commands, "why", "why each checkpoint is or is not clean, rollbacks included", _why)
    add_run_dir(why)
    why.add_argument("--step", type=int, help="only the checkpoint of this step")
    restore = add_command(commands, "restore", "bring the newest good copy back from checkpoint.store, after a lost disk", _restore)
    add_run_dir(restore)


def _list(arguments: argparse.Namespace) -> int:
    from dflash.stages.checkpoints import list_stage  # torch is not needed for the help

    rows = list_stage(arguments.run_dir)
    emit(arguments, [dataclasses.asdict(row) for row in rows], _list_text(rows))
    return EXIT_OK


def _list_text(rows: list[ListedCheckpoint]) -> str:
    if not rows:
        return "no checkpoints yet"
    lines = [f"{'step':>9}  {'state':<10}{'segment':>7}{'MiB':>9}{'accepts':>9}  note"]
    for row in rows:
        note = ", ".join(row.pointers) or ("folder is gone" if not row.size_bytes else row.reason)
        size = f"{row.size_bytes / 2**20:.1f}" if row.size_bytes else "-"
        segment = "-" if row.segment < 0 else str(row.segment)
        accepts = "-" if row.acceptance_length is None else f"{row.acceptance_length:.3f}"
        text = f"{row.step:>9}  {row.state:<10}{segment:>7}{size:>9}{accepts:>9}  "
        lines.append(text + textwrap.shorten(note, WIDTH - len(text), placeholder=" ..."))
    return "\n".join(lines)


def _verify(arguments: argparse.Namespace) -> int:
    from dflash.stages.checkpoints import verify_stage

    results = verify_stage(arguments.folder, progress=progress_printer())
    wrong = any(result.problems or result.jumps for result in results)
    payload = {"passed": not wrong, "checkpoints": [dataclasses.asdict(result) for result in results]}
    emit(arguments, payload, "\n".join(map(_verified_text, results)))
    return EXIT_USER_ERROR if wrong else EXIT_OK


def _verified_text(result: VerifiedCheckpoint) -> str:
    word = "BAD " if result.problems else "JUMP" if result.jumps else "ok  "
    compared = f", compared with {result.compared_with}" if result.compared_with else ""
    lines = [f"{word} {result.name}: {result.tensors} tensors, {result.values:,} values, norm {result.weights_norm:.4g}{compared}"]
    told = [*result.problems, *result.jumps]
    lines += [line for text in told[:_SHOWN] for line in _wrapped(text, indent="     ")]
    if len(told) > _SHOWN:
        lines.append(f"     and {len(told) - _SHOWN} more")
    return "\n".join(lines)


def _restore(arguments: argparse.Namespace) -> int:
    from dflash.stages.restore import restore_stage

    manifest = restore_stage(arguments.run_dir)
    payload = {"step": manifest.step, "segment": manifest.segment}
    emit(arguments, payload, f"step-{manifest.step} is back; training the same configuration continues from it")
    return EXIT_OK


def _why(arguments: argparse.Namespace) -> int:
    from dflash.stages.checkpoints import why_stage

    explained = [e for e in why_stage(arguments.run_dir) if arguments.step in (None, e.step)]
    if arguments.step is not None and not explained:
        raise CheckpointError(
            f"the run {arguments.run_dir} never had a checkpoint step-{arguments.step}",
            remedy="see `dflash checkpoint list` for those that it has, or leave --step out",
        )
    emit(arguments, [dataclasses.asdict(explanation) for explanation in explained], _why_text(explained))
    return EXIT_OK


def _why_text(explained: list[Explanation]) -> str:
    if not explained:
        return "no checkpoint yet"
    return "\n\n".join(
        "\n".join([f"step-{e.step}", *(line for text in e.lines for line in _wrapped(text, indent="  "))]) for e in explained
    )


def _wrapped(text: str, *, indent: str) -> list[str]:
    plain = "".join(character if character.isprintable() else " " for character in text)
    return textwrap.wrap(plain, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
