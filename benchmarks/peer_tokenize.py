"""The peer of `tokenize_throughput.py`: Hugging Face `datasets` tokenizes the same chats; run by its own interpreter.

As its users do it: load the JSON lines, `map` in batches a function that renders the chat template (compiled once) and
encodes, sort by length, write Parquet. It keeps ids and lengths only: no loss mask, no checks, no buckets.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import jinja2
from tokenizers import Tokenizer


def main() -> int:
    """`peer_tokenize.py CHATS.jsonl TOKENIZER_FOLDER OUT` prints one JSON object."""
    corpus, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file = folder / "chat_template.jinja"
    source = file.read_text() if file.is_file() else json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)  # noqa: S701 - no HTML

    def encode(batch: dict[str, list[object]]) -> dict[str, list[object]]:
        texts = [template.render(messages=messages) for messages in batch["messages"]]
        ids = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
        return {"input_ids": ids, "length": [len(each) for each in ids]}

    began = time.process_time()
    data = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=str(out / "cache"))
    rows = data.map(encode, batched=True, batch_size=64, remove_columns=["messages"])
    rows.sort("length").to_parquet(str(out / "rows.parquet"))
    cpu_s = time.process_time() - began
    texts = [template.render(messages=messages) for messages in data["messages"]]
    began = time.process_time()
    for start in range(0, len(texts), 64):
        for each in tokenizer.encode_batch(texts[start : start + 64], add_special_tokens=False):
            _ = each.ids
    raw_s = time.process_time() - began
    status = Path("/proc/self/status").read_text()  # `ru_maxrss` would begin with what the parent had at the fork
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"version": datasets.__version__, "cpu_s": cpu_s, "raw_cpu_s": raw_s, "peak_rss_mib": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
