"""The version of this checkout, as pyproject.toml has it. The engine knows nobody and repeats it; a test compares."""

from __future__ import annotations

import subprocess
import tomllib
from functools import cache

from console.environment import ROOT


@cache
def version() -> str:
    """For example "0.1.0"."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


@cache
def commit() -> str:
    """Short git commit of the checkout; empty where there is no git."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
