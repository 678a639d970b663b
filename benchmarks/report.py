"""What every benchmark shares: its options, the machine it ran on, its dated result file."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """The options of the rules: `--quick` ends within 50 s, `--json` prints one object as the last line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller, within 50 s; the stored result is left alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def publish(name: str, figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Store the figures in `results/<name>.json` (not with `--quick`) and print them."""
    report = {
        "name": name,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": machine(),
        "command": shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "figures": figures,
    }
    if not arguments.quick:
        (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report) if arguments.json else "\n".join(f"{key:<40} {value}" for key, value in figures.items()))


def kept_lines(file: Path) -> list[dict[str, Any]]:
    """What an interrupted benchmark had noted, one JSON object a line; a line that a kill has torn is none."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def machine() -> str:
    """Processor, cores, memory, software: a result without them means nothing."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    memory_gib = psutil.virtual_memory().total / 2**30
    software = f"{platform.system()}, Python {platform.python_version()}"
    return f"{model}, {psutil.cpu_count()} logical cores, {memory_gib:.0f} GiB, {software}"
