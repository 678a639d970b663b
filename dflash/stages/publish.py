"""Publishing a trained drafter: exported, audited, described, and registered if that is wanted.

Invariant: the folder appears under its name only after it has passed every check, model card included; until then what stood
there stays. What is published is one checkpoint whose evaluation lies in the run's folder: no card without measured figures.
Hard decision: licence and name of the target come from the configuration and are never guessed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.checkpoint import BEST, current_states, list_checkpoints, load_drafter, read_ledger, read_manifest, read_pointer
from dflash.config import Config
from dflash.config.publish import HUB_NAME
from dflash.errors import ConfigError, DrafterError
from dflash.evaluate.run import Evaluation
from dflash.model.export_fields import DtypeName, LayoutName
from dflash.model.export_layouts import LAYOUTS
from dflash.model.export_swap import partial_path, recover, replace_folder
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import read_target_info
from dflash.records import CheckResult, RegisteredDrafter, RunPaths
from dflash.stages.card_facts import card_facts
from dflash.stages.export import newest_checkpoint, write_checkpoint
from dflash.stages.model_card import model_card
from dflash.stages.publish_audit import CARD_NAME, check_folder, is_published_file, require_passed, require_private
from dflash.stages.published import measure_published
from dflash.stages.register import open_registry, register_drafter
from dflash.stages.run import Run, reopen_run
from dflash.storage import atomic_write_text

FOLDER = "published"
_SECTION = "publish."


@dataclass(frozen=True, slots=True)
class Published:
    """What was published.

    Attributes:
        checks: results of the audit.
        registered: None where it was not to be registered.
    """

    folder: Path
    step: int
    layout: LayoutName
    dtype: DtypeName
    checks: tuple[CheckResult, ...]
    registered: RegisteredDrafter | None


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """What to publish, and where to.

    Attributes:
        source: a run's folder (its best checkpoint by its probes, else the newest), or one of its checkpoints.
        output: folder to make; `published/<layout>` in the run's folder if None.
        dtype: of the weights; None is float32 for a run on a CPU and bfloat16 for one on GPUs.
        overrides: of the configuration's `publish` section.
        register: as a version of the registered model, with the card.
    """

    source: Path
    output: Path | None
    layout: LayoutName
    dtype: DtypeName | None
    overrides: Sequence[str]
    register: bool


def publish_stage(request: PublishRequest, *, progress: Callable[[str, int, int], None]) -> Published:
    """Export, audit, describe and, if asked, register a drafter.

    Raises:
        ConfigError: the licence, or the target's name on the hub, is missing; or there is no registry to register in.
        RunStateError: the checkpoint was never evaluated.
        DrafterError: a check failed; nothing is left behind.
    """
    run, checkpoint = _opened(request)
    config = run.config
    license_id, base_model = _license(config), _base_model(config)
    dtype: DtypeName = request.dtype or ("float32" if config.cluster.device == "cpu" else "bfloat16")
    place = (request.output or run.paths.root / FOLDER / request.layout).resolve()
    _require_replaceable(place)
    if request.register:
        open_registry(run)  # that there is none is told before anything is exported
    facts = card_facts(run, checkpoint, layout=request.layout, dtype=dtype, license_id=license_id, base_model=base_model)
    partial = partial_path(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        recover(place)
        folder = write_checkpoint(config, checkpoint, output=partial, layout=request.layout, dtype=dtype, target_name=base_model)
        checks = audit_published(run, folder, checkpoint, layout=request.layout, progress=progress)
        atomic_write_text(folder / CARD_NAME, model_card(facts(folder, checks)))
        require_private(folder, os.environ, (Path.cwd(), Path.home(), run.paths.root.resolve()))
        replace_folder(folder, place)
    except OSError as error:
        raise DrafterError(
            f"{place} cannot be written: {error}", remedy="name a folder that can be, on a disk with room"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    registered = register_drafter(run, place, checkpoint, tags={"published": request.layout}) if request.register else None
    return Published(place, read_manifest(checkpoint).step, request.layout, dtype, checks, registered)


def audit_published(
    run: Run, folder: Path, checkpoint: Path, *, layout: LayoutName, progress: Callable[[str, int, int], None]
) -> tuple[CheckResult, ...]:
    """Check a folder against the checkpoint it came from, and let it draft for a few held-out prompts.

    Raises:
        DrafterError: a check failed; names all that did.
    """
    target = read_target_info(run.config.target)
    tables = frozen_tables(Path(target.location)) if LAYOUTS[layout].stores_tables else None
    results = check_folder(folder, weights=load_drafter(checkpoint)[1], target=target, tables=tables)
    require_passed(results, folder.name)
    settings = run.config.publish
    few = {"num_prompts": settings.audit_prompts, "max_new_tokens": settings.audit_tokens, "temperature": 0.0, "batch_size": 1}
    evaluate = run.config.evaluate.model_copy(update=few)
    small = dataclasses.replace(run, config=run.config.model_copy(update={"evaluate": evaluate}))
    results = (*results, _decoded(measure_published(small, folder, progress=progress)))
    require_passed(results, folder.name)
    return results


def _decoded(evaluation: Evaluation) -> CheckResult:
    result = evaluation.result
    found = f"{result.prompts} prompts decoded with this folder, {result.committed_tokens} tokens"
    if not result.lossless:
        return CheckResult("decoding", "fail", f"{found}, not the tokens of plain decoding", "look at an evaluation's evidence")
    return CheckResult("decoding", "ok", f"{found}, the same as plain decoding's", "")


def _opened(request: PublishRequest) -> tuple[Run, Path]:
    """The run, with the overrides of its publish section, and the checkpoint that is meant."""
    for assignment in request.overrides:
        if not assignment.startswith(_SECTION):
            raise ConfigError(
                f"{assignment!r} is no key of the publish section", remedy="only publish.KEY=VALUE can be given when publishing"
            )
    is_checkpoint = (request.source / "manifest.json").is_file()
    run = reopen_run(request.source.parent.parent if is_checkpoint else request.source, overrides=request.overrides)
    return run, request.source if is_checkpoint else _best_or_newest(run.paths)


def _best_or_newest(paths: RunPaths) -> Path:
    best = read_pointer(paths.checkpoints_dir, BEST)
    current = current_states(read_ledger(paths.ledger))
    if best is not None and best in list_checkpoints(paths.checkpoints_dir) and current[best].state not in ("bad", "suspect"):
        return paths.checkpoint(best)
    return newest_checkpoint(paths)


def _license(config: Config) -> str:
    if config.publish.license is None:
        raise ConfigError(
            "publish.license is not set: a drafter without a licence may not be used by anybody",
            remedy="set it in the run's config.yaml, or give publish.license=apache-2.0 (or another) behind the command",
        )
    return config.publish.license


def _base_model(config: Config) -> str:
    """The target's name on the hub: configured, or `target.path` where that is one and no folder."""
    path = config.target.path
    if config.publish.base_model is not None:
        return config.publish.base_model
    if path.count("/") == 1 and re.fullmatch(HUB_NAME, path) and not Path(path).exists():
        return path
    raise ConfigError(
        "publish.base_model is not set, and target.path is no name on the hub",
        remedy="give publish.base_model=OWNER/NAME of the target",
    )


def _require_replaceable(place: Path) -> None:
    """Only what an earlier call made, or an empty folder, is replaced: whatever stands there is gone afterwards."""
    found = list(place.iterdir()) if place.is_dir() else []
    has_card = not found or (place / CARD_NAME).is_file()
    if place.is_file() or not has_card or not all(map(is_published_file, found)):
        raise DrafterError(f"{place} holds something else than a published drafter", remedy="name an empty or a new folder")
