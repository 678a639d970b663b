"""`infra/host/setup` on a host that is none: what it finds, what it changes, and that it changes nothing twice."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_host import FakeHost, peers, topology


@pytest.fixture
def host() -> Iterator[FakeHost]:
    """On a disk, wherever the tests' other files are: a run folder in memory is a problem to be told."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield FakeHost(Path(folder))


def counts(said: str) -> tuple[int, int, int]:
    found = re.search(r"(\d+) fine, (\d+) (?:to be )?changed, (\d+) for a person", said)
    assert found is not None, said
    fine, changed, problems = (int(number) for number in found.groups())
    return fine, changed, problems


def files_below(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*") if path.is_file()}


def test_looking_changes_nothing_and_names_what_would_change(host: FakeHost) -> None:
    before = files_below(host.root)
    said = host.setup("--check")
    assert said.returncode == 1
    assert files_below(host.root) == before
    assert host.done == ""
    for expected in (
        "90-dflash.conf",
        "user dflash",
        "dflash-worker-train.service",
        "gpu.env",
        "/srv/dflash/runs",
        "to be changed",
    ):
        assert expected in said.stdout


def test_setting_up_twice_changes_everything_once(host: FakeHost) -> None:
    host.say(gpus=host.gpu_rows(8, persistence="Disabled"), server="")
    first = host.setup()
    assert first.returncode == 0, first.stdout + first.stderr
    assert counts(first.stdout)[1] > 20
    assert "useradd --system --user-group --home-dir /srv/dflash" in host.done
    assert host.done.count("--persistence-mode=1") == 1
    assert host.done.count("work-pool create") == 2
    assert "--no-prompt deploy --all" in host.done
    assert "flows.automations" in host.done
    made = files_below(host.root)

    second = host.setup()
    assert second.returncode == 0
    assert counts(second.stdout)[1:] == (0, 0), second.stdout
    assert files_below(host.root) == made
    assert host.done.count("useradd") == 1
    assert host.setup("--check").returncode == 0


def test_secrets_are_for_root_and_reach_prefect_by_the_environment(host: FakeHost) -> None:
    host.say(server="")
    host.setup("--only", "services", "--only", "prefect")
    server, client = host.root / "etc/dflash/server.env", host.root / "etc/dflash/client.env"
    assert server.stat().st_mode & 0o777 == 0o600
    assert client.stat().st_mode & 0o007 == 0
    secret = re.search(r"^PREFECT_API_AUTH_STRING=(.+)$", client.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert secret is not None
    assert f"as {secret.group(1)}" in host.done
    assert "DB_PASSWORD" not in client.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("step", "answers", "expected"),
    [
        ("gpu", {"gpus": FakeHost.gpu_rows(7)}, "7 GPUs, not 8"),
        ("gpu", {"gpus": FakeHost.gpu_rows(8, name="NVIDIA H200")}, "other cards: 0: NVIDIA H200"),
        ("gpu", {"gpus": FakeHost.gpu_rows(8, driver="570.86.10")}, "driver 570.86.10 is older than 580.65"),
        ("gpu", {"gpus": FakeHost.gpu_rows(8, width="8")}, "PCIe lanes missing: 0: x8 of x16"),
        ("python", {"torch": "2.13.0 12.6 sm_80,sm_90\n"}, "no kernels for sm_120, only sm_80,sm_90"),
        ("python", {"cuda": "12.8"}, "the driver runs CUDA 12.8, torch was built for 13.0"),
        ("topology", {"p2p": peers(8, bad=(2, 5))}, "no direct copies: GPU2-GPU5 CNS"),
    ],
)
def test_what_a_person_must_see_to_is_said_with_a_remedy(host: FakeHost, step: str, answers: dict[str, str], expected: str) -> None:
    host.say(**answers)
    said = host.setup("--check", "--only", step)
    assert said.returncode == 1
    assert expected in said.stdout
    position = said.stdout.splitlines().index(next(line for line in said.stdout.splitlines() if expected in line))
    assert said.stdout.splitlines()[position + 1].strip().startswith("->")


def test_cards_without_error_correction_are_worth_a_note(host: FakeHost) -> None:
    host.say(gpus=host.gpu_rows(8, ecc="Disabled"))
    said = host.setup("--check", "--only", "gpu")
    assert "ECC is off for GPU 0 1 2 3 4 5 6 7" in said.stdout
    assert said.returncode == 0


def test_a_newer_driver_is_new_enough_by_number_and_not_by_letter(host: FakeHost) -> None:
    host.say(gpus=host.gpu_rows(8, driver="1000.5"))
    assert "ok       gpu        driver 1000.5" in host.setup("--check", "--only", "gpu").stdout


def test_without_a_driver_nothing_breaks(host: FakeHost) -> None:
    host.say(server="")
    (host.folder / "bin/nvidia-smi").unlink()
    said = host.setup("--check")
    assert "nvidia-smi is not there" in said.stdout
    assert counts(said.stdout)[2] == 1
    assert said.stderr == ""


def test_the_torch_of_another_build_is_replaced_by_the_pinned_one_with_cuda(host: FakeHost) -> None:
    host.say(torch="2.13.0 none none\n")
    said = host.setup("--only", "python")
    assert "torch 2.13.0 with CUDA, in place of torch 2.13.0 (CUDA none)" in said.stdout
    assert "--index-url https://download.pytorch.org/whl/cu130 torch==2.13.0" in host.done
    assert counts(host.setup("--only", "python").stdout)[1:] == (0, 0)


def gpu_env(host: FakeHost) -> str:
    host.setup("--only", "topology")
    return (host.root / "etc/dflash/gpu.env").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("pairs", "other", "level"), [({}, "SYS", "SYS"), ({(0, 1): "PXB"}, "NODE", "PHB"), ({}, "PHB", "PHB"), ({}, "PIX", "PXB")]
)
def test_direct_copies_reach_as_far_as_the_farthest_pair(
    host: FakeHost, pairs: dict[tuple[int, int], str], other: str, level: str
) -> None:
    host.say(topo=topology(pairs, 8, other=other))
    assert f"NCCL_P2P_LEVEL={level}\n" in gpu_env(host)


@pytest.mark.parametrize(("command_line", "direct"), [("quiet", False), ("quiet iommu=pt", True), ("amd_iommu=off", True)])
def test_an_iommu_that_translates_forbids_direct_copies(host: FakeHost, command_line: str, direct: bool) -> None:
    (host.root / "proc/cmdline").write_text(f"{command_line}\n", encoding="utf-8")
    assert ("NCCL_P2P_DISABLE=1" in gpu_env(host)) is not direct


def test_one_refused_pair_forbids_direct_copies_and_no_infiniband_is_searched(host: FakeHost) -> None:
    host.say(p2p=peers(8, bad=(0, 7)))
    written = gpu_env(host)
    assert "NCCL_P2P_DISABLE=1" in written
    assert "NCCL_P2P_LEVEL" not in written
    assert "NCCL_IB_DISABLE=1" in written
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in written
    (host.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "NCCL_IB_DISABLE" not in gpu_env(host)


def test_the_matrix_is_read_whole_with_its_network_cards_and_numa_nodes(host: FakeHost) -> None:
    host.say(topo=topology({(0, 1): "PIX", (2, 3): "PIX"}, 4, other="NODE"), p2p=peers(4), gpus=host.gpu_rows(4))
    said = host.setup("--check", "--only", "topology").stdout
    assert "4 pairs NODE, 2 pairs PIX" in said
    assert "NUMA node 0: GPU 0 1; NUMA node 1: GPU 2 3" in said


def test_an_update_that_needs_more_settings_adds_them_and_keeps_the_secrets(host: FakeHost) -> None:
    host.setup("--only", "services")
    server = host.root / "etc/dflash/server.env"
    before = server.read_text(encoding="utf-8")
    server.write_text(re.sub(r"^AWS_DEFAULT_REGION=.*\n", "", before, flags=re.MULTILINE), encoding="utf-8")
    assert "change   services   secrets" in host.setup("--check", "--only", "services").stdout
    assert "changed  services   secrets" in host.setup("--only", "services").stdout
    assert server.read_text(encoding="utf-8") == before


def test_databases_on_another_host_are_left_to_it(host: FakeHost) -> None:
    host.setup("--only", "services")
    server = host.root / "etc/dflash/server.env"
    own = server.read_text(encoding="utf-8")
    server.write_text(own.replace("DFLASH_DB_HOST=127.0.0.1", "DFLASH_DB_HOST=db.example.org"), encoding="utf-8")
    assert "databases are on db.example.org" in host.setup("--check", "--only", "services").stdout


def test_where_the_servers_are_elsewhere_only_workers_are_set_up(host: FakeHost) -> None:
    client = host.root / "etc/dflash/client.env"
    client.parent.mkdir(parents=True)
    client.write_text("PREFECT_API_AUTH_STRING=a:b\n", encoding="utf-8")
    for _ in range(2):
        said = host.setup("--only", "services")
        assert "the servers are elsewhere" in said.stdout
        assert "databases" not in said.stdout
    assert counts(said.stdout)[1] == 0
    assert client.read_text(encoding="utf-8") == "PREFECT_API_AUTH_STRING=a:b\n"
    assert not (client.parent / "server.env").exists()
    units = {path.name for path in (host.root / "etc/systemd/system").iterdir()}
    assert units == {
        "dflash.target",
        *(f"dflash-{name}.service" for name in ("gpu", "worker-train", "worker-health", "health-served")),
    }


@pytest.mark.parametrize(
    ("enabled", "elsewhere", "missing"),
    [
        ("", "", "dflash.target dflash-backup.timer dflash-worker-health.service"),
        ("", "yes", "dflash.target dflash-worker-health.service"),
        ("dflash.target", "", "dflash-worker-health.service"),  # set up before health checks were enabled by themselves
        ("dflash.target dflash-worker-health.service", "", None),
        ("dflash.target dflash-health-served.service", "", None),
    ],
)
def test_what_is_not_enabled_is_and_the_health_checks_that_were_chosen_stay(
    host: FakeHost, enabled: str, elsewhere: str, missing: str | None
) -> None:
    said = host.enable_units(elsewhere, enabled=enabled)
    assert said.returncode == 0, said.stderr
    assert host.done.splitlines() == ["daemon-reload", *([f"enable --now {missing}"] if missing else [])]


def test_places_and_user_of_this_host_stand_in_the_units(host: FakeHost) -> None:
    host.settings = {"DFLASH_USER": "trainer", "DFLASH_HOME": "/data/dflash"}
    host.setup("--only", "services")
    unit = (host.root / "etc/systemd/system/dflash-worker-train.service").read_text(encoding="utf-8")
    assert "User=trainer" in unit
    assert "HOME=/data/dflash " in unit
    assert f"ExecStart={host.folder}/venv/prefect worker start" in unit
    assert "/opt/dflash-pipeline" not in unit
    assert "/srv/dflash" not in unit


def test_a_folder_in_the_way_of_a_link_is_left_alone(host: FakeHost) -> None:
    checkout = Path(__file__).parents[3]
    (Path(str(host.root) + str(checkout)) / "runs").mkdir(parents=True)
    said = host.setup("--only", "folders")
    assert "runs is there already" in said.stdout
    assert (Path(str(host.root) + str(checkout)) / "runs").is_dir()


def test_unknown_steps_and_options_are_refused(host: FakeHost) -> None:
    assert host.setup("--only", "everything").returncode == 2
    assert host.setup("--force").returncode == 2
    assert host.done == ""
