"""Rules of the house that no tool holds by itself."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from django.core.management import get_commands

import engine
from console.version import version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
DOCUMENTS = [name for name in TRACKED if name.endswith(".md")]
PACKAGES = "engine|serving|console|static|docs|tests|bench|deploy"


def test_one_version_everywhere() -> None:
    releases = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert engine.__version__ == releases[0] == version()


def test_the_changelog_names_every_command() -> None:
    ours = {name for name, app in get_commands().items() if app == "console.base"}
    named = set(re.findall(r"`([a-z_]+)`", (ROOT / "CHANGELOG.md").read_text()))
    assert ours <= named


def test_the_console_may_import_no_other_module_of_serving() -> None:
    """The contract lists what is forbidden, so a new module must be put there."""
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    (door,) = (c for c in contracts if "serving.asgi" in c.get("forbidden_modules", ()))
    there = {f"serving.{path.stem}" for path in (ROOT / "serving").iterdir() if not path.name.startswith("__")}
    assert set(door["forbidden_modules"]) == there - {"serving.port", "serving.apikey"}


def test_no_path_of_a_developers_machine_is_tracked() -> None:
    found = subprocess.run(
        ["git", "grep", "-InE", r"(^|[^a-z.])/(work|farm|root|home/[a-z]+)/"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout == ""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_files_and_commands_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []
    paths = re.findall(rf"`((?:{PACKAGES})/[\w/.-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    if name != "CHANGELOG.md":  # it also tells what was
        assert set(re.findall(r"`manage\.py ([a-z_]+)", text)) <= set(get_commands())


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 200


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "docs" / "decisions" / "0004-dependencies.md").read_text()
    names = {re.split(r"[<>=\[;]", line)[0] for line in PROJECT["project"]["dependencies"]}
    told = set(re.findall(r"[a-z][\w-]+", text))
    assert {name for name in names if not name.startswith("opentelemetry-")} <= told
    assert {path.name.split("-")[0] for path in (ROOT / "static" / "vendor").iterdir()} <= told


def test_decisions_are_numbered_without_a_hole() -> None:
    files = sorted(path.name for path in (ROOT / "docs" / "decisions").iterdir())
    assert [name[:5] for name in files] == [f"{n:04d}-" for n in range(1, len(files) + 1)]
    for name in files:
        assert (ROOT / "docs" / "decisions" / name).read_text().startswith(f"# {name[:4]} ")
