"""Files of a data set that nothing names: what killed builds and replaced versions left. They never matter; they cost space.

Invariant: whatever a manifest or a unit's record names is kept, and so are all manifests and records.
"""

from __future__ import annotations

from dflash.data.manifest import EDGES_FILE
from dflash.data.put import SCRATCH_FOLDER
from dflash.data.units import STAGING
from dflash.errors import DataError
from dflash.records import DataManifest, UnitRecord, from_sealed_json
from dflash.storage import Store


def find_orphans(store: Store) -> list[str]:
    """Names of files that nothing names.

    Args:
        store: a data set's folder. Files of a build that runs now are orphans until their record is there.

    Raises:
        DataError: the folder is no data set, or a manifest or record cannot be read (then nothing can be told).
    """
    names = list(store.names(""))
    if not any(name.startswith(("manifests/", "units/", STAGING)) or name == EDGES_FILE for name in names):
        raise DataError(f"{store.uri} holds no data set", remedy="give the folder that `data prepare` names")
    kept: set[str] = set()
    for name in names:
        if not name.endswith(".json"):
            continue
        if name.startswith("manifests/"):
            manifest = from_sealed_json(DataManifest, store.read(name), origin=f"{store.uri}/{name}")
            kept.update(shard.path for shard in manifest.shards)
            kept.update(file.path for file in (*manifest.prompt_files, *manifest.quarantine_files))
        elif name.startswith(("units/", f"{STAGING}/units/")):
            record = from_sealed_json(UnitRecord, store.read(name), origin=f"{store.uri}/{name}")
            folder = f"{STAGING}/" if name.startswith(STAGING) else ""
            kept.update(f"{folder}{path}" for path in (record.prompts.path, record.quarantine.path))
            kept.update(f"{folder}{shard.path}" for shard in record.shards)
    candidates = ("bucket=", "units/", f"{STAGING}/", SCRATCH_FOLDER)
    return [name for name in names if name.startswith(candidates) and name not in kept and not _is_record(name)]


def _is_record(name: str) -> bool:
    return name.endswith(".json") and name.startswith(("units/", f"{STAGING}/units/"))
