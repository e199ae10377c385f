"""What an engine adapter gives: the command line of a worker, from a small, checked set of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class AdapterError(ValueError):
    """A deployment's parameters cannot be used; the message names the parameter."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker's command line is made of."""

    model_path: Path
    model_revision: str  # roots the prefix cache: blocks of other weights never match
    served_name: str
    uds: Path
    ready_file: Path
    threads: int
    drain_s: float  # what running streams get after SIGTERM
    parameters: Mapping[str, Any]
    fault_delays: Mapping[str, float]  # testing only: phase -> seconds
