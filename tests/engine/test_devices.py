"""Devices: what is listed, whose bytes are whose, and what a simulated card pretends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.devices import DevicesError, Measured, Occupant, ProcessUse, check, providers
from engine.devices.cpu import CpuProvider
from engine.devices.nvml import NvmlProvider
from engine.devices.processes import name_of, private_bytes, trees
from engine.devices.simulated import DRIVER_SHARE, FREE_S, LOAD_S, SimulatedProvider

GIB = 1 << 30


# -- the CPU and process trees -------------------------------------------------------------------------------------


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds 64 MiB, with a child that holds as much; both end when their input does."""
    block = "data = bytearray(1 << 26)\nfor i in range(0, len(data), 4096): data[i] = 1\n"
    inner = f"{block}print('x', flush=True)\nimport sys; sys.stdin.read()"
    outer = (
        f"import subprocess, sys\n{block}child = subprocess.Popen([sys.executable, '-c', {inner!r}], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE)\nchild.stdout.readline()\nprint('x', flush=True)\n"
        "sys.stdin.read()\nchild.stdin.close()\nchild.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    yield process
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


def test_a_tree_has_the_descendants_and_their_memory(holder: subprocess.Popen[bytes]) -> None:
    tree = trees([holder.pid])[holder.pid]
    assert holder.pid in tree and len(tree) == 2
    sizes = [private_bytes(pid) for pid in tree]
    assert all(1 << 26 < size < 1 << 28 for size in sizes), sizes
    assert name_of(holder.pid).startswith("python")


def test_what_has_ended_has_no_tree_and_no_memory() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie still
    assert trees([ended.pid]) == {} and private_bytes(ended.pid) == 0
    ended.wait()
    assert name_of(ended.pid) == "" and private_bytes(ended.pid) == 0


def test_the_cpu_is_measured_by_the_trees_of_its_workers(holder: subprocess.Popen[bytes]) -> None:
    provider = CpuProvider("here")
    (facts,) = provider.inventory()
    assert (facts.uid, facts.kind, facts.simulated) == ("here/cpu", "cpu", False)
    assert set(facts.cores) <= os.sched_getaffinity(0) and facts.cores and facts.total_bytes > GIB
    pids = trees([holder.pid])[holder.pid]
    (seen,) = provider.measure([Occupant("r", "here/cpu", pids, 0), Occupant("gone", "here/cpu", (), 5)])
    assert seen.held["gone"] == 0
    assert 2 << 26 < seen.held["r"] < 2 << 28 and seen.held["r"] < seen.used_bytes < facts.total_bytes
    assert seen.utilisation is None  # two looks are needed
    again = provider.measure([])[0]
    assert again.utilisation is None or 0 <= again.utilisation <= 1


def test_in_a_container_its_limit_counts_and_what_the_kernel_can_drop_does_not(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 8}\nactive_file {GIB // 8}\n")
    provider = CpuProvider("here", cgroup=tmp_path)
    assert provider.inventory()[0].total_bytes == GIB
    assert provider.measure([])[0].used_bytes == GIB // 4
    (tmp_path / "memory.max").write_text("max\n")
    assert provider.inventory()[0].total_bytes > GIB


# -- NVIDIA cards --------------------------------------------------------------------------------------------------


class FakeNvml:
    """The part of pynvml that is asked, over two cards; `broken` ones answer nothing."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.used = [20 * GIB, GIB]
        self.processes: list[list[Any]] = [[SimpleNamespace(pid=11, usedGpuMemory=15 * GIB)], []]
        self.broken: set[int] = set()
        self.gone = False

    def nvmlDeviceGetCount(self) -> int:
        if self.gone:
            raise self.NVMLError("Driver Not Loaded")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.broken:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 * GIB, used=self.used[handle])

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 350_000

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=83)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return self.processes[handle]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        raise self.NVMLError("Not Supported")


def test_cards_are_listed_and_a_lost_one_is_not() -> None:
    nvml = FakeNvml()
    provider = NvmlProvider(nvml, "box")
    facts = provider.inventory()
    assert [card.uid for card in facts] == ["GPU-0", "GPU-1"]
    assert (facts[0].name, facts[0].total_bytes, facts[0].power_limit_w) == ("H100 80GB HBM3", 80 * GIB, 700.0)
    nvml.broken.add(0)
    assert [card.uid for card in provider.inventory()] == ["GPU-1"]
    assert [seen.uid for seen in provider.measure([])] == ["GPU-1"]
    nvml.gone = True
    assert provider.inventory() == [] and provider.measure([]) == []


def test_bytes_of_our_processes_are_theirs_and_the_others_are_named() -> None:
    nvml = FakeNvml()
    nvml.processes[0].append(SimpleNamespace(pid=99, usedGpuMemory=2 * GIB))
    nvml.processes[0].append(SimpleNamespace(pid=12, usedGpuMemory=GIB))
    seen = NvmlProvider(nvml, "box", name_of=lambda pid: f"p{pid}").measure(
        [Occupant("r", "GPU-0", (10, 11, 12), 18 * GIB), Occupant("elsewhere", "GPU-1", (13,), GIB)]
    )[0]
    assert seen == Measured("GPU-0", 20 * GIB, {"r": 16 * GIB}, (ProcessUse(99, 2 * GIB, "p99"),), 0.83, None, 350.0)


def test_where_the_driver_does_not_know_our_processes_what_is_used_is_theirs_up_to_their_plan() -> None:
    nvml = FakeNvml()
    nvml.processes[0] = []
    provider = NvmlProvider(nvml, "box")
    seen = provider.measure([Occupant("a", "GPU-0", (1,), 30 * GIB), Occupant("b", "GPU-0", (2,), 10 * GIB)])[0]
    assert seen.held == {"a": 15 * GIB, "b": 5 * GIB}
    seen = provider.measure([Occupant("a", "GPU-0", (1,), 4 * GIB), Occupant("b", "GPU-0", (), 10 * GIB)])[0]
    assert seen.held == {"a": 4 * GIB, "b": 0}


# -- simulated cards -----------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_group_is_a_node_of_cards_that_say_what_they_are() -> None:
    cards = SimulatedProvider("8xA100-80G, 4xL40S-48G").inventory()
    assert [card.node for card in cards] == ["sim-a"] * 8 + ["sim-b"] * 4
    assert {card.uid for card in cards} == {f"sim/0/{n}" for n in range(8)} | {f"sim/1/{n}" for n in range(4)}
    assert all(card.simulated for card in cards)
    assert (cards[0].name, cards[0].total_bytes, cards[0].power_limit_w) == ("A100-80G", 80 * GIB, 400.0)


def test_a_card_fills_while_a_worker_loads_and_frees_with_a_lag() -> None:
    clock = Clock()
    provider = SimulatedProvider("1xA100-80G", clock)
    idle = int(DRIVER_SHARE * 80 * GIB)
    assert provider.measure([])[0].used_bytes == idle
    loading = Occupant("r", "sim/0/0", (5,), 40 * GIB, 0.8)
    assert provider.measure([loading])[0].held == {"r": 0}
    clock.now += LOAD_S / 4
    assert provider.measure([loading])[0].held == {"r": 20 * GIB}
    clock.now += LOAD_S
    seen = provider.measure([loading])[0]
    assert seen.held == {"r": 40 * GIB} and seen.used_bytes == idle + 40 * GIB
    clock.now += FREE_S / 4
    gone = Occupant("r", "sim/0/0", (), 40 * GIB)
    assert provider.measure([gone])[0].held == {"r": 20 * GIB}
    assert provider.measure([])[0].used_bytes == idle + 20 * GIB  # its line is gone, its bytes are not
    clock.now += FREE_S
    assert provider.measure([])[0].used_bytes == idle


def test_work_heats_a_card_and_a_new_controller_finds_it_loaded() -> None:
    clock = Clock()
    provider = SimulatedProvider("1xH100-80G", clock)
    busy = Occupant("r", "sim/0/0", (5,), 40 * GIB, 0.8)
    first = provider.measure([busy])[0]
    assert first.held == {"r": 40 * GIB} and first.temperature is not None and first.power_w is not None
    clock.now += 600
    later = provider.measure([busy])[0]
    assert later.temperature is not None and later.temperature > first.temperature + 20
    assert later.utilisation == pytest.approx(0.82) and 0 < first.power_w <= 700


@pytest.mark.parametrize("spec", ["auto", "cpu", "nvml", "cpu+sim:1xA100-80G,2xL4-24G"])
def test_specs_that_can_be_used(spec: str) -> None:
    assert check(spec) == spec
    assert all(facts.total_bytes > 0 for provider in providers(spec) for facts in provider.inventory())


@pytest.mark.parametrize(
    "spec", ["", "gpu", "sim:", "sim:A100", "sim:0xA100-80G", "sim:1xA100-0G", "sim:9999xA-1G,9999xA-1G"]
)
def test_specs_that_cannot_say_what_they_may_be(spec: str) -> None:
    with pytest.raises(DevicesError, match="known|look like|at most"):
        check(spec)
    with pytest.raises(DevicesError):
        providers(spec)


def test_without_a_driver_auto_is_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.devices.library", lambda: None)
    assert [type(provider) for provider in providers("auto")] == [CpuProvider]
    assert providers("nvml") == []


def test_a_worker_that_is_killed_has_no_tree(holder: subprocess.Popen[bytes]) -> None:
    child = next(pid for pid in trees([holder.pid])[holder.pid] if pid != holder.pid)
    os.kill(child, signal.SIGKILL)
    while len(trees([holder.pid])[holder.pid]) > 1:  # the kernel ends it in its own time
        pass
    assert trees([child]) == {}
