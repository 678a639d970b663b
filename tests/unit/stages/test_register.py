"""The registry on a real SQLite store: one version a drafter, an alias that moves by the rule alone, reasons that stay."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash.checkpoint import BEST, ProbeWriter, hold_probes, read_pointer
from dflash.cli import main
from dflash.config import load_config
from dflash.errors import ConfigError, DrafterError, RunStateError, TrackingError
from dflash.records import ProbeFigures, ProbeRecord, RegisteredDrafter
from dflash.stages import register as register_module
from dflash.stages import select as select_module
from dflash.stages.champion_folder import champion_of
from dflash.stages.export import write_checkpoint
from dflash.stages.probe_folder import FolderProbe
from dflash.stages.register import drafter_sha256, model_name, register_drafter
from dflash.stages.run import Run
from dflash.stages.select import select_stage
from dflash.tracking import Registry
from dflash.train.runs import hold_run

NAMES = itertools.count()
STEPS = (20, 40, 60)


@pytest.fixture(autouse=True)
def _no_store_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def run(evaluated_run: Run) -> Run:
    """The run with a registered model of the test's own and no probes."""
    evaluated_run.paths.probes.unlink(missing_ok=True)
    (evaluated_run.paths.checkpoints_dir / BEST).unlink(missing_ok=True)
    return changed(evaluated_run, f"publish.registered_model=test-{next(NAMES)}")


@pytest.fixture(scope="session")
def folders(evaluated_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Every checkpoint's drafter, exported."""
    place = tmp_path_factory.mktemp("exported")
    config, paths = evaluated_run.config, evaluated_run.paths
    return {
        step: write_checkpoint(
            config, paths.checkpoint(step), output=place / str(step), layout="zlab", dtype="float32", target_name="x"
        )
        for step in STEPS
    }


def changed(run: Run, *overrides: str) -> Run:
    config = load_config(run.paths.config, overrides=overrides)
    return dataclasses.replace(run, config=config)


def figures(lengths: np.ndarray) -> ProbeFigures:
    passes = np.full(lengths.size, 20)
    counted = np.round(lengths * passes).astype(int)
    length = float(counted.sum() / passes.sum())
    return ProbeFigures(length, (length - 0.1, length + 0.1), tuple(counted.tolist()), tuple(passes.tolist()), (), 0.0)


def measured(run: Run, gains: dict[int, float]) -> None:
    """Pretend that checkpoints were probed on 16 prompts, with these gains on every prompt."""
    base, identity = 1.5 + np.random.default_rng(0).random(16), FolderProbe(run).identity
    with hold_probes(run.paths) as writer:
        for step, gain in gains.items():
            write(writer, step, identity, figures(base + gain))


def write(writer: ProbeWriter, step: int, identity: str, found: ProbeFigures) -> None:
    writer.append(ProbeRecord(step, 0, identity, outcome="measured", at="2026-01-01", reason="", figures=found))


def registered(run: Run, folders: dict[int, Path], step: int) -> RegisteredDrafter:
    return register_drafter(run, folders[step], run.paths.checkpoint(step), tags={"note": "a=b"})


def registry(run: Run) -> Registry:
    return Registry(f"sqlite:///{run.paths.root.parent.resolve() / 'mlflow.db'}", model=model_name(run))


def versions(run: Run) -> dict[str, Any]:
    found = registry(run)._client.search_model_versions(f"name = '{model_name(run)}'")
    return {str(each.version): each for each in found}


def champion(run: Run) -> str | None:
    found = registry(run).champion()
    return None if found is None else found.number


def test_the_first_is_champion_and_what_is_stored_is_the_exported_folder_and_its_evidence(
    run: Run, folders: dict[int, Path], tmp_path: Path
) -> None:
    measured(run, {20: 0.0})
    done = registered(run, folders, 20)
    assert (done.version, done.created, done.champion) == ("1", True, True)
    version = registry(run).champion()
    assert version is not None
    stored = registry(run).download(version, tmp_path)
    names = sorted(path.name for path in stored.iterdir())
    assert [name for name in names if not name.startswith("evidence-")] == ["config.json", "model.safetensors"]
    assert all(Path(name).suffix in (".json", ".safetensors") for name in names), "nothing that would be unpickled or run"
    assert (stored / "model.safetensors").read_bytes() == (folders[20] / "model.safetensors").read_bytes()
    tags = versions(run)["1"].tags
    assert tags["drafter_sha256"] == drafter_sha256(folders[20]) == drafter_sha256(stored)
    assert (tags["run"], tags["step"], tags["note"]) == (run.name, "20", "a=b")
    assert tags["champion_reason"] == "there was no champion"


def test_the_same_drafter_is_registered_once_and_keeps_what_made_it_champion(run: Run, folders: dict[int, Path]) -> None:
    measured(run, {20: 0.0})
    registered(run, folders, 20)
    again = registered(run, folders, 20)
    assert (again.version, again.created, again.champion, again.ruling.moves) == ("1", False, True, False)
    assert list(versions(run)) == ["1"]
    assert versions(run)["1"].tags["champion_reason"] == "there was no champion"


@pytest.mark.parametrize(("call", "known"), [("register", False), ("champion", True), ("tag", True), ("crown", True)])
def test_a_challenge_that_was_cut_off_is_finished_by_the_next(
    call: str, known: bool, run: Run, folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(run, {20: 0.0, 40: 0.1})
    registered(run, folders, 20)

    def cut(*_arguments: object, **_more: object) -> None:
        raise TrackingError("gone", remedy="wait")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, call, cut)
        with pytest.raises(TrackingError, match="gone"):
            registered(run, folders, 40)
    assert sorted(versions(run)) == ["1", "2"][: 1 + known]
    assert champion(run) == "1"
    assert registered(run, folders, 40).champion
    assert (sorted(versions(run)), champion(run)) == (["1", "2"], "2")
    assert versions(run)["2"].tags["champion_reason"].startswith("better: ")


def test_a_champion_that_was_crowned_while_a_challenge_was_measured_is_ruled_on_too(
    run: Run, folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(run, {20: 0.0, 40: 0.2, 60: 0.1})
    registered(run, folders, 20)
    first = registry(run).champion()
    registered(run, folders, 40)
    better = registry(run).champion()
    assert first is not None and better is not None
    registry(run).crown(first)
    before = register_module.rule

    def another_machine_is_faster(*arguments: Any, **more: Any) -> Any:
        registry(run).crown(better)
        return before(*arguments, **more)

    monkeypatch.setattr(register_module, "rule", another_machine_is_faster)
    done = registered(run, folders, 60)
    assert (done.champion, champion(run)) == (False, better.number)
    tags = versions(run)[done.version].tags
    assert tags["champion_reason"].startswith("worse: ") and tags["champion_before"] == better.number


def test_the_alias_moves_for_a_paired_gain_and_for_nothing_less(run: Run, folders: dict[int, Path]) -> None:
    measured(run, {20: 0.0, 40: 0.0, 60: 0.1})
    registered(run, folders, 20)
    equal = registered(run, folders, 40)
    assert (equal.version, equal.champion, champion(run)) == ("2", False, "1")
    better = registered(run, folders, 60)
    assert (better.version, better.champion, champion(run)) == ("3", True, "3")
    tags = {number: version.tags for number, version in versions(run).items()}
    assert tags["2"]["champion_reason"].startswith("no difference shown: ")
    assert (tags["2"]["champion_verdict"], tags["2"]["champion_before"]) == ("did not", "1")
    assert tags["3"]["champion_reason"].startswith("better: ")
    assert tags["3"]["champion_gain"].startswith("+0.")
    back = registered(run, folders, 20)
    assert (back.champion, champion(run)) == (False, "3")
    assert versions(run)["1"].tags["champion_reason"].startswith("worse: ")


def test_a_champion_of_other_prompts_is_measured_again_before_it_is_compared(run: Run, folders: dict[int, Path]) -> None:
    measured(run, {20: 5.0})
    registered(run, folders, 20)
    others = changed(run, f"publish.registered_model={model_name(run)}", "probe.max_new_tokens=4", "publish.min_prompts=2")
    done = registered(others, folders, 40)
    assert done.ruling.gain is not None, "both were measured on the new prompts"
    assert "on 3 prompts" in done.ruling.reason
    assert "against 1." in done.ruling.reason, "and not against what the champion reached on others"
    version = registry(run).champion()
    assert version is not None
    identity = FolderProbe(others).identity
    assert registry(run).read_text(version, f"evidence-{identity[:16]}.json") is not None, "the next one need not measure it"


def test_the_champion_can_be_fetched_and_is_what_was_registered(
    run: Run, folders: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(run, {20: 0.0})
    with pytest.raises(RunStateError, match="has no champion"):
        champion_of(run, output=None)
    registered(run, folders, 20)
    found = champion_of(run, output=tmp_path / "new" / "champion")
    assert (found.version, found.run, found.step, found.reason) == ("1", run.name, "20", "there was no champion")
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "champion").iterdir()} == {
        path.name: path.read_bytes() for path in folders[20].iterdir()
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["champion"]
    with pytest.raises(DrafterError, match="exists already"):
        champion_of(run, output=tmp_path / "new" / "champion")
    with pytest.raises(DrafterError, match="cannot be written"):
        champion_of(run, output=tmp_path / "new" / "champion" / "config.json" / "below")
    monkeypatch.setattr("dflash.stages.reopen_run", lambda _folder: run)
    assert main(["champion", str(run.paths.root)]) == 0
    assert "step 20 of probed-001" in capsys.readouterr().out
    version = registry(run).champion()
    assert version is not None
    (stored,) = run.paths.root.parent.glob(f"mlartifacts/**/{version.path}/config.json")
    stored.write_text(stored.read_text() + " ")
    with pytest.raises(TrackingError, match="not those that were registered"):
        champion_of(run, output=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    stored.write_text((folders[20] / "config.json").read_text())


def test_a_champion_of_another_target_is_left_alone(run: Run, folders: dict[int, Path]) -> None:
    measured(run, {20: 0.0, 40: 3.0})
    registered(run, folders, 20)
    version = registry(run).champion()
    assert version is not None
    registry(run).tag(version, {"target_fingerprint": "another"})
    done = registered(run, folders, 40)
    assert (done.champion, champion(run)) == (False, "1")
    assert "another target" in versions(run)["2"].tags["champion_reason"]


def test_without_a_registry_nothing_is_registered(run: Run, folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(run, {20: 0.0})
    with pytest.raises(ConfigError, match=r"tracking\.enabled"):
        registered(changed(run, "tracking.enabled=false"), folders, 20)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(TrackingError, match="MLflow"):
        registered(run, folders, 20)


def test_a_version_that_somebody_else_made_is_named_and_not_guessed_at(run: Run, folders: dict[int, Path]) -> None:
    measured(run, {20: 0.0})
    client, name = registry(run)._client, model_name(run)
    client.create_registered_model(name)
    foreign = client.create_model_version(name, "file:///nowhere")
    client.set_registered_model_alias(name, "champion", foreign.version)
    with pytest.raises(TrackingError, match="not registered here"):
        registered(run, folders, 20)
    assert client.get_registered_model(name).aliases["champion"] in (foreign.version, str(foreign.version))


def selected(run: Run, monkeypatch: pytest.MonkeyPatch, *, register: bool = True) -> Any:
    """Selection with the test's settings, which are not those of the folder's config.yaml."""
    monkeypatch.setattr(select_module, "reopen_run", lambda _folder: run)
    return select_stage(run.paths.root, register=register)


def test_selection_points_to_the_best_and_registers_that_one_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(run, {20: 0.0, 40: 0.2, 60: 0.1})
    found = selected(run, monkeypatch)
    assert (found.best, read_pointer(run.paths.checkpoints_dir, BEST)) == (40, 40)
    assert [record.step for record in found.probes] == [20, 40, 60]
    assert (found.registered.version, found.registered.champion) == ("1", True)
    assert [version.tags["step"] for version in versions(run).values()] == ["40"]
    again = selected(run, monkeypatch)
    assert (again.registered.created, list(versions(run))) == (False, ["1"])
    assert selected(run, monkeypatch, register=False).registered is None


def test_the_pointer_of_a_live_run_is_its_supervisor_s(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(run, {20: 0.0, 40: 0.2, 60: 0.1})
    with hold_run(run.paths):
        assert selected(run, monkeypatch, register=False).best == 40
    assert read_pointer(run.paths.checkpoints_dir, BEST) is None


@pytest.mark.parametrize("comes", [True, False])
def test_another_prober_s_outcomes_are_waited_for_while_it_gives_any(
    comes: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = changed(run, "probe.timeout_s=0.05")
    identity = FolderProbe(run).identity
    waiting: list[int] = [60, 40, 20] if comes else []
    with hold_probes(run.paths) as writer:

        def a_moment(_seconds: float) -> None:
            if waiting:
                write(writer, waiting.pop(), identity, figures(np.full(16, 2.0)))

        monkeypatch.setattr(select_module.time, "sleep", a_moment)
        if comes:
            found = selected(run, monkeypatch, register=False)
            assert [record.step for record in found.probes] == [20, 40, 60]
        else:
            with pytest.raises(RunStateError, match="has given nothing"):
                selected(run, monkeypatch, register=False)


def test_the_registered_model_is_named_after_the_target(evaluated_run: Run) -> None:
    assert model_name(evaluated_run) == "dflash-demo"
    assert model_name(changed(evaluated_run, "publish.base_model=a/b")) == "dflash-demo", (
        "one call of publish crowns nobody elsewhere"
    )
    assert model_name(changed(evaluated_run, "target.path=/some where/a b")) == "dflash-a-b"
