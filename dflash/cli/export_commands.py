"""`python -m dflash export|import|audit`: published drafters, out, in and under the magnifying glass."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from dflash.cli.arguments import add_command
from dflash.cli.output import emit
from dflash.errors import EXIT_OK, EXIT_USER_ERROR

LAYOUT_NAMES = ("zlab", "speculators", "transformers")
DTYPE_NAMES = ("bfloat16", "float16", "float32")
_LAYOUT_HELP = "zlab (SGLang, vLLM), speculators, or transformers (its own DFlash generation)"


def register(groups: Any) -> None:
    """Add the `export`, `import` and `audit` commands."""
    export = add_command(groups, "export", "write a trained drafter in a published layout, audited and re-imported", _export)
    export.add_argument("source", type=Path, help="a run's folder (its newest durable checkpoint) or a checkpoint's folder")
    _add_output(export)
    export.add_argument("--dtype", choices=DTYPE_NAMES, help="of the weights; float32 for a CPU run, bfloat16 else")
    taken = add_command(groups, "import", "read a published drafter of any layout and write it in another, bit for bit", _import)
    taken.add_argument("source", type=Path, help="folder of a published drafter")
    _add_output(taken)
    _add_target(taken)
    audit = add_command(groups, "audit", "check a published drafter against itself and its target; exit 1 on a failure", _audit)
    audit.add_argument("source", type=Path, help="folder of a published drafter")
    _add_target(audit)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=LAYOUT_NAMES, default="zlab", help=_LAYOUT_HELP)
    parser.add_argument("--output", type=Path, required=True, help="folder to make; an earlier export there is replaced")


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="folder of the target (or `demo`), to compare with")


def _export(arguments: argparse.Namespace) -> int:
    from dflash.stages.export import export_stage  # torch is not needed for the help

    done = export_stage(arguments.source, output=arguments.output, layout=arguments.layout, dtype=arguments.dtype)
    text = f"step {done.step} is in {done.folder} ({done.layout} layout, {done.dtype}), audited and imported again"
    emit(arguments, dataclasses.asdict(done), text)
    return EXIT_OK


def _import(arguments: argparse.Namespace) -> int:
    from dflash.stages.export import import_stage

    done = import_stage(arguments.source, output=arguments.output, layout=arguments.layout, target=arguments.target)
    text = f"{arguments.source} is in {done.folder} ({done.layout} layout, {done.dtype}), bit for bit"
    emit(arguments, dataclasses.asdict(done), text)
    return EXIT_OK


def _audit(arguments: argparse.Namespace) -> int:
    from dflash.stages.export import audit_stage
    from dflash.train.doctor import render_checks

    results = audit_stage(arguments.source, target=arguments.target)
    failed = any(result.status == "fail" for result in results)
    payload = {"passed": not failed, "checks": [dataclasses.asdict(result) for result in results]}
    emit(arguments, payload, render_checks(results))
    return EXIT_USER_ERROR if failed else EXIT_OK
