"""What a provider of devices is: it lists them, and measures who holds how much of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class DevicesError(ValueError):
    """FANLIGHT_DEVICES cannot be understood; the message says what it may be."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device is. Bytes; `cores` are ids of the cores of a CPU that this process may use."""

    node: str
    uid: str  # the driver's "GPU-5c1f…", "<node>/cpu", "sim/0/3"
    kind: str  # "cpu", "gpu"
    index: int
    name: str
    total_bytes: int
    cores: tuple[int, ...] = ()
    simulated: bool = False
    power_limit_w: float | None = None


@dataclass(frozen=True, slots=True)
class Occupant:
    """A line of the ledger, as a provider needs it to tell whose bytes are whose.

    `pids` is the process tree of its worker, empty once that is gone. `target` is what it will hold when loaded, and
    `busy` its share of time at work: a simulated device shows these, a real one is measured.
    """

    replica: str
    uid: str  # of the device
    pids: tuple[int, ...]
    target: int
    busy: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process holds of a device."""

    pid: int
    bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a device shows now. `held` are bytes by replica; `foreign` are processes that belong to no occupant."""

    uid: str
    used_bytes: int
    held: Mapping[str, int] = field(default_factory=dict)
    foreign: tuple[ProcessUse, ...] = ()
    utilisation: float | None = None  # 0 to 1
    temperature: float | None = None  # degrees Celsius
    power_w: float | None = None


class Provider(Protocol):
    """A source of devices of this machine, or of pretended ones."""

    def inventory(self) -> list[DeviceFacts]:
        """What there is now; a device that is missing from it is lost."""
        ...

    def measure(self, occupants: Sequence[Occupant]) -> list[Measured]:
        """What each device shows; `occupants` are of any device."""
        ...
