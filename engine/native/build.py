"""Builds the library once per source, compiler and instruction set, checks it, and keeps it.

NativeUnavailable
├── CompilerTooSlow    it would be as slow for the next target, so none is tried
└── raised with what is missing or wrong; the engine then serves on the plain path and says so
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
LINK = ("-shared", "-fPIC", "-pthread")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "bmi2", "f16c")
TARGETS: dict[str, tuple[str, ...]] = {
    "amx-int8": (*_AVX512, "avx512_bf16", "amx_tile", "amx_int8"),
    "avx512-vnni-bf16": (*_AVX512, "avx512_bf16"),
    "avx512-vnni": _AVX512,
    "avx-vnni": ("avx2", "avx_vnni", "fma", "bmi2", "f16c"),
    "avx2": ("avx2", "fma", "bmi2", "f16c"),
}
"""What each target needs of the CPU, best first, in the names of /proc/cpuinfo."""
BUILD_SECONDS = 180.0
CHECK_SECONDS = 120.0


class NativeUnavailable(Exception):
    """The library cannot be had here; the message says why and what would help."""


class CompilerTooSlow(NativeUnavailable):
    """The compiler did not end in time."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library that was built and checked on this machine, and why better targets were passed over."""

    path: Path
    passed_over: tuple[str, ...] = ()


def find_library() -> Library:
    """The best library that this machine can build and that passes its check. Raises NativeUnavailable."""
    targets = choose_targets(cpu_flags())
    compiler = find_compiler()
    failed: list[str] = []
    for target in targets:
        stem = f"fanlight-{target}-{_key(compiler, target)}"
        try:
            return Library(_kept(stem) or _build(compiler, target, stem), tuple(failed))
        except CompilerTooSlow:
            raise
        except NativeUnavailable as error:
            failed.append(f"{target}: {error}")
    raise NativeUnavailable("; ".join(failed))


def choose_targets(flags: Iterable[str]) -> list[str]:
    """The targets whose needs the CPU meets, best first. Raises NativeUnavailable where there is none."""
    have = set(flags)
    targets = [target for target, needs in TARGETS.items() if have.issuperset(needs)]
    if not targets:
        raise NativeUnavailable("this CPU has no AVX2 with FMA")
    return targets


def cpu_flags() -> set[str]:
    """Instruction sets of the first CPU; empty where /proc/cpuinfo does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def find_compiler() -> list[str]:
    """The C++ compiler as a command, from CXX or the path. Raises NativeUnavailable."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NativeUnavailable(f"CXX cannot be read: {error}") from error
    if named:
        if shutil.which(named[0]) is None:
            raise NativeUnavailable(f"CXX names {named[0]!r}, which is not there")
        return named
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise NativeUnavailable("there is no C++ compiler (install g++ or clang++, or set CXX)")


def cache_folder() -> Path:
    """Where built libraries are kept: FANLIGHT_NATIVE_CACHE, or the user's cache. Raises NativeUnavailable."""
    try:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fanlight" / "native"
    except RuntimeError as error:
        raise NativeUnavailable("there is no home folder to keep it in; set FANLIGHT_NATIVE_CACHE") from error
    folder = Path(os.environ.get("FANLIGHT_NATIVE_CACHE") or default)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise NativeUnavailable(f"{folder} cannot be made: {error}") from error
    status = folder.stat()
    # A library is code: one that somebody else could have put there is not loaded.
    if status.st_uid != os.geteuid():
        raise NativeUnavailable(f"{folder} belongs to another user; set FANLIGHT_NATIVE_CACHE")
    if status.st_mode & 0o022:
        raise NativeUnavailable(
            f"others may write to {folder}; take that away (chmod go-w), or set FANLIGHT_NATIVE_CACHE"
        )
    return folder


def _key(compiler: list[str], target: str) -> str:
    digest = hashlib.sha256(" ".join((*compiler, target, *FLAGS, *LINK)).encode())
    digest.update(_run([*compiler, "--version"], 10.0, "the compiler").encode())
    for source in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(compiler: list[str], target: str, path: Path, *extra: str) -> None:
    """Compile the sources for a target, with extra compiler options. Raises NativeUnavailable."""
    options = [f"-m{_option(need)}" for need in TARGETS[target]]
    source = str(SOURCES / "forward.cpp")
    command = [*compiler, *FLAGS, *options, *extra, "-Wno-psabi", source, *LINK, "-o", str(path)]
    _run(command, BUILD_SECONDS, "compiling the fused path", CompilerTooSlow)


def _option(flag: str) -> str:
    """The compiler's name of a CPU flag."""
    if flag.startswith("amx_"):
        return flag.replace("_", "-")
    return flag.replace("_", "") if flag.startswith("avx") else flag


def check_command(path: Path) -> list[str]:
    """Runs a library on a small model, in a process of its own: a wrong instruction ends that, not the engine."""
    return [sys.executable, "-m", "engine.native.check", str(path)]


def _kept(stem: str) -> Path | None:
    """The library as it was built, or None. Its name ends with its hash: a damaged one would crash the engine."""
    try:
        paths = sorted(cache_folder().glob(f"{stem}-*.so"))
        return next((path for path in paths if path.stem == f"{stem}-{_digest(path.read_bytes())}"), None)
    except OSError:
        return None


def _build(compiler: list[str], target: str, stem: str) -> Path:
    """Compile beside the final name, check, then move into place."""
    place = cache_folder()
    try:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            built = Path(folder) / "fanlight.so"
            compile_library(compiler, target, built)
            _run(check_command(built), CHECK_SECONDS, "checking the built library")
            return built.rename(place / f"{stem}-{_digest(built.read_bytes())}.so")
    except OSError as error:
        raise NativeUnavailable(f"{place} cannot be written: {error}; set FANLIGHT_NATIVE_CACHE") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _run(command: list[str], seconds: float, what: str, late: type[NativeUnavailable] = NativeUnavailable) -> str:
    root = str(SOURCES.parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment, errors="replace", check=False
        )
    except subprocess.TimeoutExpired as error:
        raise late(f"{what} took longer than {seconds:g} s") from error
    except OSError as error:
        raise NativeUnavailable(f"{what} failed: {error}") from error
    if done.returncode != 0:
        tail = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise NativeUnavailable(f"{what} ended with status {done.returncode}: {tail}")
    return done.stdout
