"""Any JSON as a manifest, ledger or note is read or refused, seals that fit included: whoever changes a file can seal it too."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash import records
from dflash.checkpoint import read_ledger
from dflash.checkpoint.load import verify_checkpoint
from dflash.data.manifest import read_manifest
from dflash.data.plan_file import load_plan
from dflash.errors import DflashError
from dflash.records import from_json, from_sealed_json, to_json
from dflash.records.seal import SEAL, _seal_of
from dflash.storage import open_store
from tests.support.fuzz import TIMEOUT_S, changed_bytes, changed_json, explained, fuzz, json_text

KINDS = sorted(
    (kind for kind in vars(records).values() if dataclasses.is_dataclass(kind) and kind is not records.RunPaths),
    key=lambda kind: str(kind.__name__),  # type: ignore[union-attr]
)

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def example(hint: Any) -> Any:
    """A JSON value that fits a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return [example(kind) for kind in arguments if kind is not Ellipsis]
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {"1": example(arguments[1])}
    if arguments:
        return example(next(kind for kind in arguments if kind is not type(None)))
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return {field.name: _field(field, hints[field.name]) for field in dataclasses.fields(hint)}
    return {int: 1, float: 0.5, str: "x", bool: True}.get(hint, "any")


def _field(field: dataclasses.Field[Any], hint: Any) -> Any:
    return field.default if field.name == "schema_version" else example(hint)


SEEDS = [(kind, example(kind)) for kind in KINDS]


def refused_or_read(read: Any) -> Any:
    try:
        return read()
    except DflashError as error:
        explained(error)
        return None


def test_every_record_has_an_example_that_is_read() -> None:
    for kind, value in SEEDS:
        assert from_json(kind, json_text(value), origin="seed") is not None  # type: ignore[type-var]


def test_any_values() -> None:
    def check(changed: Any) -> None:
        for kind, value in SEEDS:
            if isinstance(changed, dict) and len(set(changed) & set(value)) >= len(value) // 2:
                found = refused_or_read(lambda kind=kind: from_json(kind, json_text(changed), origin="fuzzed"))
                if found is not None:
                    assert from_json(kind, to_json(found), origin="again") == found

    fuzz(changed_json([value for _, value in SEEDS]), check, usual=100, share=0.25)


def test_any_bytes() -> None:
    def check(data: bytes) -> None:
        for kind, _ in SEEDS[::4]:
            refused_or_read(lambda kind=kind: from_json(kind, data, origin="fuzzed"))

    fuzz(changed_bytes([json_text(value) for _, value in SEEDS]), check, usual=60, share=0.25)


def sealed_again(value: Any) -> bytes:
    try:
        return json_text({**value, SEAL: _seal_of(value)} if isinstance(value, dict) else value)
    except ValueError:  # a number that JSON does not have
        return json_text(value)


def test_manifests_in_their_folders(tmp_path: Path) -> None:
    by_name = {kind.__name__: value for kind, value in SEEDS}  # type: ignore[union-attr]
    (tmp_path / "step-1").mkdir()

    def check(values: Any) -> None:
        (tmp_path / "manifest.json").write_bytes(sealed_again(values))
        (tmp_path / "step-1" / "manifest.json").write_bytes(json_text(values))
        store = open_store(tmp_path)
        refused_or_read(lambda: read_manifest(store, fingerprint=None, verify="full"))
        refused_or_read(lambda: load_plan(tmp_path))
        refused_or_read(lambda: verify_checkpoint(tmp_path / "step-1"))
        refused_or_read(lambda: from_sealed_json(records.UnitRecord, sealed_again(values), origin="unit"))

    seeds = [by_name["DataManifest"], by_name["PlanManifest"], by_name["CheckpointManifest"], by_name["UnitRecord"]]
    fuzz(changed_json(seeds), check, usual=50, share=0.25)


def test_ledgers(tmp_path: Path) -> None:
    lines = [json.dumps(value) for kind, value in SEEDS if kind in (records.LedgerEntry, records.RollbackEntry)]
    file = tmp_path / "ledger.jsonl"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        refused_or_read(lambda: read_ledger(file))

    fuzz(changed_bytes(["\n".join(lines * 2).encode() + b"\n"]), check, usual=50, share=0.25)
