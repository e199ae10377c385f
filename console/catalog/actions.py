"""Put models and runtimes into the catalog and take them out again. The work itself is done by jobs.py."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction

from console.audit.actions import Actor, record
from console.base.fields import Check, checked, text
from console.catalog import facts, runtimes, sources
from console.catalog.models import Model, Runtime
from console.catalog.sources import BUNDLED, SourceError, WheelSource
from console.errors import NotAllowed, Refused

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXTRA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?(==[A-Za-z0-9.!+_-]+)?")
FREE = "fleet.free_arguments"
"""The permission that new runtimes need, as free-form arguments do: both decide what code runs."""


def _source(value: Any) -> str:
    try:
        sources.parse(value if isinstance(value, str) else "")
    except SourceError as error:
        raise ValueError(f"cannot be used. {error}".rstrip(".")) from None
    if not str(value).isprintable():
        raise ValueError("must hold printable characters only")
    return str(value).strip()


def _sha256(value: Any) -> str:
    found = value.strip().lower() if isinstance(value, str) else None
    if found is None or (found and not _SHA256.fullmatch(found)):
        raise ValueError("must be 64 hexadecimal digits")
    return found


MODEL_CHECKS: Mapping[str, Check] = {"source": _source, "sha256": _sha256, "licence": text(64, 0)}


@transaction.atomic
def register_fetched(actor: Actor, source: WheelSource, path: Path) -> Model:
    """Record a fetched and checked model, or bring the row that is there up to date. Idempotent."""
    existing = Model.objects.filter(name=source.name).first()
    known = existing is not None and existing.path == str(path) and existing.sha256 == source.file_sha256
    if existing is not None and known and existing.weights_bytes:
        return existing
    values = asdict(facts.read_gguf(path)) | {
        "source": source.spec,
        "path": str(path),
        "sha256": source.file_sha256,
        "licence": source.licence,
        "state": Model.State.READY,
        "reason": "Fetched; SHA-256 matches",
        "progress": 100,
    }
    model, created = Model.objects.update_or_create(name=source.name, defaults=values)
    record(actor, "model.register" if created else "model.update", model, source=source.spec)
    return model


@transaction.atomic
def register(actor: Actor, name: str, values: Mapping[str, Any]) -> Model:
    """Ask for a model: a job fetches, checks and reads it. `source` is needed; `sha256` and `licence` may be given.

    Raises Refused, naming the field.
    """
    _admins_only(actor)
    found = checked(MODEL_CHECKS, values)
    if "source" not in found:
        raise Refused("source is missing.", "source")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Refused("name must be letters, digits and . _ -, at most 96 of them.", "name")
    if Model.objects.filter(name=name).exists():
        raise Refused(f"There is a model named {name} already.", "name")
    sha256 = found.get("sha256", "")
    try:
        source = sources.with_sum(found["source"], sha256)
    except SourceError as error:
        raise Refused(str(error), "sha256") from None
    model = Model(
        name=name,
        source=source,
        sha256="" if sources.parse(source).kind == "pypi" else sha256,  # of a wheel, which its source says
        licence=found.get("licence", ""),
        reason="Waits for its turn",
    )
    try:
        model.save(force_insert=True)
    except IntegrityError:  # somebody else was a moment earlier
        raise Refused(f"There is a model named {name} already.", "name") from None
    record(actor, "model.register", model, source=source)
    return model


@transaction.atomic
def retry(actor: Actor, model: Model) -> Model:
    """Fetch and check a model again that failed or was refused. Raises Refused for one that did not."""
    _admins_only(actor)
    model = Model.objects.select_for_update().get(pk=model.pk)
    if model.state not in {Model.State.FAILED, Model.State.REFUSED}:
        raise Refused(f"{model} is {model.state}: only what failed or was refused is tried again.")
    model.state, model.reason, model.progress = Model.State.REGISTERED, "Waits for its turn", 0
    model.save(update_fields=["state", "reason", "progress"])
    record(actor, "model.retry", model)
    return model


@transaction.atomic
def convert(actor: Actor, model: Model, name: str = "") -> Model:
    """Ask for a GGUF model as safetensors in BF16, for engines that do not read GGUF; a new model. Raises Refused."""
    _admins_only(actor)
    if model.state != Model.State.READY or model.format != "gguf":
        raise Refused(f"{model} is no GGUF model that is ready: only those are converted.")
    return register(actor, name or f"{model.name}-hf", {"source": f"convert:{model.name}", "licence": model.licence})


@transaction.atomic
def remove(actor: Actor, model: Model) -> None:
    """Forget a model, and delete what we fetched of it. Raises Refused while a deployment uses it."""
    _admins_only(actor)
    model = Model.objects.select_for_update().get(pk=model.pk)
    used = sorted(model.deployments.values_list("name", flat=True))
    if used:
        raise Refused(f"{model} is in use by {', '.join(used)}: remove what runs it first.")
    if model.state == Model.State.FETCHING:
        raise Refused(f"{model} is being fetched: wait for its end.")
    record(actor, "model.remove", model, source=model.source)
    transaction.on_commit(lambda: _delete(model.source, model.name))
    model.delete()


@transaction.atomic
def add_runtime(actor: Actor, requirement: str, path: str = "", extra: tuple[str, ...] = ()) -> Runtime:
    """Ask for an engine version: a job installs it into an environment of its own, or takes the one at `path`.

    Needs the permission FREE. Raises Refused, naming the field.
    """
    _may_run_code(actor)
    try:
        wanted = runtimes.parse(requirement)
    except runtimes.CannotInstall as error:
        raise Refused(str(error), "requirement") from None
    for each in extra:
        if not _EXTRA.fullmatch(each):
            raise Refused(f"{each} is no requirement by name and version.", "extra")
    if len(path) > 500 or not path.isprintable():
        raise Refused("path must be at most 500 printable characters.", "path")
    home = Path(path) if path else None
    if home is not None and not (home.is_absolute() and (home / "bin" / "python").exists()):
        raise Refused(f"There is no environment at {path}: it has no bin/python.", "path")
    runtime, created = Runtime.objects.get_or_create(
        requirement=wanted.requirement, defaults={"engine": wanted.recipe.engine, "version": wanted.version}
    )
    again = {Runtime.State.FAILED, Runtime.State.REMOVED}
    if not created and runtime.state not in again:
        raise Refused(f"{wanted.requirement} is there already ({runtime.state}).", "requirement")
    runtime.state, runtime.reason, runtime.progress = Runtime.State.PENDING, "Waits for its turn", 0
    runtime.path = str(home or runtime_home(wanted.requirement))
    runtime.facts = {"taken": home is not None, "extra": list(extra)}
    runtime.save()
    record(actor, "runtime.add", runtime, path=path, extra=list(extra))
    return runtime


@transaction.atomic
def remove_runtime(actor: Actor, runtime: Runtime) -> None:
    """Forget a runtime, and delete the environment where we made it. Raises Refused while a deployment uses it."""
    _may_run_code(actor)
    runtime = Runtime.objects.select_for_update().get(pk=runtime.pk)
    used = sorted(runtime.deployments.values_list("name", flat=True))
    if used:
        raise Refused(f"{runtime} is in use by {', '.join(used)}: change or remove them first.")
    if runtime.state in {Runtime.State.INSTALLING, Runtime.State.PROBING}:
        raise Refused(f"{runtime} is being installed: wait for its end.")
    record(actor, "runtime.remove", runtime)
    home = runtime_home(runtime.requirement)
    if runtime.path == str(home):
        transaction.on_commit(lambda: shutil.rmtree(home, ignore_errors=True))
    runtime.delete()


def runtime_home(requirement: str) -> Path:
    """Where we make the environment of a runtime."""
    data: Path = settings.ENV["DATA_DIR"]
    return data / "runtimes" / requirement.replace("==", "-")


def model_home(name: str) -> Path:
    """Where we keep what we fetched of a model; the bundled one lies beside, as it always did."""
    models: Path = settings.LAYOUT.models
    return models / "fetched" / name


def model_named(name: Any) -> Model:
    """A model by its name. Raises Refused."""
    found = Model.objects.filter(name=name).first() if isinstance(name, str) else None
    if found is None:
        raise Refused(f"There is no model named {name}.", "name")
    return found


def runtime_named(requirement: Any) -> Runtime:
    """A runtime by its requirement. Raises Refused."""
    found = Runtime.objects.filter(requirement=requirement).first() if isinstance(requirement, str) else None
    if found is None:
        raise Refused(f"There is no runtime {requirement}.", "requirement")
    return found


def model_facts(model: Model) -> dict[str, Any]:
    """A model as JSON tells it; its path is of this machine and left out."""
    names = (
        "name", "source", "format", "sha256", "architecture", "parameters", "layers", "hidden_size", "heads",
        "kv_heads", "head_dim", "intermediate_size", "vocab_size", "context_length", "quantisation", "dtype",
        "disk_bytes", "weights_bytes", "weights_by_type", "licence", "state", "reason", "progress",
    )  # fmt: skip
    return {"id": str(model.pk), **{name: getattr(model, name) for name in names}}


def runtime_facts(runtime: Runtime) -> dict[str, Any]:
    """A runtime as JSON tells it."""
    names = ("requirement", "engine", "version", "checksum", "state", "reason", "progress", "facts", "disk_bytes")
    ready_at = runtime.ready_at.isoformat() if runtime.ready_at else None
    return {"id": str(runtime.pk), **{name: getattr(runtime, name) for name in names}, "ready_at": ready_at}


def _delete(source: str, name: str) -> None:
    """Only what lies in our own folder: never a file: model, and never the hub cache."""
    if source == BUNDLED.spec and not Model.objects.filter(source=source).exists():  # all of that source share it
        (settings.LAYOUT.models / BUNDLED.file_name).unlink(missing_ok=True)
    shutil.rmtree(model_home(name), ignore_errors=True)


def _admins_only(actor: Actor) -> None:
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can change the catalog.")


def _may_run_code(actor: Actor) -> None:
    if not actor.is_admin or (actor.user is not None and not actor.user.has_perm(FREE)):
        raise NotAllowed(f"Runtimes decide what code runs here; they need the permission {FREE}.")
