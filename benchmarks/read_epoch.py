"""How fast an epoch of planned batches is read from local disk on one core, in the plan's order, beside Hugging Face `datasets`.

A data set with the project's length distribution is written and planned; the epoch is then read slice by slice, ours and the peer's
in turn, both pinned to one core, the files in the page cache. Both must give the same batches (a checksum is compared).
Then some batches from data sets with other row groups, by pages as the reader does it and by whole row groups as pyarrow does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.lengths import LONGEST, PEER_VARIABLE, draw_lengths, peer_python
from benchmarks.report import benchmark_parser, publish
from dflash.config.data import DataConfig, PlanConfig, ReaderConfig
from dflash.data.buckets import auto_edges
from dflash.data.columns import SampleColumns
from dflash.data.plan import BatchPlan, build_plan
from dflash.data.reader import SampleStore, read_batches
from dflash.records import PlannedBatch
from dflash.storage import open_store
from tests.support.data_sets import write_columns

NAME = "read_epoch"
VOCAB_SIZE = 150_000
PLAN = PlanConfig(tokens_per_batch=32_768, max_sequences=1024, pad_multiple_tokens=16)
READER = ReaderConfig(verify="sizes")
ROWS_PER_GROUP = int(DataConfig.model_fields["rows_per_group"].default)
OTHER_ROWS_PER_GROUP = (32, 256, 2048)
ROWS_AT_ONCE = 1000


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    samples, rounds = (10_000, 5) if arguments.quick else (120_000, 12)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        figures = _epoch(root, samples=samples, rounds=rounds)
        figures |= _row_groups(root, samples=samples // 4, batches=20 if arguments.quick else 60)
    publish(NAME, figures, arguments)
    return 0


def _epoch(root: Path, *, samples: int, rounds: int) -> dict[str, Any]:
    edges = _write(root / "set", samples=samples, rows_per_group=ROWS_PER_GROUP)
    opened_s = time.perf_counter()
    with SampleStore(root / "set", fingerprint=None, reader=READER) as store:
        opened_s = time.perf_counter() - opened_s
        plan = build_plan(store, data_fingerprint=store.manifest.fingerprint, plan=PLAN, seed=1, epochs=1)
        slices = [(len(plan) * k // rounds, len(plan) * (k + 1) // rounds) for k in range(rounds)]
        tokens = [sum(int(store.lengths[list(batch.rows)].sum()) for batch in _batches(plan, *piece)) for piece in slices]
        size_bytes = sum(shard.size_bytes for shard in store.manifest.shards)
        figures: dict[str, Any] = {
            "samples": store.rows,
            "tokens": sum(tokens),
            "batches": len(plan),
            "edges_tokens": list(edges),
            "padding_efficiency": round(plan.manifest.padding_efficiency, 4),
            "file_bytes": size_bytes,
            "file_bytes_per_token": round(size_bytes / sum(tokens), 3),
            "open_ms": round(1000 * opened_s, 1),
            "cache_mib": READER.cache_mib,
        }
        ours, theirs = [], []
        with _peer(root, store, plan) as peer:
            figures["datasets"] = peer.version if peer else f"not run: set {PEER_VARIABLE} to a Python that has `datasets`"
            anonymous = []
            for piece in slices:
                anonymous.append(_anonymous_bytes())
                ours.append(_read(store, plan, piece))
                if peer:
                    theirs.append(peer.read(piece))
                    if theirs[-1]["checksum"] != ours[-1]["checksum"]:
                        raise AssertionError(f"batches {piece} differ from the peer's")
    figures |= _rates("ours", tokens, ours)
    # Without the mapped files. The first slice fills the cache; from then on it should not grow.
    figures["memory_growth_after_first_slice_bytes"] = anonymous[-1] - anonymous[1]
    if theirs:
        figures |= _rates("datasets", tokens, theirs)
        figures |= _spread("ours_vs_datasets_cpu", [b["cpu_s"] / a["cpu_s"] for a, b in zip(ours, theirs, strict=True)])
    return figures


def _write(folder: Path, *, samples: int, rows_per_group: int) -> tuple[int, ...]:
    """A data set of drawn lengths and skewed token ids; returns its bucket edges."""
    random = np.random.default_rng(2)
    lengths = draw_lengths(samples, seed=1).astype(np.int32)
    edges = auto_edges(np.bincount(lengths, minlength=LONGEST + 1), buckets=6, pad_multiple_tokens=PLAN.pad_multiple_tokens)

    def parts() -> Iterator[tuple[SampleColumns, np.ndarray]]:
        for start in range(0, samples, ROWS_AT_ONCE):
            own = lengths[start : start + ROWS_AT_ONCE]
            spans = np.stack([own // 3, own], axis=1).astype(np.int32).ravel()
            ones = np.ones(len(own), np.int32)
            # Skewed like text, so that it compresses like token ids do (about two bytes each).
            ids = (random.random(int(own.sum()), np.float32) ** 4 * VOCAB_SIZE).astype(np.int32)
            names = [f"sample:{start + row}" for row in range(len(own))]
            columns = SampleColumns(names, ["drawn"] * len(own), ids, own, spans, ones, 2 * ones)
            yield columns, np.searchsorted(edges, own)

    write_columns(open_store(folder), parts(), edges=edges, rows_per_shard=50_000, rows_per_group=rows_per_group)
    return tuple(edges)


def _anonymous_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])


def _batches(plan: BatchPlan, first: int, last: int) -> Iterator[PlannedBatch]:
    return (plan[position] for position in range(first, last))


def _read(store: SampleStore, plan: BatchPlan, piece: tuple[int, int]) -> dict[str, Any]:
    wall_s, cpu_s, checksum = time.perf_counter(), time.process_time(), 0
    for batch in read_batches(_batches(plan, *piece), store, pad_id=0, reader=READER):
        checksum += int(batch.input_ids.sum()) + int(batch.loss_mask.sum())
    return {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s, "checksum": checksum}


class _Peer:
    """The peer's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version = self._answer()["version"]

    def read(self, piece: tuple[int, int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(piece) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer's process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _peer(root: Path, store: SampleStore, plan: BatchPlan) -> Iterator[_Peer | None]:
    python = peer_python()
    if python is None:
        yield None
        return
    batches = list(plan)
    np.savez(
        root / "plan.npz",
        rows=np.concatenate([batch.rows for batch in batches]),
        starts=np.cumsum([0, *(len(batch.rows) for batch in batches)]),
        widths=[batch.padded_length_tokens for batch in batches],
    )
    files = [str(root / "set" / shard.path) for shard in store.manifest.shards]
    (root / "files.json").write_text(json.dumps(files))
    command = [python, Path(__file__).with_name("peer_read.py"), root / "files.json", root / "plan.npz", root / "cache"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "cache")}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _Peer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _row_groups(root: Path, *, samples: int, batches: int) -> dict[str, Any]:
    """Tokens a second for other row groups, read by pages and by whole row groups."""
    figures: dict[str, Any] = {}
    for rows_per_group in OTHER_ROWS_PER_GROUP:
        folder = root / f"groups-{rows_per_group}"
        _write(folder, samples=samples, rows_per_group=rows_per_group)
        with SampleStore(folder, fingerprint=None, reader=READER) as store:
            plan = build_plan(store, data_fingerprint="", plan=PLAN, seed=1, epochs=1)
            sizes = [shard.size_bytes for shard in store.manifest.shards]
            figures[f"group_{rows_per_group}_file_bytes_per_token"] = round(sum(sizes) / int(store.lengths.sum()), 3)
            ways: dict[str, Callable[[Sequence[PlannedBatch]], object]] = {
                "pages": lambda some, store=store: list(read_batches(some, store, pad_id=0, reader=READER)),
                "row_groups": _RowGroupReader(folder, store).read,
            }
            for way, read in ways.items():
                some = list(_batches(plan, 0, batches if way == "pages" else max(1, batches // 10)))
                cpu_s = time.process_time()
                read(some)
                cpu_s = time.process_time() - cpu_s
                tokens = sum(int(store.lengths[list(batch.rows)].sum()) for batch in some)
                figures[f"group_{rows_per_group}_{way}_tokens_per_cpu_s"] = round(tokens / cpu_s)
    return figures


class _RowGroupReader:
    """The usual way: pyarrow decodes the row group of every sample (none is met twice soon enough to be worth keeping)."""

    def __init__(self, folder: Path, store: SampleStore) -> None:
        self._groups: list[tuple[pq.ParquetFile, int]] = []
        rows: list[int] = []
        for shard in store.manifest.shards:
            file = pq.ParquetFile(folder / shard.path, memory_map=True, page_checksum_verification=True)
            self._groups += [(file, group) for group in range(file.num_row_groups)]
            rows += [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._ends = np.cumsum(rows)

    def read(self, batches: Sequence[PlannedBatch]) -> None:
        for batch in batches:
            for group in np.unique(np.searchsorted(self._ends, batch.rows, side="right")).tolist():
                file, number = self._groups[group]
                file.read_row_group(number, columns=["input_ids", "loss_spans"], use_threads=False)


def _rates(name: str, tokens: Sequence[int], spent: Sequence[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for clock in ("cpu", "wall"):
        rates = [count / own[f"{clock}_s"] for count, own in zip(tokens, spent, strict=True)]
        figures |= _spread(f"{name}_tokens_per_{clock}_s", rates, digits=None)
    return figures


def _spread(name: str, values: Sequence[float], *, digits: int | None = 3) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: round(middle, digits), f"{name}_quartiles": [round(low, digits), round(high, digits)]}


if __name__ == "__main__":
    raise SystemExit(main())
