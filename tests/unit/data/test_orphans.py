"""What killed builds leave behind can be told from what is in use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workshop import GOOD, Workshop, rows

from dflash.cli import main
from dflash.data.orphans import find_orphans
from dflash.data.prepare import load_data
from dflash.errors import DataError
from dflash.storage import open_store


def test_only_what_nothing_names_is_removed(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    a = workshop.corpus(*GOOD)
    first = workshop.prepare(workshop.config(a))
    second = workshop.prepare(workshop.config(a, workshop.corpus(*rows("b"), name="b.jsonl")))
    folder = Path(second.location)
    assert find_orphans(second.store) == []
    left = ["bucket=0/part-0123456789ab-00000-01234567.parquet", "units/0123456789ab.prompts-01234567.npy"]
    left += ["staging/bucket=0/part-0123456789ab-00000-01234567.parquet", "bucket=1/.put.x.tmp/part-0.parquet"]
    for name in left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"orphan")
    found = find_orphans(second.store)
    assert set(found) <= set(left)
    assert set(left[:3]) <= set(found)
    assert main(["data", "gc", second.location, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == found
    assert (folder / left[0]).exists()
    assert main(["data", "gc", second.location, "--delete"]) == 0
    assert "removed" in capsys.readouterr().out
    assert find_orphans(second.store) == []
    for data in (first, second):
        load_data(data.location, fingerprint=data.fingerprint, verify="full")


def test_a_folder_without_a_data_set_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bucket=0").mkdir()
    (tmp_path / "bucket=0" / "precious.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match="holds no data set"):
        find_orphans(open_store(tmp_path))
