"""What is released: one version everywhere, a licence for every dependency, a hash for every pin, a wheel with everything in it."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest

from dflash.config.tree import CONFIG_SCHEMA_VERSION
from dflash.records.checkpoint import CHECKPOINT_SCHEMA_VERSION
from dflash.records.data import DATA_SCHEMA_VERSION, PLAN_SCHEMA_VERSION
from dflash.records.health import HEALTH_SCHEMA_VERSION
from dflash.records.log import LOG_SCHEMA_VERSION
from dflash.records.result import RESULT_SCHEMA_VERSION
from release import hashes, licences

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("dflash", "prefect_dflash")


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of the sources: a build leaves files in the folder that it builds from."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder / "dist"), str(source)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (each for each in archive.namelist() if each.endswith(f".dist-info/{name}"))
        return archive.read(found).decode()


def test_the_wheel_holds_both_packages_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert archive.testzip() is None
    sources = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in sources if "__pycache__" not in path.parts}
    assert names == wanted
    assert {"dflash/py.typed", "dflash/demo/target/model.safetensors", "dflash/demo/target/chat_template.jinja"} <= names
    recorded = {row[0] for row in csv.reader(io.StringIO(read(wheel, "RECORD")))}
    assert names <= recorded


def test_the_wheel_gives_the_command_and_the_plugin(wheel: Path) -> None:
    points = EntryPoints(EntryPoints._from_text_for(read(wheel, "entry_points.txt"), None))  # type: ignore[attr-defined]
    (command,) = points.select(group="console_scripts")
    (plugin,) = points.select(group="prefect.plugins")
    assert (command.name, plugin.name) == ("dflash", "dflash")
    assert callable(command.load())
    assert callable(plugin.load().setup_environment)


def test_the_wheel_says_what_the_project_says(wheel: Path) -> None:
    about: Any = message_from_string(read(wheel, "METADATA"))
    assert (about["Name"], about["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == PROJECT["requires-python"]
    asked = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(asked) == len(PROJECT["dependencies"])
    assert "Apache License" in read(wheel, "licenses/LICENSE")


def test_the_changelog_leads_to_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    released = [heading.split()[0] for heading in headings if heading != "Unreleased"]
    assert headings[0] == "Unreleased" or released[0] == PROJECT["version"]
    numbers = [tuple(map(int, version.split("."))) for version in released]
    assert numbers == sorted(set(numbers), reverse=True), "the newest first, each once"
    assert not numbers or numbers[0] <= tuple(map(int, PROJECT["version"].split(".")))


def test_the_changelog_tells_the_schema_versions_of_this_code() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"^- Schema versions: ([^.]*)\.", text, flags=re.MULTILINE)
    versions = {
        "configuration": CONFIG_SCHEMA_VERSION,
        "data": DATA_SCHEMA_VERSION,
        "plan": PLAN_SCHEMA_VERSION,
        "log": LOG_SCHEMA_VERSION,
        "checkpoint": CHECKPOINT_SCHEMA_VERSION,
        "health": HEALTH_SCHEMA_VERSION,
        "result": RESULT_SCHEMA_VERSION,
    }
    assert told == ", ".join(f"{kind} {version}" for kind, version in versions.items())


def test_the_licences_page_is_what_the_installed_packages_declare() -> None:
    assert licences.PAGE.read_text(encoding="utf-8") == licences.page(), "run `python -m release.licences`"
    pytest.importorskip("importlib_metadata")  # once it is imported it finds the packages, with its own kind of message
    assert licences.PAGE.read_text(encoding="utf-8") == licences.page()


def test_every_direct_dependency_is_pinned_and_an_unknown_licence_stops() -> None:
    pins = hashes.pinned(hashes.CONSTRAINTS.read_text(encoding="utf-8"))
    names = {name for group in licences.direct().values() for name in group}
    assert len(names) >= 30
    assert names - set(pins) <= hashes.LEFT_OUT
    with pytest.raises(SystemExit, match="look at it"):
        licences.licence_of(message_from_string("Name: x\nLicense: Proprietary\n\n"))


def read_lock(text: str) -> dict[str, tuple[str, str]]:
    """Name to (version, SHA-256) of a lock, which holds nothing else."""
    lines = [re.fullmatch(r"([a-z0-9][a-z0-9._-]*)==(\S+) --hash=sha256:([0-9a-f]{64})", line) for line in text.splitlines()[1:]]
    assert all(lines), "run `make lock`"
    return {line[1]: (line[2], line[3]) for line in lines if line is not None}


def test_the_lock_has_one_hash_for_every_pin() -> None:
    locked = read_lock(hashes.LOCK.read_text(encoding="utf-8"))
    pins = hashes.pinned(hashes.CONSTRAINTS.read_text(encoding="utf-8"))
    assert {name: version for name, (version, _) in locked.items()} == pins, "run `make lock`"
    assert len({sha256 for _, sha256 in locked.values()}) == len(locked)


def report_of(name: str, version: str, **archive: Any) -> dict[str, Any]:
    url = f"https://index/{name}-{version}-py3-none-any.whl"
    return {"install": [{"metadata": {"name": name, "version": version}, "download_info": {"url": url, "archive_info": archive}}]}


def test_a_lock_is_only_made_of_wheels_with_hashes() -> None:
    good = report_of("A.b", "1", hashes={"sha256": "0" * 64})
    assert read_lock(hashes.lock_text(good, {"a-b": "1"})) == {"a-b": ("1", "0" * 64)}
    for report, pins in ((report_of("a", "1"), {"a": "1"}), (good, {"a-b": "2"}), (good, {"a-b": "1", "c": "1"})):
        with pytest.raises(SystemExit, match="index in use"):
            hashes.lock_text(report, pins)


def call(*command: object, folder: Path) -> str:
    """Run a program away from the checkout, in an environment of its own."""
    done = subprocess.run([*map(str, command)], cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}, capture_output=True,
                          text=True, timeout=1500, check=False)  # fmt: skip
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


PLUGIN = """
from importlib.metadata import entry_points
print([point.load().__file__ for point in entry_points(group="prefect.plugins", name="dflash")])
"""


def works(place: Path) -> None:
    """An environment has the command, the demo's target and the plugin, all of them from its own packages."""
    own = str(place / "lib")
    assert "commands" in call(place / "bin" / "dflash", "--help", folder=place)
    assert "tracking.uri" in call(place / "bin" / "dflash", "config", "reference", folder=place)
    assert own in call(place / "bin" / "python", "-c", "import dflash.demo as d; print(d.__file__)", folder=place)
    assert own in call(place / "bin" / "python", "-c", PLUGIN, folder=place)


@pytest.mark.full
def test_the_wheel_works_in_an_environment_where_only_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, seen through a path: no download."""
    place = tmp_path / "venv"
    call(sys.executable, "-m", "venv", place, folder=tmp_path)
    call(place / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel, folder=tmp_path)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    works(place)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_wheel_works_in_an_empty_environment_with_what_it_asks_for(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    call(sys.executable, "-m", "venv", place, folder=tmp_path)
    pip = (place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    call(*pip, "torch==2.13.0", folder=tmp_path)
    call(*pip, "--constraint", ROOT / "constraints.txt", wheel, folder=tmp_path)
    call(place / "bin" / "python", "-m", "pip", "check", folder=tmp_path)
    works(place)
