"""Inventory of devices: NVIDIA cards by NVML, the CPU with its memory, and simulated cards."""

from __future__ import annotations

from engine.devices.base import DeviceFacts, DevicesError, Measured, Occupant, ProcessUse, Provider
from engine.devices.cpu import CpuProvider
from engine.devices.nvml import NvmlProvider, library
from engine.devices.simulated import SimulatedProvider

__all__ = ["DeviceFacts", "DevicesError", "Measured", "Occupant", "ProcessUse", "Provider", "check", "providers"]


def providers(spec: str) -> list[Provider]:
    """Sources of devices, by FANLIGHT_DEVICES: "auto", or some of "cpu", "nvml", "sim:8xA100-80G,…" joined with "+".

    "auto" is the CPU, and the NVIDIA cards where a driver answers. Raises DevicesError.
    """
    nvml = library() if spec == "auto" or "nvml" in spec.split("+") else None
    if spec == "auto":
        return [CpuProvider(), *([NvmlProvider(nvml)] if nvml is not None else [])]
    found: list[Provider] = []
    for part in spec.split("+"):
        if part == "cpu":
            found.append(CpuProvider())
        elif part == "nvml":
            found += [NvmlProvider(nvml)] if nvml is not None else []
        elif part.startswith("sim:"):
            found.append(SimulatedProvider(part.removeprefix("sim:")))
        else:
            raise DevicesError(f"{part!r} is no source of devices; known: auto, cpu, nvml, sim:8xA100-80G,…")
    return found


def check(spec: str) -> str:
    """The same spec. Raises DevicesError; asks no driver."""
    for part in spec.split("+"):
        if part.startswith("sim:"):
            SimulatedProvider(part.removeprefix("sim:"))
        elif part not in ("cpu", "nvml") and spec != "auto":
            raise DevicesError(f"{part!r} is no source of devices; known: auto, cpu, nvml, sim:8xA100-80G,…")
    return spec
