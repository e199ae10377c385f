"""The controller process: a leader that makes what runs match what is wanted, one small step at a time.

It decides with fleet.reconcile, acts through a launcher, and writes every change with its reason. Workers outlive it: a
new controller adopts a worker whose pid, start time and epoch match the row, and ends any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import close_old_connections
from django.utils import timezone

from console.environment import ROOT
from console.errors import first_line
from console.fleet import external, probe, reconcile
from console.fleet.actions import ensure_replicas, move_replica
from console.fleet.canary import Canaries
from console.fleet.heartbeat import Heartbeats
from console.fleet.lease import Lease
from console.fleet.models import Deployment, Replica
from engine.adapters import embedded
from engine.adapters.base import AdapterError, WorkerSpec
from engine.config import usable_cores
from engine.launchers.base import Launch, Launcher, WorkerView

log = logging.getLogger(__name__)

TICK_S = 0.25
State = Replica.State


class Controller:
    """Reconciles every deployment of this installation until told to stop."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.lease = Lease(f"{socket.gethostname()}:{os.getpid()}")
        self._epoch = 0  # under which all of the following was learnt
        self._since: dict[UUID, tuple[str, float]] = {}  # state and the monotonic time it was entered
        self._failures: dict[UUID, int] = {}
        self._heartbeats = Heartbeats()
        self._verifications: dict[UUID, probe.Verification] = {}
        self._endings: dict[UUID, threading.Thread] = {}
        self._checks = external.Checks(settings.ENV["EGRESS_ALLOW"])
        self._canaries = Canaries()

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set. A database that is away is waited for; workers run on meanwhile.

        No thread that drains or verifies is waited for: who takes over does it again.
        """
        threading.Thread(target=self._heartbeats.run, args=(stop,), name="heartbeats", daemon=True).start()
        while not stop.is_set():
            try:
                self.tick()
            except DatabaseError as error:
                log.warning("controller: the database does not answer: %s", first_line(error))
                close_old_connections()
                stop.wait(1.0)
            stop.wait(TICK_S)
        with contextlib.suppress(DatabaseError):
            self.lease.release()

    def tick(self) -> None:
        """One look at every replica and canary, and at most one step for each; nothing while another leads."""
        if not self._leads():
            return
        known = set()
        for deployment in Deployment.objects.select_related("model", "endpoint"):
            for replica in ensure_replicas(deployment):
                replica.deployment = deployment
                known.add(str(replica.id))
                if not self._leads():  # asked again: a step can take seconds
                    return
                self._step_alone(replica)
        self._end_strangers(known)
        self._look_at_canaries()

    # -- one replica ------------------------------------------------------------------------------------------

    def _step_alone(self, replica: Replica) -> None:
        """A replica that cannot be handled keeps none of the others from being looked after."""
        try:
            self._step(replica)
        except DatabaseError:
            raise
        except Exception:
            log.exception("controller: %s could not be looked after; trying again", replica)

    def _look_at_canaries(self) -> None:
        """A canary that cannot be judged keeps no replica from being looked after."""
        try:
            self._canaries.look()
        except DatabaseError:
            raise
        except Exception:
            log.exception("controller: canaries could not be judged; trying again")

    def _end_strangers(self, known: set[str]) -> None:
        """Workers whose replica was deleted serve nobody."""
        for replica_id in set(self.launcher.known()) - known:
            view = self.launcher.observe(replica_id)
            if view is not None and view.alive:
                log.warning("controller: ending the worker of replica %s, which is no more", replica_id)
                self.launcher.kill(replica_id)

    def _step(self, replica: Replica) -> None:
        if replica.deployment.engine == Deployment.Engine.EXTERNAL:
            self._step_external(replica)
            return
        view = self.launcher.observe(str(replica.id))
        ours = view if view is not None and view.epoch == replica.epoch else None
        if ours is None and view is not None and view.alive:
            log.warning(
                "controller: ending a worker of epoch %s of %s, which is at %s",
                view.epoch,
                replica,
                replica.epoch,
            )
            self.launcher.kill(str(replica.id))
        seen = self._seen(replica, ours)
        if self._verified(replica, ours):
            return
        wanted = replica.ordinal <= replica.deployment.desired_replicas
        state, since = self._entered(replica)
        decision = reconcile.decide(state, time.monotonic() - since, self._failures.get(replica.id, 0), wanted, seen)
        self._act(replica, ours, decision)

    def _step_external(self, replica: Replica) -> None:
        """An endpoint has no worker: its address is checked, and checked again."""
        endpoint = replica.deployment.endpoint
        found = self._checks.ended(replica.id, endpoint.base_url)
        wanted = replica.ordinal <= replica.deployment.desired_replicas
        age_s = self._checks.age_s(replica.id)
        step = external.decide(replica, endpoint, age_s, self._failures.get(replica.id, 0), wanted, found)
        became_ready = step.state == State.READY != replica.state
        changes = {**step.changes, "ready_at": timezone.now()} if became_ready else step.changes
        self._move(replica, reconcile.Decision(step.state, step.reason), **changes)
        if found is not None and found.addresses:
            self._failures.pop(replica.id, None)
        elif found is not None and replica.state == State.FAILED and not step.reason:
            self._count_failure(replica)
        if step.check:
            self._checks.begin(replica.id, endpoint.base_url)

    def _act(self, replica: Replica, view: WorkerView | None, decision: reconcile.Decision) -> None:
        if decision.act is reconcile.Act.KILL:
            self._move(replica, decision)  # out of rotation first
            self.launcher.kill(str(replica.id))
        elif decision.act is reconcile.Act.END:
            self._end(replica)
        elif decision.act is reconcile.Act.LAUNCH:
            self._launch(replica, decision)
        elif decision.act is reconcile.Act.VERIFY and view is not None:
            self._begin_verification(replica, view, decision)
        else:
            self._move(replica, decision)

    def _end(self, replica: Replica) -> None:
        """Drain and end a worker beside the loop: streams may take long, and the others need looking after."""
        running = self._endings.get(replica.id)
        if running is not None and running.is_alive():
            return
        grace_s = settings.ENV["DRAIN_SECONDS"] + 5
        ending = threading.Thread(target=self.launcher.end, args=(str(replica.id), grace_s), name="end", daemon=True)
        self._endings[replica.id] = ending
        ending.start()

    def _move(self, replica: Replica, decision: reconcile.Decision, **changes: object) -> None:
        if decision.state == replica.state and not changes:
            return
        if decision.state == State.FAILED:
            self._count_failure(replica)
        move_replica(replica, decision.state, decision.reason, **changes)
        log.info("replica %s: %s, %s", replica, decision.state, decision.reason)
        self._since[replica.id] = (decision.state, time.monotonic())

    def _count_failure(self, replica: Replica) -> None:
        _state, since = self._entered(replica)
        settled = replica.state == State.READY and time.monotonic() - since > reconcile.SETTLED_S
        self._failures[replica.id] = 1 if settled else self._failures.get(replica.id, 0) + 1

    def _launch(self, replica: Replica, decision: reconcile.Decision) -> None:
        epoch = replica.epoch + 1
        uds = settings.LAYOUT.worker_sockets / f"{replica.id.hex[:10]}-{epoch}.sock"
        try:
            launch = self._launch_of(replica, epoch, uds)
        except AdapterError as error:
            self._move(replica, reconcile.Decision(State.FAILED, str(error)))
            return
        restarts = replica.restarts + (1 if replica.epoch else 0)
        # The row first: a controller that dies in between finds no worker of this epoch and starts one.
        self._move(
            replica, decision, epoch=epoch, uds=str(uds), restarts=restarts, pid=None, pid_started_at=None,
            metrics_url="", facts={}, started_at=timezone.now(), ready_at=None,
        )  # fmt: skip
        try:
            self.launcher.launch(launch)
        except OSError as error:
            self._move(replica, reconcile.Decision(State.FAILED, f"Its process could not be started: {error}"))

    def _launch_of(self, replica: Replica, epoch: int, uds: Path) -> Launch:
        model = replica.deployment.model
        threads = settings.ENV["THREADS"] or usable_cores()
        spec = WorkerSpec(
            model_path=Path(model.path),
            model_revision=model.sha256,
            served_name=model.name,
            uds=uds,
            ready_file=self.launcher.ready_file(str(replica.id)),
            threads=threads,
            drain_s=settings.ENV["DRAIN_SECONDS"],
            parameters=replica.deployment.parameters,
            fault_delays=settings.ENV["FAULT_DELAYS"],
        )
        for stale in uds.parent.glob(f"{replica.id.hex[:10]}-*.sock"):
            stale.unlink(missing_ok=True)
        env = embedded.environment(threads, settings.ENV["DATA_DIR"] / "native")
        return Launch(str(replica.id), epoch, embedded.command(spec), env, ROOT)

    def _seen(self, replica: Replica, view: WorkerView | None) -> reconcile.Seen:
        if view is None:
            self._heartbeats.forget(str(replica.id))
            return reconcile.Seen()
        if replica.pid != view.pid and view.alive:
            replica.pid, replica.pid_started_at = view.pid, float(view.pid_ticks)
            replica.save(update_fields=["pid", "pid_started_at"])
        tail = "" if view.alive else _last_line(self.launcher.log_file(str(replica.id)))
        return reconcile.Seen(
            present=True,
            alive=view.alive,
            ready=bool(view.ready),
            exit_reason=view.exit_reason,
            log_tail=tail,
            probe=self._hear(replica, view),
        )

    # -- verification: a real generation, off the loop -------------------------------------------------------------

    def _begin_verification(self, replica: Replica, view: WorkerView, decision: reconcile.Decision) -> None:
        facts = dict(view.ready)
        self._move(
            replica, decision, facts=facts, metrics_url=f"{facts.get('introspection_url', '')}/metrics",
            engine_version=facts.get("engine_version", ""), device=facts.get("device", "cpu"),
        )  # fmt: skip
        self._verifications[replica.id] = probe.Verification(replica.uds, str(facts.get("model", "")))

    def _verified(self, replica: Replica, view: WorkerView | None) -> bool:
        """Finish a verification that is under way. Returns whether one still is, or just ended."""
        verification = self._verifications.get(replica.id)
        if verification is None or view is None or not view.alive:
            self._verifications.pop(replica.id, None)
            return False
        if verification.is_alive():
            return True
        del self._verifications[replica.id]
        if verification.seconds is None:
            self._move(replica, reconcile.Decision(State.FAILED, verification.failure))
            self.launcher.kill(str(replica.id))
            return True
        reason = f"Answered a test prompt in {verification.seconds * 1000:.0f} ms"
        self._move(replica, reconcile.Decision(State.READY, reason), ready_at=timezone.now())
        return True

    # -- heartbeats ------------------------------------------------------------------------------------------------

    def _hear(self, replica: Replica, view: WorkerView) -> reconcile.Probe | None:
        """Watch the worker once it tells its address; the newest of what it said."""
        replica_id = str(replica.id)
        url = str(view.ready.get("introspection_url", "")) if view.alive else ""
        if not url:
            self._heartbeats.forget(replica_id)
            return None
        self._heartbeats.watch(replica_id, url)
        return self._heartbeats.heard(replica_id)

    def _entered(self, replica: Replica) -> tuple[str, float]:
        known = self._since.get(replica.id)
        if known is None or known[0] != replica.state:
            known = self._since[replica.id] = (replica.state, time.monotonic())
        return known

    def _leads(self) -> bool:
        """Whether this controller may act. A new leader remembers nothing of the last time it led."""
        if not self.lease.held():
            return False
        if self.lease.epoch != self._epoch:
            self._epoch = self.lease.epoch
            self._since.clear()
            self._failures.clear()
            self._verifications.clear()
        return True


def _last_line(path: Path) -> str:
    """The last line of a worker's log, for the reason of its death."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            start = max(0, file.tell() - 4096)
            file.seek(start)
            whole = file.read().decode(errors="replace").splitlines()[1 if start else 0 :]
            lines = [line for line in whole if _tells_why(line)]
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""


def _tells_why(line: str) -> bool:
    """Not the engine's own records of its progress: the last of them says only how far it had come."""
    return bool(line.strip()) and not line.startswith('{"event": ')
