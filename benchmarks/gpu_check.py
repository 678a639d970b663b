"""Does every path that only a GPU has work, and how fast is it there? One script, each check apart from the others.

    python benchmarks/gpu_check.py                      # on one GPU, under 8 minutes; one line and exit 0 without one
    python benchmarks/gpu_check.py --only staging       # some checks
    python benchmarks/gpu_check.py --device cpu --tiny  # every check whose path exists on a CPU, with toy sizes

Needs torch, transformers, numpy, pyarrow, safetensors, and what the project's configuration is read with, pydantic and yaml. Each
check runs in a process of its own with a limit (`benchmarks/gpu/apart.py`). Exit code 1 if any check failed or could not be run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import importlib.util
import json
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the project's source is all that this script brings along
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu.apart import Job, Row, State, flat_figures, payload, run_jobs, table, write_result  # noqa: E402

NEEDED = ("torch", "transformers", "numpy", "pyarrow", "safetensors", "pydantic", "yaml")
RESULT = ROOT / "benchmarks" / "results" / "gpu_check.json"
BUDGET_S = 470.0
LANES = 4
SHOWN_FRAMES = 3


class Check(NamedTuple):
    """One check: a function of `benchmarks.gpu.<module>`; see `Job` for the rest."""

    module: str
    function: str
    limit_s: float
    alone: bool


CHECKS = (
    Check("attention", "flex_probe", 150, alone=False),
    Check("attention", "attention_agreement", 200, alone=False),
    Check("head", "head_agreement", 90, alone=False),
    Check("whole_run", "resumed_run", 150, alone=False),
    Check("whole_run", "decoding", 150, alone=False),
    Check("step", "recompute", 120, alone=False),
    Check("transfers", "collectives", 90, alone=False),
    Check("head", "screened_head", 60, alone=False),
    Check("setting", "device_figures", 60, alone=True),
    Check("step", "published_step", 180, alone=True),
    Check("replica", "replica_overlap", 120, alone=True),
    Check("transfers", "checkpoint_blocked", 90, alone=True),
    Check("transfers", "staging", 90, alone=True),
    Check("attention", "attention_speed", 120, alone=True),
    Check("head", "head_speed", 60, alone=True),
    Check("replica", "replica_memory", 120, alone=True),
    Check("step", "compiled", 150, alone=True),
    Check("step", "fused_adamw", 60, alone=True),
)


def main(arguments: Sequence[str]) -> int:
    """Run the checks and print their table; returns the exit code."""
    options = _parse(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu-check cannot run: {', '.join(missing)} not installed (it needs {', '.join(NEEDED)})")
        return 2
    if options.run is not None:
        return _run_here(options)
    reason = _no_device(options.device)
    if reason is not None:
        print(json.dumps({"name": "gpu_check", "skipped": reason}) if options.json else f"gpu-check skipped: {reason}")
        return 0
    chosen = [check for check in CHECKS if not options.only or check.function in options.only]
    with tempfile.TemporaryDirectory(prefix="gpu-check-caches-") as caches:
        rows = run_jobs(
            [_job(check, options) for check in chosen],
            environment=_environment(caches),
            lanes=LANES if options.device == "cuda" else 1,
            budget_s=options.budget_s,
            on_row=lambda row: print(f"{row.state:<9}{row.name} ({row.spent_s:.0f} s)", file=sys.stderr, flush=True),
        )
    _publish(rows, options)
    return 1 if any(row.bad for row in rows) else 0


def run_check(check: Check, *, device: str, tiny: bool, folder: Path) -> tuple[State, dict[str, Any], str]:
    """One check in this process: its state, its figures, and why it was skipped or the end of its traceback."""
    try:
        setting_module = importlib.import_module("benchmarks.gpu.setting")
        torch = importlib.import_module("torch")
        torch.set_num_threads(1 if device == "cpu" else 4)
        function: Callable[[Any], dict[str, Any]] = getattr(
            importlib.import_module(f"benchmarks.gpu.{check.module}"), check.function
        )
        # With its index: devices are compared, and "cuda" is not "cuda:0".
        place = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        return "ok", function(setting_module.Setting(place, tiny, folder)), ""
    except Exception as error:  # noqa: BLE001 - whatever a check meets is its row
        if type(error).__name__ == "SkippedError":
            return "skipped", {}, str(error)
        frames = traceback.extract_tb(error.__traceback__)[-SHOWN_FRAMES:]
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames]
        first = str(error).strip().splitlines()[:6] or [""]
        return "FAILED", {}, "\n".join([f"{type(error).__name__}: {first[0]}", *first[1:], *where])


def _run_here(options: argparse.Namespace) -> int:
    """The process of one check; it does not outlive the one that started it."""
    importlib.import_module("dflash.train.processes").die_with_parent(os.getppid())
    (check,) = (check for check in CHECKS if check.function == options.run)
    with tempfile.TemporaryDirectory(prefix="gpu-check-files-") as folder:
        state, figures, message = run_check(check, device=options.device, tiny=options.tiny, folder=Path(folder))
    write_result(options.result, state, figures, message)
    return 0


def _job(check: Check, options: argparse.Namespace) -> Job:
    command = [sys.executable, str(Path(__file__).resolve()), "--device", options.device, *(["--tiny"] if options.tiny else [])]
    return Job(check.function, [*command, "--run", check.function, "--result"], check.limit_s, check.alone)


def _environment(caches: str) -> dict[str, str]:
    """Quiet, off the network, one cache of compiled kernels for all checks."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, "inductor"),  # noqa: PTH118 - a plain string for the environment
        "TRITON_CACHE_DIR": os.path.join(caches, "triton"),  # noqa: PTH118
    }


def _no_device(device: str) -> str | None:
    """Why there is nothing to check, or None."""
    if device == "cpu":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return f"no CUDA device here (torch {torch.__version__}, built for CUDA {torch.version.cuda})"


def _publish(rows: list[Row], options: argparse.Namespace) -> None:
    names = {row.name: row.figures for row in rows}
    device = names.get("device_figures", {})
    report = {
        "name": "gpu_check",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": f"{device.get('device', options.device)}, torch {device.get('torch', '?')}, Python {platform.python_version()}",
        "command": shlex.join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]),
        "figures": flat_figures(rows),
    }
    if options.output is not None:
        options.output.write_text(json.dumps({**report, "rows": payload(rows)}, indent=2) + "\n", encoding="utf-8")
    if options.device == "cuda" and not options.tiny and not options.only:
        RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(rows))
    bad = [row.name for row in rows if row.bad]
    print(f"\n{len(rows) - len(bad)} of {len(rows)} checks have nothing to report" + (f"; look at {', '.join(bad)}" if bad else ""))
    if options.json:
        print(json.dumps(report))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where the checks run")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--only", nargs="+", choices=[check.function for check in CHECKS], help="these checks")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--output", type=Path, help="write the rows there as JSON")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="time for all checks together")
    parser.add_argument("--run", choices=[check.function for check in CHECKS], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
