#!/usr/bin/env bash
# Write requirements.lock (what serving needs) and requirements-dev.lock (what tests need besides) from .venv/.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python - <<'PY'
"""Walk the dependencies of pyproject.toml through what is installed, and pin every name reached."""
import tomllib
from importlib import metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

project = tomllib.load(open("pyproject.toml", "rb"))


def closure(requirements):
    found, queue = {}, [Requirement(text) for text in requirements]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        new = extras - found.get(name, set())
        if name in found and not new:
            continue
        found.setdefault(name, set()).update(extras | {""})
        for text in metadata.requires(name) or []:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                inner.marker = None
                queue.append(inner)
    return set(found)


def write(path, names, title):
    lines = [f"# {title} Written by deploy/lock.sh; do not edit."]
    lines += sorted(f"{name}=={metadata.version(name).partition('+')[0]}" for name in names)
    open(path, "w").write("\n".join(lines) + "\n")


base = closure(project["project"]["dependencies"]) | {"pip", "setuptools"}
write("requirements.lock", base, "What serving needs, pinned.")
dev = closure(project["dependency-groups"]["dev"]) - base
write("requirements-dev.lock", dev, "What tests need besides, pinned.")
PY
wc -l requirements.lock requirements-dev.lock
