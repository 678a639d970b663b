"""`data regenerate` with the shipped target: in process and served say the same, and a kill loses and repeats nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.cli import main
from dflash.config import Config, load_config
from dflash.data.conversations import configured_conversations
from dflash.data.render import ChatRenderer
from dflash.data.served_check import probe_prompts
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.model.generate import generate_batch
from dflash.model.target import Target, load_target
from dflash.records import Conversation
from tests.support.answer_server import AnswerServer, Behaviour, Fault

ROOT = Path(__file__).parents[2]
CONVERSATIONS = 24
CONCURRENCY = 4
WAIT_S = 120.0
"""Longest wait for something that happens at once on an idle machine."""


def config_of(folder: Path, *overrides: str) -> Path:
    """A small configuration with the shipped target."""
    file = folder / "small.yaml"
    file.write_text(
        f"run: {{name: small, root: {folder / 'runs'}}}\n"
        "target: {path: demo, mask_token: '<|mask|>'}\n"
        f"data: {{num_conversations: {CONVERSATIONS}, answers: {{max_new_tokens: 20, batch_size: 5, keep_unfinished: true}}}}\n"
    )
    return file


def served_by(server: AnswerServer, *more: str) -> list[str]:
    where = f"data.answers.server={{url: '{server.url}', model: demo, concurrency: {CONCURRENCY}, backoff_s: 0.001}}"
    return ["data.answers.engine=server", where, *more]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return load_config(config_of(tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def target(config: Config) -> Target:
    torch.set_num_threads(1)
    return load_target(config.target, target_layer_ids=config.drafter.target_layer_ids, device=torch.device("cpu"))


@contextmanager
def serving(config: Config, target: Target, **behaviour: Any) -> Iterator[AnswerServer]:
    """The shipped target behind HTTP."""
    tokenizer = load_tokenizer(config.target)
    stop_ids = stop_token_ids(tokenizer, config.target)

    def write(prompt: list[int], body: dict[str, Any]) -> list[int]:
        sampling = {"temperature": body["temperature"], "seed": body.get("seed", 0), "stop_ids": stop_ids}
        [new] = generate_batch(target, [prompt], keys=["k"], max_new_tokens=body["max_tokens"], **sampling)
        return new

    models = [{"id": "demo", "root": "shipped", "max_model_len": 1024}]
    with AnswerServer(write, tokenizer, stop_ids=set(stop_ids), behaviour=Behaviour(models=models, **behaviour)) as server:
        yield server


def rows(file: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in json.loads(line).items() if key != "sampling"} for line in file.read_text().splitlines()]


def journal(folder: Path) -> dict[str, Any]:
    [file] = (folder / "runs" / "answers").glob("journal-*.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({entry["digest"] for entry in entries}) == len(entries), "no prompt is answered twice"
    return {entry["digest"]: (entry["content"], entry["tokens"], entry["finish_reason"], entry["exact"]) for entry in entries}


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the answers that the target writes in process."""
    folder = tmp_path_factory.mktemp("in-process")
    assert main(["data", "regenerate", str(config_of(folder)), "--output", str(folder / "out.jsonl")]) == 0
    return folder


@pytest.mark.parametrize("behaviour", [{}, {"style": "sglang", "keeps_stop_token": False}], ids=["vllm", "sglang"])
def test_served_answers_are_the_very_tokens_of_the_target_in_process(
    tmp_path: Path, config: Config, target: Target, in_process: Path, behaviour: dict[str, Any]
) -> None:
    output = tmp_path / "deep" / "out.jsonl"
    with serving(config, target, **behaviour) as server:
        assert main(["data", "regenerate", str(config_of(tmp_path)), *served_by(server), "--output", str(output)]) == 0
    assert rows(output) == rows(in_process / "out.jsonl")
    assert journal(tmp_path) == journal(in_process)
    stored = json.loads(output.read_text().splitlines()[0])["sampling"]
    assert stored == {"engine": "server", "model": "demo", "temperature": 0.0, "top_p": 1.0, "max_tokens": 20, "seed": None}


def test_the_file_is_read_back_as_the_conversations_that_were_answered(in_process: Path, config: Config) -> None:
    written = rows(in_process / "out.jsonl")
    overrides = ["data.source=files", f"data.files=[{in_process / 'out.jsonl'}]", "data.answers.regenerate=false"]
    again = list(configured_conversations(load_config(config_of(in_process), overrides=overrides).data))
    assert len(again) == len(written) > CONVERSATIONS // 2
    renderer = ChatRenderer(load_tokenizer(config.target), supervise="all", supervise_reasoning=True, template_flags={})
    for row, read in zip(written, again, strict=True):
        assert isinstance(read, Conversation)
        assert (read.id, read.kind) == (row["id"], row["kind"])
        assert [(message.role, message.content) for message in read.messages] == [
            (m["role"], m["content"]) for m in row["messages"]
        ]
        assert renderer.render(read.messages).supervised > 0
    assert {row["finish_reason"] for row in written} == {"stop", "length"}
    assert all(row["exact"] for row in written)


def test_the_packed_file_has_the_same_rows_and_is_the_same_every_time(in_process: Path) -> None:
    packed = [in_process / "a.jsonl.gz", in_process / "b.jsonl.gz"]
    for output in packed:
        assert main(["data", "regenerate", str(config_of(in_process)), "--output", str(output)]) == 0
    assert packed[0].read_bytes() == packed[1].read_bytes()
    overrides = ["data.source=files", f"data.files=['{packed[0]}']", "data.answers.regenerate=false"]
    assert len(list(configured_conversations(load_config(config_of(in_process), overrides=overrides).data))) == len(
        rows(in_process / "out.jsonl")
    )


class Holding:
    """A fault that holds every request from the given one on, until it is told to let go."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.reached, self.let_go = threading.Semaphore(0), threading.Event()

    def __call__(self, number: int, body: dict[str, Any]) -> Fault | None:
        if number >= self.first and not self.let_go.is_set():
            self.reached.release()
            self.let_go.wait(WAIT_S)
        return None


def test_a_kill_loses_nothing_and_repeats_only_what_was_in_flight(
    tmp_path: Path, config: Config, target: Target, in_process: Path
) -> None:
    holding = Holding(first=5 + 13)
    with serving(config, target, fault=holding) as server:
        command = [sys.executable, "-m", "dflash", "data", "regenerate", str(config_of(tmp_path)), *served_by(server)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(CONCURRENCY):
                assert holding.reached.acquire(timeout=WAIT_S)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        output = tmp_path / "runs" / "answers" / "small.jsonl"
        assert not output.exists(), "what is there is complete"
        holding.let_go.set()
        second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S)
        assert second.returncode == 0, second.stderr
        completed = Counter(server.completed)
    assert rows(output) == rows(in_process / "out.jsonl")
    assert journal(tmp_path) == journal(in_process)
    for probe in probe_prompts(load_tokenizer(config.target), {}):
        del completed[probe]
    assert len(completed) == len(journal(in_process)), "every prompt is answered"
    assert sum(count - 1 for count in completed.values()) <= CONCURRENCY
    assert re.search(r"answers: (\d+)/\1\b", second.stderr), "progress is told, up to the end"


def test_another_model_at_the_server_is_a_user_error_that_leaves_no_file(
    tmp_path: Path, config: Config, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(config, target) as server:
        server.behaviour.models[0]["id"] = "another"
        assert main(["data", "regenerate", str(config_of(tmp_path)), *served_by(server)]) == 1
    assert "serves another (shipped), the configured target is demo" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "runs" / "answers").iterdir() if path.stat().st_size} == set()


def test_a_second_process_is_told_to_wait(tmp_path: Path, config: Config, target: Target) -> None:
    holding = Holding(first=5)
    with serving(config, target, fault=holding) as server:
        codes: list[int] = []
        first = threading.Thread(
            target=lambda: codes.append(main(["data", "regenerate", str(config_of(tmp_path)), *served_by(server)]))
        )
        first.start()
        assert holding.reached.acquire(timeout=WAIT_S)
        assert main(["data", "regenerate", str(config_of(tmp_path)), *served_by(server)]) == 1
        holding.let_go.set()
        first.join(WAIT_S)
    assert codes == [0]
    assert (tmp_path / "runs" / "answers" / "small.jsonl").exists()
