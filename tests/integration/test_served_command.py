"""`evaluate RUN --engine` and `--print-serve-command`: a run, its export, and a server that runs both."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dflash.cli import main
from dflash.errors import EXIT_NOT_LOSSLESS, EXIT_USER_ERROR
from dflash.evaluate.candidates import drafter_candidate
from dflash.model.export import import_drafter
from dflash.stages import EvaluationBench, Run, evaluate_stage, open_bench
from dflash.stages.export import export_stage
from tests.support.answer_server import Behaviour
from tests.support.engine_server import Engine, EngineServer
from tests.support.probe_run import build_probe_run, save_drafter

torch.set_num_threads(1)
SETTINGS = ("evaluate.num_prompts=3", "evaluate.max_new_tokens=8", "evaluate.server.max_retries=0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = build_probe_run(tmp_path_factory.mktemp("served"), overrides=SETTINGS)
    save_drafter(run, 10)
    export_stage(run.paths.root, output=run.paths.export_dir, layout="zlab", dtype=None)
    return run


@pytest.fixture(scope="module")
def bench(run: Run) -> EvaluationBench:
    return open_bench(run)


def server(run: Run, bench: EvaluationBench, *, plain: bool = False, **engine: Any) -> EngineServer:
    """What an engine does with the folder that the run exported."""
    published = import_drafter(run.paths.export_dir, tables=None)
    candidate = drafter_candidate(
        bench.target,
        published.drafter.eval(),
        block_size=None,
        mask_token_id=published.description.mask_token_id,
        label="",
        step=None,
    )
    from dflash.data.tokenizer import load_tokenizer

    models = [{"id": run.config.target.location, "max_model_len": 512}]
    runs = Engine(bench.target, None if plain else candidate.proposer, **engine)
    return EngineServer(
        runs, load_tokenizer(run.config.target), stop_ids=set(bench.stop_ids), behaviour=Behaviour(models=models)
    )  # fmt: skip


def test_a_served_export_is_worth_what_the_checkpoint_is(
    run: Run, bench: EvaluationBench, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = evaluate_stage(run, bench, which="trained", progress=lambda *_: None)
    with server(run, bench) as drafting, server(run, bench, plain=True) as plain:
        assert (
            main(["evaluate", str(run.paths.root), "--engine", "vllm", "--url", drafting.root, "--plain-url", plain.url, "--json"])
            == 0
        )
    found = json.loads(capsys.readouterr().out)
    assert found["drafter"] == "vllm" and found["lossless"] is True and found["differing_prompts"] == 0
    for name in ("acceptance_length", "verifications", "drafted", "committed_tokens", "dataset", "prompts", "block_size"):
        assert found[name] == getattr(wanted, name)
    folder = run.paths.eval_dir / "vllm"
    assert json.loads((folder / "result.json").read_text()) == found
    rows = pq.read_table(folder / "verifications.parquet")
    assert rows.num_rows == wanted.verifications
    evidence = json.loads((folder / "evidence.json").read_text())
    assert (evidence["account_of_each"], evidence["account_from"]) == ("verification", "replies")
    assert [json.loads(line)["equals_plain"] for line in (folder / "prompts.jsonl").read_text().splitlines()] == [True] * 3
    assert {path.name for path in folder.glob("*.png")} >= {"acceptance_per_position.png", "acceptance_by_context.png"}


def test_what_is_absent_is_shown_as_absent_and_leaves_no_file_of_before(
    run: Run, bench: EvaluationBench, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(run, bench, accounts="none") as drafting:
        assert main(["evaluate", str(run.paths.root), "--engine", "vllm", "--url", drafting.url]) == 0
    said = capsys.readouterr().out
    assert "acceptance length 1.0" in said and "no interval" in said
    folder = run.paths.eval_dir / "vllm"
    result = json.loads((folder / "result.json").read_text())
    assert result["lossless"] is None and result["acceptance_ci"] is None and result["acceptance_length"] >= 1
    assert not (folder / "verifications.parquet").exists() and not (folder / "acceptance_by_context.png").exists()
    assert (folder / "acceptance_per_position.png").is_file()


def test_another_answer_ends_with_the_exit_code_of_lossy_decoding_unless_it_is_a_near_tie(
    run: Run, bench: EvaluationBench, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(run.paths.root), "--engine", "vllm"]
    with server(run, bench) as drafting, server(run, bench, plain=True) as plain:
        honest = plain.complete

        def lying(body: dict[str, Any]) -> dict[str, Any]:
            reply = honest(body)
            if body["max_tokens"] == 8:
                reply["choices"][0]["token_ids"][1] ^= 1
            return reply

        plain.complete = lying  # type: ignore[method-assign]
        where = ["--url", drafting.url, "--plain-url", plain.url]
        assert main([*command, *where]) == EXIT_NOT_LOSSLESS
        assert "near-ties was not judged" in capsys.readouterr().err
        own = (run.paths.eval_dir / "vllm" / "result.json").read_bytes()
        # The answers of the speculating server are the target's own: whatever plain decoding said instead, they are excused.
        assert main([*command, *where, "--set", "evaluate.server.judge_differences=true", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["lossless"], found["differing_prompts"], found["near_tie_prompts"]) == (True, 3, 3)
    assert (run.paths.eval_dir / "vllm" / "result.json").read_bytes() == own, "other settings of one call lie beside it"
    (beside,) = run.paths.eval_dir.glob("vllm-with-*/result.json")
    assert json.loads(beside.read_text()) == found


@pytest.mark.parametrize(
    "arguments", [["--engine", "vllm"], ["--url", "http://127.0.0.1:1"], ["--plain-url", "http://127.0.0.1:1"]]
)
def test_half_an_address_is_refused(run: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run.paths.root), *arguments]) == EXIT_USER_ERROR
    assert "--engine and --url together" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_commands_name_the_export_and_count_as_the_engine_does(
    run: Run, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run.paths.root), "--print-serve-command", engine]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    both = [shlex.split(part.replace("\\\n", " ")) for part in "\n".join(lines).split("\n\n")]
    assert main(["evaluate", str(run.paths.root), "--print-serve-command", engine, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert both == [told["speculative"], told["plain"]]
    assert str(run.paths.export_dir) in text and run.config.target.location in text
    block = run.config.drafter.block_size
    if engine == "vllm":
        settings = json.loads(both[0][both[0].index("--speculative-config") + 1])
        assert settings["num_speculative_tokens"] == block - 1
        assert both[0][both[0].index("--dtype") + 1] == "float32"
    else:
        assert both[0][both[0].index("--speculative-num-draft-tokens") + 1] == str(block)
    assert not any("speculative" in word for word in both[1])


def test_a_run_without_an_export_says_how_to_make_one(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "bare-001"
    copy.mkdir()
    (copy / "config.yaml").write_bytes(run.paths.config.read_bytes())
    assert main(["evaluate", str(copy), "--print-serve-command", "vllm"]) == EXIT_USER_ERROR
    assert f"python -m dflash export {copy}" in capsys.readouterr().err
