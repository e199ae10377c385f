"""The controller process: a leader that makes what runs match what is wanted, one small step at a time.

For each deployment it decides whom to want (fleet.reshape), then takes one step with each replica (fleet.workers), and
writes every change with its reason. Workers outlive it: a new controller adopts a worker whose pid, start time and
epoch match the row, and ends any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import close_old_connections
from django.utils import timezone

from console.errors import first_line
from console.fleet import external, reconcile, rollout_actions
from console.fleet.actions import ensure_replicas
from console.fleet.canary import Canaries
from console.fleet.heartbeat import Heartbeats
from console.fleet.lease import Lease
from console.fleet.models import Deployment, Replica, Rollout
from console.fleet.placing import Devices
from console.fleet.reshape import reshape
from console.fleet.rollout import OPEN
from console.fleet.signals import Group, Signals
from console.fleet.workers import Workers
from console.placement.models import Device
from engine.launchers.base import Launcher

log = logging.getLogger(__name__)

TICK_S = 0.25
PRESSED_DRAIN_S = 30  # for the requests of a borrower whose lender needs its memory back
State = Replica.State


class Controller:
    """Reconciles every deployment of this installation until told to stop."""

    def __init__(self, launcher: Launcher, devices: Devices | None = None) -> None:
        self.launcher = launcher
        self.lease = Lease(f"{socket.gethostname()}:{os.getpid()}")
        self.devices = devices or Devices()
        self.heartbeats = Heartbeats()
        self.workers = Workers(launcher, self.heartbeats, self.devices)
        self._epoch = 0  # under which all that is remembered was learnt
        self._known: set[UUID] = set()
        self._checks = external.Checks(settings.ENV["EGRESS_ALLOW"])
        self._canaries = Canaries()
        self._signals = Signals()

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set. A database that is away is waited for; workers run on meanwhile.

        No thread that drains or verifies is waited for: who takes over does it again.
        """
        for name, work in (("heartbeats", self.heartbeats.run), ("devices", self.devices.run)):
            threading.Thread(target=work, args=(stop,), name=name, daemon=True).start()
        while not stop.is_set():
            try:
                self.tick()
            except DatabaseError as error:
                log.warning("controller: the database does not answer: %s", first_line(error))
                self.heartbeats.lend_nothing()
                close_old_connections()
                stop.wait(1.0)
            stop.wait(TICK_S)
        with contextlib.suppress(DatabaseError):
            self.lease.release()

    def tick(self) -> None:
        """One look at every deployment and canary, at most one step for each replica; nothing while another leads."""
        if not self._leads():
            self.devices.tell(None)
            self.heartbeats.lend_nothing()
            return
        if not Device.objects.exists():  # the very first look: nobody can be placed before it
            self.devices.look()
        replicas: dict[UUID, list[Replica]] = defaultdict(list)
        for replica in Replica.objects.order_by("ordinal"):
            replicas[replica.deployment_id].append(replica)
        rollouts = {rollout.deployment_id: rollout for rollout in Rollout.objects.filter(state__in=OPEN)}
        self.workers.listen()
        known: set[UUID] = set()
        groups = []
        for deployment in Deployment.objects.select_related("model", "endpoint", "runtime"):
            rows = self._shape_alone(deployment, replicas[deployment.id], rollouts.get(deployment.id))
            groups.append(Group(deployment, tuple(rows), deployment.id in rollouts))
            for replica in rows:
                known.add(replica.id)
                if not self._leads():  # asked again: a step can take seconds
                    return
                self._step_alone(replica)
        self._end_strangers(known)
        self.devices.tell({each: living for each, living in self.workers.living.items() if each in known})
        if self.workers.places.waiting:
            self.devices.soon()
        self._heed_alarms()
        self._alone("signals could not be looked at", lambda: self._signals.look(groups, self.workers.said))
        self._alone("canaries could not be judged", self._canaries.look)

    # -- one deployment -----------------------------------------------------------------------------------------------

    def _shape_alone(self, deployment: Deployment, rows: list[Replica], going: Rollout | None) -> list[Replica]:
        """A deployment that cannot be handled keeps none of the others from being looked after."""
        for replica in rows:
            replica.deployment = deployment
        try:
            return self._shape(deployment, rows, going)
        except DatabaseError:
            raise
        except Exception:
            log.exception("controller: replicas of %s could not be decided; trying again", deployment)
            return rows

    def _shape(self, deployment: Deployment, rows: list[Replica], going: Rollout | None) -> list[Replica]:
        if deployment.engine == Deployment.Engine.EXTERNAL:
            rows = ensure_replicas(deployment)
            for replica in rows:
                replica.deployment = deployment
            return rows
        return reshape(deployment, rows, going, {replica.id: self.workers.known(replica) for replica in rows})

    def _step_alone(self, replica: Replica) -> None:
        """Nor does a replica keep the others."""
        try:
            if replica.deployment.engine == Deployment.Engine.EXTERNAL:
                self._step_external(replica)
            else:
                self.workers.step(replica, self._leads)
        except DatabaseError:
            raise
        except Exception:
            log.exception("controller: %s could not be looked after; trying again", replica)

    def _step_external(self, replica: Replica) -> None:
        """An endpoint has no worker: its address is checked, and checked again."""
        endpoint = replica.deployment.endpoint
        found = self._checks.ended(replica.id, endpoint.base_url)
        wanted = replica.ordinal <= replica.deployment.desired_replicas
        age_s = self._checks.age_s(replica.id)
        step = external.decide(replica, endpoint, age_s, replica.failures, wanted, found)
        became_ready = step.state == State.READY != replica.state
        changes = {**step.changes, "ready_at": timezone.now()} if became_ready else dict(step.changes)
        failures = self._failures_of_check(replica, found)
        if failures != replica.failures:
            replica.failures = failures
            replica.save(update_fields=["failures"])
        self.workers.move(replica, reconcile.Decision(step.state, step.reason), **changes)
        if step.check:
            self._checks.begin(replica.id, endpoint.base_url)

    @staticmethod
    def _failures_of_check(replica: Replica, found: external.Checked | None) -> int:
        """A check that passed forgives all; of those that fail, the first is counted by the change of state."""
        if found is None:
            return replica.failures
        if found.addresses:
            return 0
        return replica.failures + (replica.state == State.FAILED)

    # -- all of them --------------------------------------------------------------------------------------------------

    def _end_strangers(self, known: set[UUID]) -> None:
        """Workers whose replica was deleted serve nobody; nor do lines of the ledger."""
        for replica_id in set(self.launcher.known()) - {str(each) for each in known}:
            view = self.launcher.observe(replica_id)
            if view is not None and view.alive:
                log.warning("controller: ending the worker of replica %s, which is no more", replica_id)
                self.launcher.kill(replica_id)
        if known != self._known:
            self.workers.places.forget(known)
            self._known = known

    def _heed_alarms(self) -> None:
        """A borrower gives back what its lender needs: it is drained, and stopped."""
        for alarm in self.devices.alarms:
            if alarm.kind == "pressed" and alarm.replica_id is not None:
                replica = Replica.objects.filter(pk=alarm.replica_id, wanted=True).first()
                if replica is not None:
                    rollout_actions.drain(replica, alarm.reason, PRESSED_DRAIN_S)

    @staticmethod
    def _alone(failing: str, look: Callable[[], None]) -> None:
        """What cannot be judged keeps no replica from being looked after."""
        try:
            look()
        except DatabaseError:
            raise
        except Exception:
            log.exception("controller: %s; trying again", failing)

    def _leads(self) -> bool:
        """Whether this controller may act. A new leader remembers nothing of the last time it led."""
        if not self.lease.held():
            return False
        if self.lease.epoch != self._epoch:
            self._epoch = self.lease.epoch
            self.workers.forget()
            self._known = set()
        return True
