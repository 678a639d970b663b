"""Test files beside the unit tests that take whole parts together: their tests are marked `component`.

`make test-unit` leaves them out, so that it ends while one waits; `make test` runs everything. No test asserts times, so nothing
refuses a slow newcomer that is not named here, but `make test-unit` ends with its five slowest tests.
"""

from __future__ import annotations

MODELS = frozenset({
    "test_batched_evaluation", "test_decode", "test_decode_batch", "test_decode_edges", "test_decode_refill",
    "test_doctor_alignment", "test_doctor_command", "test_doctor_table", "test_evaluate_run", "test_export_oracle", "test_flex",
    "test_generate", "test_gguf_target", "test_guard", "test_health_stage", "test_judge", "test_lossless", "test_overfit",
    "test_probe", "test_probe_stage", "test_publish", "test_rivals", "test_shipped_target", "test_summary", "test_sweep",
    "test_sweep_stage", "test_target_cache", "test_training", "test_training_agrees",
})  # fmt: skip
"""They train a drafter or decode whole answers."""

PROCESSES = frozenset({
    "test_builders_interleaved", "test_export_killed", "test_gpu_check", "test_infra_compose", "test_infra_host",
    "test_infra_services", "test_infra_shell", "test_killed_builds", "test_pool", "test_release_content", "test_release_test",
    "test_units",
})  # fmt: skip
"""They start, and kill, other processes."""

DATABASES = frozenset({"test_health_command", "test_history", "test_register", "test_store"})
"""They fill a database of MLflow's."""

COMPONENTS = MODELS | PROCESSES | DATABASES
