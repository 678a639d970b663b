"""One build of the data benchmarks in a process of its own; prints `ready` before it begins and one JSON object at the end.

`python -m benchmarks.tokenize_build FOLDER WORKERS EDGES FILE...`: FOLDER receives the data set.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from dflash.config import Config
from dflash.data.prepare import prepare_data
from dflash.data.tokenizer import load_tokenizer

LONGEST = 8192
EDGES = (512, 1024, 2048, 3072, 4096, LONGEST)
SMOLLM2 = Path(".cache/targets/smollm2-135m-instruct")


def build_config(folder: Path, files: list[str], *, workers: int, measured: bool, target: str) -> Config:
    """A configuration that tokenizes some files for `target`."""
    mask_token = "<|mask|>" if target == "demo" else "<repo_name>"
    return Config.model_validate(
        {
            "run": {"root": str(folder)},
            "target": {"path": target, "mask_token": mask_token},
            "drafter": {"max_position_embeddings": 2 * LONGEST},
            "plan": {"tokens_per_batch": 4 * LONGEST},
            "data": {
                "source": "files",
                "files": files,
                "answers": {"regenerate": False},
                "max_length_tokens": LONGEST,
                "bucket_edges_tokens": "auto" if measured else EDGES,
                "workers": workers,
                "rows_per_shard": 10_000,
            },
        }
    )


def main() -> int:
    """Build; see the module."""
    folder, workers, edges, files = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    config = build_config(folder, files, workers=workers, measured=edges == "auto", target="demo")
    tokenizer = load_tokenizer(config.target)
    print("ready", flush=True)
    data = prepare_data(
        config, tokenizer=tokenizer, vocab_size=len(tokenizer), target_fingerprint="none", answerer=None, progress=lambda *_: None
    )
    # `ru_maxrss` would begin with what the parent had at the fork; for the workers that is this process: an upper bound.
    peak_mib = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    worker_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    usage = {"peak_rss_mib": peak_mib, "peak_rss_worker_mib": worker_mib}
    counts = {"samples": data.manifest.samples, "tokens": data.manifest.tokens}
    print(json.dumps({"location": data.location, "fingerprint": data.fingerprint, **counts, **usage}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
