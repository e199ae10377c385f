"""A deployment of the fake worker and the controllers that look after it, one tick at a time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.conf import settings

from console.audit.actions import COMMAND_LINE
from console.catalog.models import Model
from console.fleet import probe, reconcile
from console.fleet.actions import deploy
from console.fleet.controller import Controller
from console.fleet.models import Deployment, Replica, Rollout, Transition
from console.fleet.placing import Devices
from console.fleet.revisions import revise
from console.placement.inventory import Inventory
from engine.adapters.base import WorkerSpec
from engine.adapters.embedded import EmbeddedAdapter
from engine.devices.simulated import SimulatedProvider
from engine.launchers import process
from engine.launchers.local import LocalLauncher

FAKE = Path(__file__).parent / "fake_worker.py"
GIB = 1 << 30
CARD = "1xL40S-48G"


def command(spec: WorkerSpec) -> list[str]:
    """The fake in place of the engine; a deployment's parameter `as` says how it behaves."""
    argv = [sys.executable, str(FAKE), "--uds", str(spec.uds), "--ready-file", str(spec.ready_file)]
    return [*argv, "--as", str(spec.parameters.get("as", ""))]


class House:
    """One deployment, its controllers, and a simulated card that holds so many of its replicas."""

    def __init__(self, root: Path, room: int = 4) -> None:
        self.root = root
        self.stop = threading.Event()
        # Each takes its weights and a fifth of them as buffer, of 48 GiB less what a driver takes.
        weights = int(44 * GIB / (room + 0.2))
        model = Model.objects.create(
            name="Fake", source="file:fake", path="/fake", sha256="0" * 64, weights_bytes=weights
        )
        self.deployment = deploy(COMMAND_LINE, model, "fake", "fake")
        # One driver, whoever asks it; its memory fills and frees a hundred times as fast as a real one's.
        self.card = SimulatedProvider(CARD, clock=lambda: time.monotonic() * 100)
        self.controllers: list[Controller] = []
        self.leader = self.controller("first")

    def controller(self, holder: str) -> Controller:
        made = Controller(LocalLauncher(self.root), Devices(Inventory(sources=[self.card])))
        made.devices.look()
        made.lease.holder = holder
        self.controllers.append(made)
        threading.Thread(target=made.heartbeats.run, args=(self.stop,), daemon=True).start()
        return made

    def take_over(self, holder: str) -> None:
        """The leader is no more, as after a kill -9; another one leads once its lease has ended."""
        self.leader.lease.release()
        self.leader = self.controller(holder)

    def behave(self, manner: str) -> None:
        """Of workers that start from now on, before anything was kept as a revision."""
        Deployment.objects.update(parameters={"as": manner})

    def revise(self, manner: str) -> int:
        """A new revision, whose workers behave so."""
        deployment = Deployment.objects.get(pk=self.deployment.pk)
        deployment.parameters = {"as": manner}
        return revise(deployment, "tests").number

    def replica(self, ordinal: int = 1) -> Replica:
        return Replica.objects.get(ordinal=ordinal)

    def tick(self) -> None:
        self.leader.tick()
        if self.leader.workers.places.refused:  # the thread that looks at devices cannot see a test's rows
            self.leader.devices.look()

    def until(self, check: Callable[[], object], seconds: float = 20) -> None:
        """Tick until it is so; only a controller that never gets there fails."""
        deadline = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < deadline, self.story()
            self.tick()
            time.sleep(0.01)

    def until_state(self, state: str, ordinal: int = 1) -> Replica:
        self.until(lambda: Replica.objects.filter(ordinal=ordinal, state=state).exists())
        return self.replica(ordinal)

    def until_all_ready(self, count: int, revision: int) -> None:
        """Exactly so many are wanted, all of them are ready, at one revision, and no rollout goes on."""

        def so() -> bool:
            wanted = list(Replica.objects.filter(wanted=True).values_list("state", "revision"))
            going = Rollout.objects.filter(ended_at=None).exists()
            return wanted == [(Replica.State.READY, revision)] * count and not going

        self.until(so)

    def history(self, ordinal: int = 1) -> list[tuple[str, str]]:
        rows = Transition.objects.filter(subject_label=f"fake r{ordinal}").order_by("id")
        return [(row.new, row.reason) for row in rows]

    def story(self) -> str:
        """All that happened, for a test that fails."""
        return "\n".join(f"{row.subject_label}: {row.new}: {row.reason}" for row in Transition.objects.order_by("id"))

    def alive(self, replica: Replica) -> bool:
        assert replica.pid is not None and replica.pid_started_at is not None
        return process.is_alive(replica.pid, int(replica.pid_started_at))

    def processes(self) -> list[int]:
        """Pids of fakes of this house, whoever knows of them."""
        needle, found = str(self.root).encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command_line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if needle in command_line and str(FAKE).encode() in command_line and b"shim" not in command_line:
                    found.append(int(entry.name))
        return found

    def tell(self, replica: Replica, name: str, number: int) -> None:
        """What its worker says that it runs or has served."""
        (self.root / str(replica.id) / name).write_text(str(number))


def _leave_nothing(controller: Controller) -> None:
    launcher = controller.launcher
    while launcher._shims:  # a shim that was just started may not have said yet what it runs
        for replica_id in launcher.known():
            launcher.kill(replica_id)
        launcher._reap()
    controller.workers.endings.join()


@contextmanager
def a_house(root: Path, monkeypatch: pytest.MonkeyPatch, room: int = 4) -> Iterator[House]:
    """A house whose watchdogs are quick, and that leaves no process behind."""
    monkeypatch.setattr(EmbeddedAdapter, "command", lambda _self, spec: command(spec))
    monkeypatch.setattr(reconcile, "SILENT_S", 0.6)
    monkeypatch.setattr(reconcile, "DRAIN_GRACE_S", 0.2)
    monkeypatch.setattr(probe, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("console.fleet.heartbeat.BEAT_S", 0.05)
    monkeypatch.setattr("console.fleet.placing.RETRY_S", 0.05)
    settings.LAYOUT.worker_sockets.mkdir(parents=True, exist_ok=True)
    root.mkdir()
    made = House(root, room)
    try:
        yield made
    finally:
        made.stop.set()
        for controller in made.controllers:
            _leave_nothing(controller)
