"""Commands that start the engines: draft tokens as each counts them, and nothing that a shell would take for its own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest

from dflash.config import DrafterConfig, TargetConfig
from dflash.errors import EvaluationError
from dflash.evaluate.served_launch import ServeCommands, ServedDrafter, serve_commands, shell_line
from dflash.model.export_fields import DrafterDescription, LayoutName

HOSTILE = """runs/it's "mine"; $(touch x) `id` \\ & | > <é 1"""


def commands(
    engine: Any,
    *,
    folder: str = "runs/demo-001/export",
    layout: LayoutName = "zlab",
    target: dict[str, Any] | None = None,
    **how: Any,
) -> ServeCommands:
    config = DrafterConfig(block_size=16, target_layer_ids=(1, 16), max_position_embeddings=4096)
    description = DrafterDescription(config, 151669, 151936, 36, 128, None, ())
    settings = {"block_size": None, "max_positions": 40960, "dtype": "bfloat16", **how}
    served = TargetConfig(**{"path": "Qwen/Qwen3-8B", "mask_token_id": 151669, **(target or {})})
    return serve_commands(engine, ServedDrafter(folder, layout, description), target=served, **settings)


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize(("block_size", "drafts"), [(None, 15), (16, 15), (4, 3), (2, 1)])
def test_vllm_counts_drafts_and_sglang_the_block(block_size: int | None, drafts: int) -> None:
    vllm, sglang = (commands(engine, block_size=block_size).speculative for engine in ("vllm", "sglang"))
    assert vllm[:3] == ("vllm", "serve", "Qwen/Qwen3-8B")
    assert json.loads(option(vllm, "--speculative-config")) == {
        "method": "dflash", "model": "runs/demo-001/export", "num_speculative_tokens": drafts,
    }  # fmt: skip
    assert option(vllm, "--per-request-spec-decode-metrics") == "detailed"
    assert sglang[:5] == ("python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-8B")
    assert option(sglang, "--speculative-algorithm") == "DFLASH"
    assert option(sglang, "--speculative-draft-model-path") == "runs/demo-001/export"
    assert option(sglang, "--speculative-num-draft-tokens") == str(drafts + 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_context_and_dtype_are_those_of_target_and_drafter(engine: str) -> None:
    name = "--max-model-len" if engine == "vllm" else "--context-length"
    for positions, wanted in ((40960, "4096"), (2048, "2048"), (None, "4096")):
        made = commands(engine, max_positions=positions, dtype="float32")
        for argv in (made.speculative, made.plain):
            assert option(argv, name) == wanted and option(argv, "--dtype") == "float32"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_plain_server_is_the_same_one_without_a_drafter_on_another_port(engine: str) -> None:
    made = commands(engine, target={"revision": "abc", "trust_remote_code": True})
    assert option(made.plain, "--port") != option(made.speculative, "--port")
    assert option(made.plain, "--revision") == "abc" and "--trust-remote-code" in made.plain
    assert made.plain[:-2] == made.speculative[: len(made.plain) - 2]
    assert not any("specul" in word or "draft" in word for word in made.plain)


def test_the_notes_name_layers_and_mask_as_they_are_counted() -> None:
    for engine in ("vllm", "sglang"):
        first = commands(engine).notes[0]
        assert "decoder layers 1, 16, counted from 0" in first and "mask token 151669" in first and "15 drafts" in first


def test_sglang_is_told_what_targets_with_linear_attention_need() -> None:
    assert any("--disable-radix-cache" in note for note in commands("sglang").notes)
    assert not any("radix" in note for note in commands("vllm").notes)


def test_layouts_and_blocks_that_an_engine_cannot_use_are_refused() -> None:
    assert commands("vllm", layout="speculators").speculative
    for engine, layout in (("sglang", "speculators"), ("vllm", "transformers"), ("sglang", "transformers")):
        with pytest.raises(EvaluationError, match=f"has the {layout} layout, {engine} reads zlab"):
            commands(engine, layout=layout)  # type: ignore[arg-type]
    for size in (1, 17):
        with pytest.raises(EvaluationError, match=f"a block of {size} does not fit"):
            commands("vllm", block_size=size)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_shell_reads_every_name_as_it_stands(engine: str, tmp_path: Any) -> None:
    made = commands(engine, folder=HOSTILE, target={"path": "/models/a b"})
    line = shell_line(made.speculative)
    assert tuple(shlex.split(line.replace("\\\n", ""))) == made.speculative
    printer = f"{shlex.quote(sys.executable)} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{printer} {line}"], capture_output=True, text=True, check=True, cwd=tmp_path
    )  # fmt: skip
    assert tuple(json.loads(done.stdout)) == made.speculative
    assert not list(tmp_path.iterdir()), "nothing of it was run"


def test_a_name_that_begins_with_a_dash_is_no_option() -> None:
    made = commands("vllm", folder="-x", target={"path": "--help"}).speculative
    assert made[2] == "./--help" and json.loads(option(made, "--speculative-config"))["model"] == "./-x"
