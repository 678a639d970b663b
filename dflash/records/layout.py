"""Names inside a run's folder: pure paths, no I/O. Everything a person needs there is a plain file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where everything of one run lies.

    Attributes:
        root: the run's folder, `<run.root>/<run.name>`.
    """

    root: Path

    @property
    def config(self) -> Path:
        """Resolved configuration."""
        return self.root / "config.yaml"

    @property
    def data_pointer(self) -> Path:
        """JSON that names the data set's folder and fingerprint."""
        return self.root / "data.json"

    @property
    def reused(self) -> Path:
        """JSON list of what stages found unchanged and took over."""
        return self.root / "reused.json"

    @property
    def plan_dir(self) -> Path:
        """Batch plan: arrays (`epoch-NNNN.<name>.npy`) and `manifest.json`."""
        return self.root / "plan"

    @property
    def log(self) -> Path:
        """Training log, the truth of what happened."""
        return self.root / "train_log.jsonl"

    @property
    def trainer_output(self) -> Path:
        """Standard output and error of torchrun and its ranks."""
        return self.root / "trainer.out"

    @property
    def control_dir(self) -> Path:
        """Requests to the supervisor, acknowledgements, heartbeat, lock and recorded pids."""
        return self.root / "control"

    @property
    def requests_dir(self) -> Path:
        """One `<key>.json` a request; `<key>.ack.json` beside it once executed."""
        return self.control_dir / "requests"

    @property
    def heartbeat(self) -> Path:
        """Written by the supervisor: `{pid, start_time, boot_id, at, mono}`; `mono` is compared within a boot, `at` else."""
        return self.control_dir / "heartbeat.json"

    @property
    def lock(self) -> Path:
        """Held (flock) by the one live supervisor."""
        return self.control_dir / "lock"

    @property
    def trainer_pids(self) -> Path:
        """Pids and start times of torchrun and its ranks, for reaping."""
        return self.control_dir / "pids.json"

    @property
    def trainer_exit(self) -> Path:
        """How the trainer process ended, written by itself; absent if it died."""
        return self.control_dir / "trainer_exit.json"

    @property
    def attempts_dir(self) -> Path:
        """Flow runs that worked on the run: one `<flow-run>.json` each, `<flow-run>.end.json` beside it once it has ended."""
        return self.control_dir / "attempts"

    @property
    def changes(self) -> Path:
        """Append-only: changes of the training's configuration that a person has accepted; absent without any."""
        return self.control_dir / "changes.jsonl"

    @property
    def launch(self) -> Path:
        """The supervisor's newest start of a trainer, which the other machines of a run follow."""
        return self.control_dir / "launch.json"

    @property
    def planted_fault(self) -> Path:
        """The fault that a drill plants in this run; absent in every other run."""
        return self.control_dir / "planted_fault.json"

    @property
    def planted_log(self) -> Path:
        """One line each time that the fault took effect."""
        return self.control_dir / "planted.jsonl"

    @property
    def health_dir(self) -> Path:
        """`state.json`, `report.json`, `report.html`, `decisions/`."""
        return self.root / "health"

    @property
    def checkpoints_dir(self) -> Path:
        """`step-N/` folders."""
        return self.root / "checkpoints"

    @property
    def ledger(self) -> Path:
        """Append-only transitions of checkpoints."""
        return self.checkpoints_dir / "ledger.jsonl"

    @property
    def probe_dir(self) -> Path:
        """Acceptance probes of durable checkpoints."""
        return self.root / "probe"

    @property
    def probes(self) -> Path:
        """Append-only results of the probes, written by the one probing process."""
        return self.probe_dir / "probes.jsonl"

    @property
    def probe_lock(self) -> Path:
        """Held (flock) by the one probing process."""
        return self.probe_dir / "lock"

    @property
    def probe_output(self) -> Path:
        """Standard output and error of the probing process."""
        return self.probe_dir / "probe.out"

    @property
    def eval_dir(self) -> Path:
        """Evaluation results."""
        return self.root / "eval"

    @property
    def export_dir(self) -> Path:
        """Exported drafter."""
        return self.root / "export"

    @property
    def summary(self) -> Path:
        """Closing table."""
        return self.root / "summary.json"

    @property
    def tracking_state(self) -> Path:
        """MLflow run id and the offset of the log forwarded so far."""
        return self.root / "tracking.json"

    def checkpoint(self, step: int) -> Path:
        """Folder of the state after `step` updates."""
        return self.checkpoints_dir / f"step-{step}"
