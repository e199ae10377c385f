"""NVIDIA cards by NVML. The driver's library is looked for when asked, and its absence is no error."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.devices.base import DeviceFacts, Measured, Occupant, ProcessUse
from engine.devices.processes import name_of

log = logging.getLogger(__name__)


def library() -> Any | None:
    """NVML, ready for questions; None where there is no driver, or no card."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError as error:
        log.debug("no NVIDIA driver answers: %s", error)
        return None


class NvmlProvider:
    """Cards that the driver lists; one that no longer answers is left out, and so lost."""

    def __init__(self, nvml: Any, node: str = "", name_of: Callable[[int], str] = name_of) -> None:
        self._nvml = nvml
        self._node = node or socket.gethostname()
        self._name_of = name_of

    def inventory(self) -> list[DeviceFacts]:
        """See Provider."""
        found = []
        for index, handle in self._handles():
            with contextlib.suppress(self._nvml.NVMLError):
                found.append(
                    DeviceFacts(
                        self._node,
                        _text(self._nvml.nvmlDeviceGetUUID(handle)),
                        "gpu",
                        index,
                        _text(self._nvml.nvmlDeviceGetName(handle)).removeprefix("NVIDIA ")[:80],
                        int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total),
                        power_limit_w=self._ask(self._nvml.nvmlDeviceGetEnforcedPowerLimit, handle, 1000),
                    )
                )
        return found

    def measure(self, occupants: Sequence[Occupant]) -> list[Measured]:
        """See Provider."""
        found = []
        for _index, handle in self._handles():
            with contextlib.suppress(self._nvml.NVMLError):
                uid = _text(self._nvml.nvmlDeviceGetUUID(handle))
                found.append(self._measured(uid, handle, [o for o in occupants if o.uid == uid]))
        return found

    def _measured(self, uid: str, handle: Any, here: list[Occupant]) -> Measured:
        used = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        uses = self._uses(handle)
        owners = {pid: occupant.replica for occupant in here for pid in occupant.pids}
        held = {occupant.replica: 0 for occupant in here}
        for use in uses:
            if use.pid in owners:
                held[owners[use.pid]] += use.bytes
        foreign = tuple(use for use in uses if use.pid not in owners)
        if here and not any(held.values()):
            held = _shared_out(used - sum(use.bytes for use in foreign), here)
        load = self._ask(lambda one: self._nvml.nvmlDeviceGetUtilizationRates(one).gpu, handle, 100)
        heat = self._ask(lambda one: self._nvml.nvmlDeviceGetTemperature(one, self._nvml.NVML_TEMPERATURE_GPU), handle)
        return Measured(
            uid, used, held, foreign, load, heat, self._ask(self._nvml.nvmlDeviceGetPowerUsage, handle, 1000)
        )

    def _uses(self, handle: Any) -> list[ProcessUse]:
        """What each process holds; several contexts of one are one."""
        found: dict[int, int] = {}
        for ask in (self._nvml.nvmlDeviceGetComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses):
            with contextlib.suppress(self._nvml.NVMLError):
                for process in ask(handle):
                    found[process.pid] = max(found.get(process.pid, 0), int(process.usedGpuMemory or 0))
        return [ProcessUse(pid, size, self._name_of(pid)) for pid, size in found.items()]

    def _handles(self) -> Iterable[tuple[int, Any]]:
        """Cards that answer; none where the driver itself does not."""
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            log.warning("NVML does not answer: %s", error)
            return
        for index in range(count):
            with contextlib.suppress(self._nvml.NVMLError):
                yield index, self._nvml.nvmlDeviceGetHandleByIndex(index)

    def _ask(self, question: Callable[[Any], float], handle: Any, unit: float = 1) -> float | None:
        """A figure that not every card can tell."""
        try:
            return float(question(handle)) / unit
        except self._nvml.NVMLError:
            return None


def _shared_out(used: int, here: Sequence[Occupant]) -> dict[str, int]:
    """Where the driver does not know our processes (another PID namespace): what is used goes to those who live, by
    what they were planned to hold, and nobody gets more than that."""
    living = [occupant for occupant in here if occupant.pids]
    planned = sum(occupant.target for occupant in living)
    share = min(1.0, max(0, used) / planned) if planned else 0.0
    return {o.replica: int(o.target * share) if o.pids else 0 for o in here}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
