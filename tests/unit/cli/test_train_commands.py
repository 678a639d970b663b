"""`train --accept-changes`: the newest unfinished run takes the changed configuration, before anything else happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.cli import main
from dflash.config import dump_config, load_config, parse_config
from dflash.errors import RunStateError
from dflash.records import RunPaths
from dflash.train.changes import read_changes
from dflash.train.runs import prepare_run

TEXT = "run: {{name: wide, root: {root}}}\ntarget: {{path: {root}/none, mask_token_id: 3}}\ndata: {{num_conversations: 5}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wide.yaml"
    path.write_text(TEXT.format(root=tmp_path))
    return path


def test_there_must_be_a_run_to_change(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "cluster.replicas=2", "--accept-changes"]) == RunStateError.exit_code
    assert "there is no run wide" in capsys.readouterr().err


def test_the_newest_run_is_changed_and_then_continued(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = parse_config(file.read_text(), origin="test", overrides=())
    runs = [RunPaths(tmp_path / f"wide-00{number}") for number in (1, 2)]
    for paths in runs:
        prepare_run(known, paths, location=tmp_path, fingerprint="f")
    # The target does not exist, so the training itself cannot begin: only the change happens.
    assert main(["train", str(file), "cluster.replicas=2", "--accept-changes"]) != 0
    assert "none does not exist" in capsys.readouterr().err
    assert runs[0].config.read_text() == dump_config(known)
    assert load_config(runs[1].config).cluster.replicas == 2
    assert [change.differences for change in read_changes(runs[1])] == [("cluster.replicas: 1 -> 2",)]
