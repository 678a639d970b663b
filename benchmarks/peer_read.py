"""The peer of `read_epoch.py`: Hugging Face `datasets` reads and collates the same batches; run by its own interpreter.

It gets the same Parquet files (which it turns into its memory-mapped Arrow cache first, not timed) and the same batches, takes the
rows of a batch in the `numpy` format, and pads them like ours. It waits for slices of the plan on standard input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import datasets
import numpy as np


def main() -> None:
    """`peer_read.py FILES.json PLAN.npz CACHE_DIR` answers each line `[first, last]` with one JSON object."""
    files, plan, cache = json.loads(Path(sys.argv[1]).read_text()), np.load(sys.argv[2]), sys.argv[3]
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_parquet(files, cache_dir=cache).select_columns(["input_ids", "loss_spans"]).with_format("numpy")
    print(json.dumps({"version": datasets.__version__, "rows": len(rows)}), flush=True)
    for line in sys.stdin:
        first, last = json.loads(line)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        checksum = 0
        for batch in range(first, last):
            wanted = plan["rows"][plan["starts"][batch] : plan["starts"][batch + 1]]
            ids, mask = collate(rows[wanted.tolist()], int(plan["widths"][batch]))
            checksum += int(ids.sum()) + int(mask.sum())
        spent = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
        print(json.dumps({**spent, "checksum": checksum}), flush=True)


def collate(samples: dict[str, list[np.ndarray]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """[B, width] ids and mask."""
    ids = np.zeros((len(samples["input_ids"]), width), np.int64)
    mask = np.zeros(ids.shape, np.bool_)
    for row, (own, spans) in enumerate(zip(samples["input_ids"], samples["loss_spans"], strict=True)):
        ids[row, : len(own)] = own
        for start, end in np.asarray(spans).reshape(-1, 2).tolist():
            mask[row, start:end] = True
    return ids, mask


if __name__ == "__main__":
    main()
