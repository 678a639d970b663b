"""`make gpu-check`: every check whose path exists on a CPU passes there, and what is wrong or hangs is a row and no more."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import attention, head, replica, setting, step, transfers
from benchmarks.gpu.apart import Job, Row, flat_figures, run_job, run_jobs, table
from benchmarks.gpu.setting import Setting, WrongError
from benchmarks.gpu.shapes import fullest, published, random_features, useful_flops
from benchmarks.gpu_check import CHECKS, run_check
from dflash.model.attention import BlockLayout, Visibility
from dflash.model.backends import ChunkedAttention
from dflash.train.footprint import BatchShape, batch_shapes
from dflash.train.memory import TargetShape, plan_memory
from dflash.train.transfer import Staged

CPU = torch.device("cpu")
SLOW = {"decoding", "compiled", "published_step", "resumed_run"}
"""Seconds each; `make gpu-check CHECK="--device cpu --tiny"` runs them, too."""
NEEDS_CUDA = {"replica_memory"}


@pytest.mark.parametrize(
    "check", [pytest.param(c, id=c.function, marks=[pytest.mark.full] if c.function in SLOW else []) for c in CHECKS]
)
def test_every_check_runs_on_a_cpu_or_says_why_not(check: gpu_check.Check, tmp_path: Path) -> None:
    state, figures, message = run_check(check, device="cpu", tiny=True, folder=tmp_path)
    if check.function in NEEDS_CUDA:
        assert (state, figures) == ("skipped", {})
        assert message.startswith("CUDA only: ")
    else:
        assert (state, message) == ("ok", "")
        assert figures
        json.dumps(figures, allow_nan=False)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.function)
def test_every_check_exists_and_tells_its_question(check: gpu_check.Check) -> None:
    function = getattr(importlib.import_module(f"benchmarks.gpu.{check.module}"), check.function)
    assert function.__doc__
    assert 0 < check.limit_s < gpu_check.BUDGET_S


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


WRITES = "import json, sys; json.dump({'state': 'ok', 'figures': {'n': 1}, 'message': ''}, open(sys.argv[1], 'w'))"
ENVIRONMENT = dict(os.environ)


def test_a_check_that_hangs_is_a_failed_row_and_nothing_of_it_lives_on(tmp_path: Path) -> None:
    note = tmp_path / "child"  # a shell, because a Python beside two others may take longer to start than the job may run
    code = 'sleep 600 & echo $! > "$0"; echo on my way; wait'
    begin_s = time.monotonic()
    row = run_job(Job("hangs", ["sh", "-c", code, str(note)], 3.0, alone=False), environment=ENVIRONMENT, limit_s=3.0)
    assert time.monotonic() - begin_s < 60
    assert row.state == "FAILED"
    assert row.message.splitlines() == ["still running after 3 s: it hangs or is too slow", "on my way"]
    state = Path(f"/proc/{note.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"


def test_a_process_that_dies_shows_its_last_words() -> None:
    code = "import os, sys; print('about to fall', file=sys.stderr, flush=True); os.abort()"
    row = run_job(Job("dies", python(code), 30.0, alone=False), environment=ENVIRONMENT, limit_s=30.0)
    assert row.state == "FAILED"
    assert row.message.startswith("ended with code -6 and without a result")
    assert "about to fall" in row.message


def test_the_others_go_on_those_that_measure_come_last_and_what_has_no_time_left_is_not_run() -> None:
    jobs = [
        Job("measures", python(WRITES), 30.0, alone=True),
        Job("fails", python("raise SystemExit(3)"), 30.0, alone=False),
        Job("works", python(WRITES), 30.0, alone=False),
    ]
    seen: list[str] = []
    rows = run_jobs(jobs, environment=ENVIRONMENT, lanes=2, budget_s=60.0, on_row=lambda row: seen.append(row.name))
    assert [(row.name, row.state, row.bad) for row in rows] == [
        ("measures", "ok", False), ("fails", "FAILED", True), ("works", "ok", False),
    ]  # fmt: skip
    assert seen[-1] == "measures"
    (late,) = run_jobs(jobs[:1], environment=ENVIRONMENT, lanes=1, budget_s=0.0, on_row=lambda _row: None)
    assert (late.state, late.bad) == ("not run", True)


def test_a_failing_check_is_reported_with_the_end_of_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "screening_pays", lambda _weight: 1 / 0)
    (check,) = (check for check in CHECKS if check.function == "screened_head")
    state, figures, message = run_check(check, device="cpu", tiny=True, folder=tmp_path)
    assert (state, figures) == ("FAILED", {})
    assert message.startswith("ZeroDivisionError: division by zero")
    assert "head.py" in message
    assert "screened_head" in message


def test_without_a_gpu_it_skips_in_one_line_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu-check skipped: no CUDA device here (torch ")
    assert gpu_check.main(["--json"]) == 0
    assert "no CUDA device" in json.loads(capsys.readouterr().out)["skipped"]


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "no_such_package"))
    assert gpu_check.main([]) == 2
    assert "no_such_package not installed" in capsys.readouterr().out


def test_the_script_runs_its_checks_in_processes_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / "rows.json"
    assert gpu_check.main(["--device", "cpu", "--tiny", "--only", "device_figures", "--output", str(wanted)]) == 0
    written = json.loads(wanted.read_text())
    assert [(row["name"], row["state"]) for row in written["rows"]] == [("device_figures", "ok")]
    assert written["figures"]["device_figures"] == "ok"
    assert written["figures"]["device_figures.matmul_tflops"] > 0
    assert "1 of 1 checks have nothing to report" in capsys.readouterr().out


def test_the_table_shows_states_figures_and_reasons() -> None:
    rows = [
        Row("good", "ok", 1.25, {"rate_gb_per_s": 12.3456}),
        Row("bad", "FAILED", 2.0, message="WrongError: off by 3\nhead.py:7"),
    ]
    text = table(rows)
    assert "rate_gb_per_s" in text
    assert "12.35" in text
    assert "WrongError: off by 3" in text
    assert "    head.py:7" in text
    assert flat_figures(rows) == {"good": "ok", "good.rate_gb_per_s": 12.3456, "bad": "FAILED"}


@pytest.fixture
def tiny(tmp_path: Path) -> Setting:
    return Setting(CPU, tiny=True, folder=tmp_path)


class TestWhatIsWrongIsNoticed:
    """Each check against a planted fault: one that cannot fail checks nothing."""

    def test_a_mask_that_sees_one_token_too_many(self, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = ChunkedAttention.plan

        def shifted(self: ChunkedAttention, layout: BlockLayout, *, visibility: Visibility, dtype: torch.dtype) -> Any:
            return plan(self, layout._replace(anchors=layout.anchors + 1), visibility=visibility, dtype=dtype)

        monkeypatch.setattr(ChunkedAttention, "plan", shifted)
        with pytest.raises(WrongError, match="chunked_float32 is off by"):
            attention.attention_agreement(tiny)

    def test_a_head_whose_gradient_forgets_the_label(self, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = head.label_rows
        monkeypatch.setattr(
            head, "label_rows", lambda *call, **more: rows(*call, **more)._replace(pull=rows(*call, **more).pull * 1.01)
        )
        with pytest.raises(WrongError, match="pull of plain_float32"):
            head.head_agreement(tiny)

    def test_a_courier_that_loses_bytes(self, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        carry = Staged.carry
        monkeypatch.setattr(Staged, "carry", lambda self, tensor, *, after: carry(self, tensor, after=after).mul(tensor[0] != 0.25))
        monkeypatch.setattr(transfers, "arrives", lambda *_: True)
        monkeypatch.setattr(Setting, "normal", lambda *_, **__: torch.full((100,), 0.25))
        with pytest.raises(WrongError, match="arrived changed"):
            transfers.staging(tiny)

    def test_a_snapshot_that_the_next_update_reaches(self, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        from dflash.checkpoint import CheckpointWriter

        snapshot = CheckpointWriter._snapshot

        def early(self: CheckpointWriter, buffers: Any) -> None:
            snapshot(self, buffers)
            for group in buffers.values():
                for buffer in group.values():
                    buffer.add_(100)

        monkeypatch.setattr(CheckpointWriter, "_snapshot", early)
        with pytest.raises(WrongError, match="holds 101, not 1"):
            transfers.checkpoint_blocked(tiny)

    def test_a_pipeline_that_trains_on_other_features(self, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        pipelined = replica._Replica.pipelined
        monkeypatch.setattr(replica._Replica, "pipelined", lambda self: [2 * loss for loss in pipelined(self)])
        with pytest.raises(WrongError, match="differ from those in turns"):
            replica.replica_overlap(tiny)

    def test_a_recomputed_layer_that_differs(self, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        real = step.gradients

        def wrong(drafter: Any, *call: Any, **more: Any) -> Any:
            found = real(drafter, *call, **more)
            return [tensor * 1.1 for tensor in found] if drafter.recompute_layers else found

        monkeypatch.setattr(step, "gradients", wrong)
        with pytest.raises(WrongError, match="recomputed layers are off"):
            step.recompute(tiny)


def test_the_full_sizes_make_valid_configurations_that_fit_one_gpu(tmp_path: Path) -> None:
    """The toys pass above; what the GPU is given must at least parse, fit together and have a memory plan."""
    config, shape = step.middle(tiny=False)
    assert shape.blocks <= config.train.anchors.max_per_batch
    whole = published(tiny=False)
    assert fullest(whole) == BatchShape(sequences=1, length_tokens=4096, anchors=512, blocks=512)
    assert 40e9 < step.planned_step_bytes(whole, fullest(whole)) < 60e9
    pair = replica.configuration(folder=tmp_path, device="cuda", tiny=False)
    sizes = replica.SIZES[False]
    assert pair.cluster.devices_needed == 1
    last_tap = pair.drafter.target_layer_ids[-1]
    assert replica.target_config(tiny=False).num_hidden_layers - 1 > last_tap
    (longest,) = {shape.length_tokens for shape in batch_shapes(pair)}
    assert fullest(pair) == BatchShape(sizes["rows"], longest, sizes["anchors"], sizes["rows"] * sizes["anchors"])
    plan = plan_memory(pair, TargetShape(pair.drafter.hidden_size, sizes["layers"], sizes["vocabulary"], 800_000_000, "test"))
    assert plan.places[0].total_bytes < 40e9
    assert attention.published_heads(tiny=False).sliding_window == 2048


def test_overlap_counts_what_both_do_at_once() -> None:
    assert replica.overlapped([(0.0, 2.0), (3.0, 4.0)], [(1.0, 3.5)]) == pytest.approx(1.5)
    assert replica.overlapped([(0.0, 1.0)], [(1.0, 2.0)]) == 0.0


def test_useful_operations_are_six_a_weight_and_slot_and_the_head_twice() -> None:
    """By hand: slots through the layers forward and back, the context's projections, two products with the head."""
    toy = published(tiny=True)
    batch = random_features(Setting(CPU, tiny=True, folder=Path()), toy, fullest(toy), seed=0)
    drafter, slots, tokens = toy.drafter, int(batch.anchors.keep.sum()) * 4, 64
    layer = 32 * (2 * 64 + 2 * 32 + 3 * 48)
    seen = [float(batch.anchors.positions.clamp(max=most).double().mean()) + 4 for most in (20, 64)]
    wanted = 2 * (3 * slots * layer + 3 * tokens * 32 * 2 * 32) + sum(3 * slots * one * 2 * 64 for one in seen)
    wanted += 2 * int(batch.labels.valid.sum()) * 32 * 300 + 2 * tokens * 2 * 32 * 32
    assert len(drafter.resolved_layer_types) == 2
    assert useful_flops(toy, batch) == pytest.approx(2 * wanted)


def test_relative_differences_are_taken_in_float64() -> None:
    assert setting.relative(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0.0
    assert setting.relative(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
