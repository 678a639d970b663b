"""`control/planted.jsonl`: each time that a drill's fault took effect; written by the trainer, read by the drill. No torch here."""

from __future__ import annotations

import os

from dflash.records import PlantedFault, RunPaths, from_dict, to_json
from dflash.train.follow import parse_lines


def planted_lines(paths: RunPaths) -> list[PlantedFault]:
    """Each time that a fault took effect in a run, in order; empty in a run that is no drill."""
    if not paths.planted_log.is_file():
        return []
    lines = parse_lines(paths.planted_log.read_bytes())
    return [from_dict(PlantedFault, line, origin=str(paths.planted_log)) for line in lines]


def append_planted(paths: RunPaths, line: PlantedFault) -> None:
    """Append one line; ranks and the writing thread may do so at once."""
    descriptor = os.open(paths.planted_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, to_json(line).encode() + b"\n")
    finally:
        os.close(descriptor)
