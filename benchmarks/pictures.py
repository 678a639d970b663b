"""The pictures of the documentation, made from finished runs: `python -m benchmarks.pictures RUN --damaged RUN`.

RUN is a demo run (`make demo`); the damaged one is a drill's (`make drill FAULT=ramp`): its log is judged as it stood when the
check decided, so the picture shows what a person would have seen then. Nothing in the runs is changed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.pictures_concept import concept_svg
from benchmarks.pictures_timeline import draw_timeline
from dflash.cli.health_any import HealthOptions, Judged, open_judge
from dflash.errors import RunStateError
from dflash.evaluate.plots import draw_plots
from dflash.evaluate.stored import RESULT_FILE, newest_evaluation
from dflash.health import parse_map
from dflash.health.pictures import draw_pictures
from dflash.records import EvaluationResult, RunPaths, from_json
from dflash.storage import atomic_write_bytes, atomic_write_text
from dflash.train.timeline import read_timeline

IMAGES = Path(__file__).parents[1] / "docs" / "img"
SHOWN = ("loss", "gradient")
"""Of the report's pictures, those that the pages show of the damaged run."""


def main() -> None:
    """Draw what the given runs have figures for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a finished demo run; without one only the concept is drawn")
    parser.add_argument("--damaged", type=Path, help="a run that was rolled back")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the pictures (docs/img)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    atomic_write_text(arguments.output / "concept.svg", concept_svg())
    drawn = {} if arguments.run is None else pictures_of_run(RunPaths(arguments.run))
    if arguments.damaged is not None:
        drawn |= pictures_of_damage(RunPaths(arguments.damaged))
    for name, png in drawn.items():
        atomic_write_bytes(arguments.output / f"{name}.png", png)
    print(f"{arguments.output}: concept.svg {' '.join(f'{name}.png' for name in drawn)}")


def pictures_of_run(paths: RunPaths) -> dict[str, bytes]:
    """Plan, health report and acceptance of a healthy run."""
    drawn = {"plan": (paths.plan_dir / "plan.png").read_bytes()}
    with tempfile.TemporaryDirectory() as place:
        judged = judged_copy(paths, Path(place) / paths.root.name, end=None)
    drawn |= {f"health-{picture}": png for picture, png in report_pictures(judged).items() if picture in ("loss", "step-time")}
    folder = newest_evaluation(paths.eval_dir, "trained")
    if folder is None:
        raise RunStateError(f"{paths.root} was not evaluated", remedy=f"python -m dflash evaluate {paths.root}")
    result = from_json(EvaluationResult, (folder / RESULT_FILE).read_bytes(), origin=str(folder))
    drawn["acceptance"] = draw_plots(result)["acceptance_per_position.png"]
    return drawn


def pictures_of_damage(paths: RunPaths) -> dict[str, bytes]:
    """The report as it was when the check decided, and the timeline of the whole run with its rollback."""
    with tempfile.TemporaryDirectory() as place:
        judged = judged_copy(paths, Path(place) / paths.root.name, end=b'"rollback_begin"')
    drawn = {f"damage-{picture}": png for picture, png in report_pictures(judged).items() if picture in SHOWN}
    drawn["timeline"] = draw_timeline(read_timeline(paths.log, first_step=0, end_step=None))
    return drawn


def judged_copy(paths: RunPaths, copy: Path, *, end: bytes | None) -> Judged:
    """Judge a copy of a run's log up to the first line that holds `end`: the run itself keeps its own report."""
    copy.mkdir(parents=True)
    shutil.copy(paths.config, copy)
    shutil.copytree(paths.plan_dir, copy / paths.plan_dir.name)
    with paths.log.open("rb") as lines, (copy / paths.log.name).open("wb") as kept:
        for line in lines:
            if end is not None and end in line:
                break
            kept.write(line)
    nothing = HealthOptions(fields=parse_map([]), remote_prefix=(), since_step=None, act=False)
    return open_judge(str(copy), nothing).judge()


def report_pictures(judged: Judged) -> dict[str, bytes]:
    """The report's pictures by name."""
    return {picture.name: picture.png for picture in draw_pictures(judged.history, judged.report.findings).to_keep()}


if __name__ == "__main__":
    main()
