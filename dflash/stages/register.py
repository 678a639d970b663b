"""A drafter in the model registry, and its challenge to the champion there.

Invariant: a drafter is registered once; registering it again finds its version, adds what is new, and rules anew with the same
result. The alias moves only by `rule`; what was ruled stands in the version's tags either way.
Hard decision: where the champion was measured on other prompts or settings, it is fetched and measured again on the challenger's,
because two figures of different prompts say nothing about each other. Only another target makes them incomparable for good.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dflash.checkpoint import outcomes, read_manifest, read_probes
from dflash.errors import ConfigError, TrackingError
from dflash.model.export_files import CONFIG_NAME, INDEX_NAME
from dflash.records import ProbeFigures, RegisteredDrafter, RegisteredEvidence, Ruling, from_json, to_json
from dflash.stages.champion import OTHER_TARGET, rule
from dflash.stages.probe_folder import FolderProbe
from dflash.stages.run import Run
from dflash.stages.tracking import tracker_of
from dflash.storage import alone, sha256_file
from dflash.tracking import Registry, Version, load_state, store_uri
from dflash.tracking.names import TAG_DRAFTER

LOCK_FILE = "registry.lock"
CARD_FILE = "README.md"


def register_drafter(run: Run, folder: Path, checkpoint: Path, *, tags: Mapping[str, str]) -> RegisteredDrafter:
    """Register an exported drafter and let it challenge the champion.

    Args:
        run: that trained it.
        folder: exported drafter; its model card, if it has one, is stored with it.
        checkpoint: that it was exported from.
        tags: further tags of the version.

    Raises:
        ConfigError: tracking is switched off.
        TrackingError: the store is away, or refuses.
        DflashError: the drafter, or the champion, cannot be measured.
    """
    registry = open_registry(run)
    probe = FolderProbe(run)
    evidence = _evidence(run, folder, checkpoint, probe)
    with alone(run.paths.root.parent / LOCK_FILE):  # one challenge at a time among the runs of a folder
        version = registry.find(evidence.drafter_sha256)
        created = version is None
        if version is None:
            path = f"registry/step-{evidence.step}-{evidence.drafter_sha256[:12]}"
            version = registry.register(folder, run_id=_mlflow_run(run, registry), path=path, tags=_identity_tags(evidence))
        elif (folder / CARD_FILE).is_file():
            registry.add_files(folder / CARD_FILE, run_id=version.run_id, path=version.path)
        _store_evidence(registry, version, evidence)
        champion, ruling = _challenge(run, registry, evidence, probe)
        registry.tag(version, {**tags, **_ruling_tags(evidence, ruling, champion, version)})
        if ruling.moves:
            registry.crown(version)
    is_champion = ruling.moves or (champion is not None and champion.number == version.number)
    return RegisteredDrafter(registry.model, version.number, created, is_champion, ruling)


def open_registry(run: Run) -> Registry:
    """The registered model of a run's store.

    Raises:
        ConfigError: tracking is switched off.
    """
    if not run.config.tracking.enabled:
        raise ConfigError(
            "tracking.enabled is false: there is no registry", remedy="set tracking.enabled to true in the run's config.yaml"
        )
    return Registry(store_uri(run.config, os.environ), model=model_name(run))


def model_name(run: Run) -> str:
    """The registered model: configured, or named after the target, so that a champion competes with drafters of its own target.

    `publish.base_model` has no say: given in a single call it would crown a drafter in a registered model of its own.
    """
    named, target = run.config.publish.registered_model, Path(run.config.target.path).name
    return named or f"dflash-{''.join(char if char.isalnum() or char in '._-' else '-' for char in target)}"[:128]


def drafter_sha256(folder: Path) -> str:
    """SHA-256 (hex) over names and contents of an exported drafter's configuration and weights, the card left out."""
    names = (CONFIG_NAME, INDEX_NAME)
    files = sorted(path for path in folder.iterdir() if path.name in names or path.suffix == ".safetensors")
    return hashlib.sha256("".join(f"{path.name}\0{sha256_file(path)}\n" for path in files).encode()).hexdigest()


def _evidence(run: Run, folder: Path, checkpoint: Path, probe: FolderProbe) -> RegisteredEvidence:
    """The checkpoint's own probe where it has one of the same prompts and settings, else one of the folder."""
    manifest = read_manifest(checkpoint)
    record = outcomes(read_probes(run.paths.probes)).get((manifest.step, manifest.segment))
    known: ProbeFigures | None = record.figures if record is not None and record.prompts_sha256 == probe.identity else None
    return RegisteredEvidence(
        run=run.name,
        step=manifest.step,
        segment=manifest.segment,
        drafter_sha256=drafter_sha256(folder),
        target_fingerprint=manifest.target_fingerprint,
        prompts_sha256=probe.identity,
        figures=known or probe.measure(folder),
    )


def _mlflow_run(run: Run, registry: Registry) -> str:
    """The MLflow run that keeps the files: the one that trained, left as it is, or a new one where the store has none."""
    state = load_state(run.paths.tracking_state)
    if state is not None and state.run_id and registry.holds_run(state.run_id):
        return state.run_id
    tracker = tracker_of(run)
    tracker.connect()
    tracker.finish("FINISHED")
    if tracker.run_id is None:
        raise TrackingError(f"the MLflow store {tracker.uri} does not answer", remedy="check that the store is up")
    return tracker.run_id


def _challenge(run: Run, registry: Registry, evidence: RegisteredEvidence, probe: FolderProbe) -> tuple[Version | None, Ruling]:
    """Rule on the champion of this moment: measuring one can take minutes, in which another machine may crown somebody else."""
    champion = registry.champion()
    while True:
        ruling, now = _ruling(run, registry, champion, evidence, probe), registry.champion()
        if (champion and champion.number) == (now and now.number):
            return champion, ruling
        champion = now


def _ruling(
    run: Run, registry: Registry, champion: Version | None, challenger: RegisteredEvidence, probe: FolderProbe
) -> Ruling:  # fmt: skip
    if champion is not None and champion.tags.get("target_fingerprint") != challenger.target_fingerprint:
        return OTHER_TARGET
    rival = None if champion is None else _evidence_of(registry, champion, challenger, probe)
    return rule(challenger, rival, evaluate=run.config.evaluate, min_prompts=run.config.publish.min_prompts)


def _evidence_of(registry: Registry, champion: Version, challenger: RegisteredEvidence, probe: FolderProbe) -> RegisteredEvidence:
    """What the champion reached on the challenger's prompts; measured now where it never was."""
    known = _stored_evidence(registry, champion, challenger.prompts_sha256)
    if known is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="dflash-champion-") as place:
        folder = registry.download(champion, Path(place))
        figures = probe.measure(folder)
        first = _stored_evidence(registry, champion, champion.tags.get("prompts_sha256", ""))
        base = first or replace(challenger, run="", step=0, segment=0, drafter_sha256=drafter_sha256(folder))
    again = replace(base, prompts_sha256=challenger.prompts_sha256, figures=figures)
    _store_evidence(registry, champion, again)
    return again


def _evidence_name(prompts_sha256: str) -> str:
    return f"evidence-{prompts_sha256[:16]}.json"


def _store_evidence(registry: Registry, version: Version, evidence: RegisteredEvidence) -> None:
    with tempfile.TemporaryDirectory(prefix="dflash-evidence-") as place:
        file = Path(place) / _evidence_name(evidence.prompts_sha256)
        file.write_text(to_json(evidence, indent=2) + "\n", encoding="utf-8")
        registry.add_files(file, run_id=version.run_id, path=version.path)


def _stored_evidence(registry: Registry, version: Version, prompts_sha256: str) -> RegisteredEvidence | None:
    text = registry.read_text(version, _evidence_name(prompts_sha256))
    return None if text is None else from_json(RegisteredEvidence, text, origin=f"version {version.number}")


def _identity_tags(evidence: RegisteredEvidence) -> dict[str, str]:
    return {
        TAG_DRAFTER: evidence.drafter_sha256,
        "run": evidence.run,
        "step": str(evidence.step),
        "segment": str(evidence.segment),
        "target_fingerprint": evidence.target_fingerprint,
        "prompts_sha256": evidence.prompts_sha256,
    }


def _ruling_tags(evidence: RegisteredEvidence, ruling: Ruling, champion: Version | None, version: Version) -> dict[str, str]:
    """What was measured, and what came of the challenge; a champion that is registered again keeps what made it one."""
    length, ends = evidence.figures.acceptance_length, evidence.figures.acceptance_ci
    measured = {"acceptance_length": f"{length:.4f}", "acceptance_ci": "" if ends is None else "{:.4f} to {:.4f}".format(*ends)}
    if champion is not None and champion.number == version.number:
        return measured
    gain = "" if ruling.gain is None else f"{ruling.gain[0]:+.4f} to {ruling.gain[1]:+.4f}"
    return measured | {
        "champion_verdict": "took the place" if ruling.moves else "did not",
        "champion_reason": ruling.reason,
        "champion_gain": gain,
        "champion_before": "" if champion is None else champion.number,
    }
