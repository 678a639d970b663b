"""A GPU host that is none: commands of its own in front of the real ones, and a folder in place of `/`."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"

_NVIDIA_SMI = """#!/bin/sh
case "$*" in
  --query-gpu=*) cat "$FAKE_HOST/gpus" ;;
  "topo -m") cat "$FAKE_HOST/topo" ;;
  "topo -p2p r") cat "$FAKE_HOST/p2p" ;;
  --persistence-mode=1) sed -i 's/, Disabled, /, Enabled, /' "$FAKE_HOST/gpus"; echo "nvidia-smi $*" >>"$FAKE_HOST/done" ;;
  "") echo "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: $(cat "$FAKE_HOST/cuda")  |" ;;
  *) echo "nvidia-smi: what is $*?" >&2; exit 2 ;;
esac
"""
_PYTHON = """#!/bin/sh
case "$*" in
  -c*) cat "$FAKE_HOST/torch" ;;
  "-m pip install"*) echo "python $*" >>"$FAKE_HOST/done"; echo "2.13.0 13.0 sm_90,sm_120" >"$FAKE_HOST/torch" ;;
  "-m flows.automations") echo "python $*" >>"$FAKE_HOST/done"; echo dflash >"$FAKE_HOST/automations" ;;
  *) exit 2 ;;
esac
"""
_PREFECT = """#!/bin/sh
test -f "$FAKE_HOST/server" || exit 1
case "$*" in
  version | "work-pool ls") ;;
  "work-pool inspect "*) test -f "$FAKE_HOST/pool-$3" ;;
  "work-pool create "*) touch "$FAKE_HOST/pool-$3"; echo "prefect $* as $PREFECT_API_AUTH_STRING" >>"$FAKE_HOST/done" ;;
  "--no-prompt deploy --all") touch "$FAKE_HOST/deployed"; echo "prefect $*" >>"$FAKE_HOST/done" ;;
  "deployment inspect train/train-v2") test -f "$FAKE_HOST/deployed" ;;
  "automation ls") cat "$FAKE_HOST/automations" 2>/dev/null ;;
  *) exit 2 ;;
esac
"""
_USERADD = """#!/bin/sh
echo "useradd $*" >>"$FAKE_HOST/done"; touch "$FAKE_HOST/user"
"""
_SYSTEMCTL = """#!/bin/sh
if [ "$1" != is-enabled ]; then echo "$*" >>"$FAKE_HOST/done"; exit; fi
shift 2
for unit in "$@"; do case " $ENABLED " in *" $unit "*) exit 0 ;; esac; done
exit 1
"""
_GETENT = """#!/bin/sh
test -f "$FAKE_HOST/user" && test "$1" = passwd
"""


def topology(kinds: dict[tuple[int, int], str], count: int, *, other: str) -> str:
    """An `nvidia-smi topo -m` table: `kinds` for some pairs, `other` for the rest; two NUMA nodes, one network card."""
    names = [f"GPU{index}" for index in range(count)]
    lines = ["\t\x1b[4m" + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for row in range(count):
        cells = [" X " if row == column else kinds.get((min(row, column), max(row, column)), other) for column in range(count)]
        node = row * 2 // count
        lines.append("\t".join([names[row], *cells, "SYS", "0-31,64-95" if node == 0 else "32-63,96-127", str(node), "N/A"]))
    return "\n".join([*lines, "NIC0\t" + "SYS\t" * count + " X ", "", "Legend:", "", "  X    = Self", ""])


def peers(count: int, *, bad: tuple[int, int] | None = None) -> str:
    """An `nvidia-smi topo -p2p r` table, in which one pair may be refused."""
    names = [f"GPU{index}" for index in range(count)]
    lines = [" \t" + "\t".join(names) + "\t"]
    for row in range(count):
        cells = [
            "X" if row == column else "CNS" if (min(row, column), max(row, column)) == bad else "OK" for column in range(count)
        ]
        lines.append("\t".join([f" {names[row]}", *cells, ""]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  OK   = Status Ok", "  CNS  = Chipset not supported", ""])


@dataclass
class FakeHost:
    """Eight right cards on two sockets, a driver, a torch with CUDA, and nothing set up yet."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write the commands and what they say."""
        for name in ("bin", "venv", "root/dev/shm", "root/proc", "root/sys/class/iommu", "root/srv"):
            (self.folder / name).mkdir(parents=True)
        for place, text in {
            "bin/nvidia-smi": _NVIDIA_SMI, "bin/useradd": _USERADD, "bin/getent": _GETENT,
            "bin/systemctl": _SYSTEMCTL,
            "venv/python": _PYTHON, "venv/prefect": _PREFECT,
        }.items():  # fmt: skip
            command = self.folder / place
            command.write_text(text, encoding="utf-8")
            command.chmod(command.stat().st_mode | stat.S_IXUSR)
        (self.folder / "done").touch()
        (self.folder / "root/proc/cmdline").write_text("quiet iommu=pt\n", encoding="utf-8")
        (self.folder / "root/sys/class/iommu/ivhd0").touch()
        self.say(gpus=self.gpu_rows(8), topo=topology({(0, 1): "PHB"}, 8, other="SYS"), p2p=peers(8), cuda="13.0")
        self.say(torch="2.13.0 13.0 sm_90,sm_120\n")

    @property
    def root(self) -> Path:
        """What stands for `/`."""
        return self.folder / "root"

    @staticmethod
    def gpu_rows(
        count: int,
        *,
        name: str = CARD,
        driver: str = "580.95.05",
        persistence: str = "Enabled",
        width: str = "16",
        ecc: str = "Enabled",
    ) -> str:
        """Answer to setup's query, a line a card."""
        rest = f"[N/A], {ecc}, 16, {width}, Default"
        return "".join(f"{index}, {name}, {driver}, 97887, {persistence}, {rest}\n" for index in range(count))

    def say(self, **answers: str) -> None:
        """Set what a fake command answers from now on."""
        for name, text in answers.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    @property
    def done(self) -> str:
        """What fake commands changed."""
        return (self.folder / "done").read_text(encoding="utf-8")

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `infra/host/setup` on this host."""
        return self._run([str(ROOT / "infra/host/setup"), *arguments], self.settings)

    def enable_units(self, elsewhere: str, *, enabled: str) -> subprocess.CompletedProcess[str]:
        """Run the one part of setup that a prefix leaves out, where these units are enabled."""
        script = 'set -euo pipefail; source infra/host/common.sh; source infra/host/steps/services.sh; enable_units "$1"'
        return self._run(["bash", "-c", script, "-", elsewhere], {"ENABLED": enabled})

    def _run(self, command: list[str], settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FAKE_HOST": str(self.folder),
            "DFLASH_HOST_PREFIX": str(self.root),
            "DFLASH_BIN": str(self.folder / "venv"),
            "DFLASH_SHM_GIB": "0",
            "DFLASH_FREE_GIB": "0",
        }
        return subprocess.run(command, env=env | settings, cwd=ROOT, capture_output=True, text=True, check=False)
