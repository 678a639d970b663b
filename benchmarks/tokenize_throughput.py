"""What a data set costs beyond tokenization: tokens/s of a whole build of one file on one core, beside the raw tokenizer.

Raw is `tokenizers` encoding the very texts that the build renders, in batches, ids taken. The build reads and parses JSON
lines, renders the chat template, finds the loss spans, proves the ids, hashes prompts, deals samples out to six buckets and
writes Parquet. Both in one process, alternately, by process CPU time, without the tokenizer's own threads.
Then: the peak memory of builds of 10 thousand and of a million (short) chats, each in a process of its own; and builds that are
killed (SIGKILL) at random moments, over and over in one folder, until what they leave is compared with an undisturbed build.
The tokenizer is SmolLM2's if `python -m dflash data fetch-target smollm2` has fetched it, else the shipped one.
Beside it, on the same file: Hugging Face `datasets` (JSON, map, sort by length, Parquet; ids only, no loss mask); it is no
dependency: the environment variable `DFLASH_BENCH_DATASETS_PYTHON` names an interpreter that has it, with `tokenizers` and
`jinja2`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from benchmarks.chat_corpus import write_chats
from benchmarks.lengths import PEER_VARIABLE, peer_python
from benchmarks.report import RESULTS, ROOT, benchmark_parser, publish
from benchmarks.tokenize_build import EDGES, SMOLLM2, build_config
from dflash.data.formats import read_raw_batches
from dflash.data.prepare import load_data, plan_build
from dflash.data.tokenize import make_renderer
from dflash.data.tokenizer import load_tokenizer
from dflash.data.units import build_unit

NAME = "tokenize_throughput"


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--only", choices=("throughput", "memory", "kills"), help="measure this part, keep the others as stored")
    arguments = parser.parse_args()
    quick, only = arguments.quick, arguments.only
    figures = _stored() if only else {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if only in (None, "throughput"):
            figures |= _show(_throughput(folder, parts=1 if quick else 4, chats=400 if quick else 1000, rounds=3 if quick else 6))
        if only in (None, "memory"):
            for count in (1000, 4000) if quick else (10_000, 1_000_000):
                figures |= _show(_memory(folder / str(count), count, workers=1))
            figures |= _show(_memory(folder / "two", 1000 if quick else 100_000, workers=2))
        if only in (None, "kills"):
            figures |= _show(_kills(folder / "kills", kills=2 if quick else 20))
    publish(NAME, figures, arguments)
    return 0


def _stored() -> dict[str, Any]:
    """Figures of the last full run; none if there is none."""
    file = RESULTS / f"{NAME}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["figures"]) if file.is_file() else {}


def _show(figures: dict[str, Any]) -> dict[str, Any]:
    """Say on standard error what is known already: the whole takes a quarter of an hour."""
    print(figures, file=sys.stderr, flush=True)
    return figures


def _throughput(folder: Path, *, parts: int, chats: int, rounds: int) -> dict[str, Any]:
    """Some small files and a larger one, each encoded and built in turn: what else the machine does weighs on both of a pair.

    A file has a fixed cost (its record, its buckets' shards, their syncs), which the small ones show and the larger one hides.
    """
    target = str(SMOLLM2) if SMOLLM2.is_dir() else "demo"
    files = [folder / f"{part}.jsonl" for part in range(parts)]
    sizes_bytes = [write_chats(file, count=chats, mean_turns=2, mean_characters=700, seed=part) for part, file in enumerate(files)]
    config = build_config(folder / "warm", [str(files[0])], workers=1, measured=False, target=target)
    tokenizer = load_tokenizer(config.target)
    texts = [_texts(config, tokenizer, file) for file in files]
    _pair(folder / "warm", files[0], texts[0], tokenizer, target)  # caches of the tokenizer, late imports
    pairs = [
        _pair(folder / f"run-{number}-{part}", file, texts[part], tokenizer, target)
        for number in range(rounds)
        for part, file in enumerate(files)
    ]
    tokens = sum(pair.tokens for pair in pairs)
    raw_s, build_s = sum(pair.raw_s for pair in pairs), sum(pair.build_s for pair in pairs)
    one = folder / "one.jsonl"
    one_bytes = write_chats(one, count=5 * chats, mean_turns=2, mean_characters=700, seed=parts)
    one_texts = _texts(config, tokenizer, one)
    in_one = [_pair(folder / f"one-{number}", one, one_texts, tokenizer, target) for number in range(max(2, rounds))]
    figures: dict[str, Any] = {
        "tokenizer": "SmolLM2" if target != "demo" else "shipped",
        "chats": parts * chats,
        "pairs": len(pairs),
        "tokens_per_sample": round(tokens / (rounds * parts * chats)),
        "corpus_mb": round(sum(sizes_bytes) / 1e6, 1),
        "raw_tokens_per_s": round(tokens / raw_s),
        "build_tokens_per_s": round(tokens / build_s),
        "file_mb": round(sizes_bytes[0] / 1e6, 1),
        **_ratios("build_of_raw", pairs),
        "one_file_mb": round(one_bytes / 1e6, 1),
        **_ratios("one_file_build_of_raw", in_one),
    }
    return figures | _peer(files[0], target, folder)


def _ratios(name: str, pairs: list[_Pair]) -> dict[str, Any]:
    """Raw time over build time of pairs: median and quartiles."""
    ratios = sorted(pair.raw_s / pair.build_s for pair in pairs)
    quarter = len(ratios) // 4
    return {
        name: round(statistics.median(ratios), 3),
        f"{name}_quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
    }


@dataclass(frozen=True, slots=True)
class _Pair:
    raw_s: float
    build_s: float
    tokens: int


def _pair(folder: Path, file: Path, texts: list[list[str]], tokenizer: Any, target: str) -> _Pair:
    """The same file by the raw tokenizer and as a build, in process CPU time."""
    gc.freeze()  # as the build does: a full collection of what the imports made would fall into one side or the other by chance
    began = time.process_time()
    tokens = sum(
        len(each.ids) for batch in texts for each in tokenizer.backend_tokenizer.encode_batch(batch, add_special_tokens=False)
    )
    raw_s = time.process_time() - began
    gc.unfreeze()
    config = build_config(folder, [str(file)], workers=1, measured=False, target=target)
    job, units = plan_build(
        config, tokenizer=tokenizer, vocab_size=len(tokenizer), target_fingerprint="none", progress=lambda *_: None
    )
    began = time.process_time()
    record = build_unit(units[0], job=job, edges=EDGES, tokenizer=tokenizer, answerer=None, progress=lambda *_: None)
    build_s = time.process_time() - began
    shutil.rmtree(folder)
    built = sum(bucket.tokens for bucket in record.buckets)
    if built != tokens:
        raise RuntimeError(f"the build has {built} tokens, the texts have {tokens}: this compares different work")
    return _Pair(raw_s, build_s, tokens)


def _texts(config: Any, tokenizer: Any, corpus: Path) -> list[list[str]]:
    """The texts that the build renders, in its batches."""
    template = tokenizer.apply_chat_template
    make_renderer(tokenizer, config.data)  # a template that cannot be used is refused before anything is measured
    batches = []
    for raw in read_raw_batches(str(corpus), rows_per_batch=64):
        rows = [json.loads(row)["messages"] for row in raw.rows if isinstance(row, bytes)]
        batches.append([template(messages, tokenize=False) for messages in rows])
    return batches


def _peer(corpus: Path, target: str, folder: Path) -> dict[str, Any]:
    python = peer_python()
    if python is None:
        return {"peer": f"absent: set {PEER_VARIABLE}"}
    location = ROOT / "dflash/demo/target" if target == "demo" else Path(target)
    command = [python, str(ROOT / "benchmarks/peer_tokenize.py"), str(corpus), str(location.resolve()), str(folder / "peer")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    peer = json.loads(done.stdout.splitlines()[-1])
    return {
        "datasets_version": peer["version"],
        "datasets_of_raw": round(peer["raw_cpu_s"] / peer["cpu_s"], 3),
        "datasets_peak_rss_mib": round(peer["peak_rss_mib"]),
    }


def _memory(folder: Path, count: int, *, workers: int) -> dict[str, Any]:
    folder.mkdir()
    corpus = folder / "chats.jsonl"
    write_chats(corpus, count=count, mean_turns=1, mean_characters=60, seed=2)
    began = time.monotonic()
    built = _finished(_start(folder / "out", workers, "given", [str(corpus)]))
    wall_s = time.monotonic() - began
    shutil.rmtree(folder)
    name = f"{count}_chats" + (f"_{workers}_workers" if workers > 1 else "")
    figures = {f"peak_rss_mib_{name}": round(built["peak_rss_mib"]), f"wall_s_{name}": round(wall_s, 1)}
    return figures | ({f"peak_rss_mib_{name}_each": round(built["peak_rss_worker_mib"])} if workers > 1 else {})


def _kills(folder: Path, *, kills: int) -> dict[str, Any]:
    """Builds of four files with measured edges, killed at random moments of the time that an undisturbed one takes."""
    folder.mkdir()
    files = []
    for number in range(4):
        files.append(str(folder / f"{number}.jsonl"))
        write_chats(Path(files[-1]), count=800 + 100 * number, mean_turns=1, mean_characters=120, seed=10 + number)
    process = _start(folder / "golden", 1, "auto", files)
    _wait_ready(process)
    began = time.monotonic()
    done = _finished(process)
    duration_s = time.monotonic() - began
    golden = _content(done["location"], done["fingerprint"])
    choose = random.Random(3)
    landed = finished = wrong = committed = 0
    place = folder / "killed-0"
    while landed < kills:
        process = _start(place, 1, "auto", files)
        _wait_ready(process)
        time.sleep(choose.uniform(0, duration_s))
        process.kill()
        output, _ = process.communicate()
        through = "location" in output
        landed, finished = landed + (not through), finished + through
        for location in (path.parent for path in place.glob("data/*/manifests")):
            for manifest in location.glob("manifests/*.json"):
                committed += 1
                wrong += _content(str(location), json.loads(manifest.read_text())["fingerprint"]) != golden
        if through:
            place = folder / f"killed-{finished}"
    last = _finished(_start(place, 1, "auto", files))
    equal = _content(last["location"], last["fingerprint"]) == golden
    return {
        "kills": landed,
        "kills_manifests_found": committed,
        "kills_manifests_wrong": wrong,
        "kills_end_equal": bool(equal),
        "kills_undisturbed_s": round(duration_s, 2),
    }


def _start(folder: Path, workers: int, edges: str, files: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.tokenize_build", str(folder), str(workers), edges, *files]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError("the build did not begin")


def _finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the build ended with {process.returncode}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _content(location: str, fingerprint: str) -> dict[str, str]:
    """The manifest and every file it lists, by hash; a data set that does not verify in full is an error."""
    manifest = load_data(location, fingerprint=fingerprint, verify="full").manifest
    files = (*manifest.shards, *manifest.prompt_files, *manifest.quarantine_files)
    own = Path(location, "manifests", f"{fingerprint[:16]}.json").read_text(encoding="utf-8")
    return {"manifest": own, **{file.path: file.sha256 for file in files}}


if __name__ == "__main__":
    sys.exit(main())
