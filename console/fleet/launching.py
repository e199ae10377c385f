"""Starts of workers: the command line, environment and place of one replica, with the configuration of its revision."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings

from console.catalog.models import Runtime
from console.environment import ROOT
from console.fleet.models import Replica
from console.fleet.placing import Place
from console.fleet.revisions import config_at
from console.telemetry.receiver import Address
from engine.adapters import adapter
from engine.adapters.base import AdapterError, WorkerSpec
from engine.config import usable_cores
from engine.launchers.base import Launch, Launcher


@dataclass(frozen=True)
class Configured:
    """What one replica is started with: the config of its revision, and the runtime that this names."""

    config: Mapping[str, Any]
    runtime: Runtime | None


def configured(replica: Replica) -> Configured:
    """The configuration of a replica's revision. Raises AdapterError where its runtime is not there."""
    config = config_at(replica.deployment, replica.revision)
    runtime_id = config.get("runtime_id")
    if runtime_id is None:
        return Configured(config, None)
    runtime = Runtime.objects.filter(pk=runtime_id).first()
    if runtime is None or runtime.state != Runtime.State.READY:
        name = runtime.requirement if runtime else "its runtime"
        raise AdapterError(f"runtime: {name} is not ready; install it with `manage.py runtime add`.")
    return Configured(config, runtime)


def threads_wanted() -> int:
    """Cores that a worker on a CPU is to have; 0: all that are free."""
    return int(settings.ENV["THREADS"])


def socket_of(replica: Replica, epoch: int) -> Path:
    """Where the worker of a launch listens; beside it is a folder for sockets of its own (`WorkerSpec.sockets`)."""
    remove_sockets(replica)
    uds = Path(settings.LAYOUT.worker_sockets / f"{replica.id.hex[:10]}-{epoch}.sock")
    uds.with_suffix("").mkdir(mode=0o700, exist_ok=True)
    return uds


def remove_sockets(replica: Replica) -> None:
    """What earlier launches left behind: a worker that was killed removes nothing."""
    for stale in settings.LAYOUT.worker_sockets.glob(f"{replica.id.hex[:10]}-*"):
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)


def launch_of(replica: Replica, epoch: int, uds: Path, found: Configured, place: Place, launcher: Launcher) -> Launch:
    """What the launcher is told. Raises AdapterError for parameters that the engine does not take."""
    engine = adapter(replica.deployment.engine)
    spec = _spec(replica, uds, found, place, launcher)
    return Launch(str(replica.id), epoch, engine.command(spec), engine.environment(spec), ROOT, place.cores)


def _spec(replica: Replica, uds: Path, found: Configured, place: Place, launcher: Launcher) -> WorkerSpec:
    model, config = replica.deployment.model, found.config
    parameters = dict(config.get("parameters") or {})
    tensor_parallel = parameters.pop("tensor_parallel", 1)
    return WorkerSpec(
        model_path=Path(model.path),
        model_revision=model.sha256,
        served_name=model.name,
        uds=uds,
        ready_file=launcher.ready_file(str(replica.id)),
        threads=threads_wanted() or len(place.cores) or usable_cores(),
        drain_s=settings.ENV["DRAIN_SECONDS"],
        parameters=parameters,
        fault_delays=settings.ENV["FAULT_DELAYS"],
        cache=settings.ENV["DATA_DIR"],
        python=_python(found.runtime),
        cores=place.cores,
        exclusive_cores=place.exclusive_cores,
        gpus=place.gpus,
        quantisation=config.get("quantisation") or "",
        tensor_parallel=tensor_parallel,
        arguments=tuple(config.get("arguments") or ()),
        environment=dict(config.get("environment") or {}),
        memory=place.memory,
        kv_bytes=place.kv_bytes,
        traces=Address(settings.LAYOUT.receiver_file).read(),
    )


def _python(runtime: Runtime | None) -> Path | None:
    return None if runtime is None else Path(runtime.path) / "bin" / "python"
