"""One replica and its worker: what is seen of it, and the one step that follows. fleet.reconcile decides; this acts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from django.utils import timezone

from console.fleet import launching, probe, reconcile, rollout_actions, starts, verifying
from console.fleet.actions import move_replica
from console.fleet.ending import Endings
from console.fleet.heartbeat import Heartbeats
from console.fleet.models import Replica
from console.fleet.placing import Devices, NoPlace, Place, Places, pool_usage, pool_wanted
from console.fleet.reshape import Known
from console.fleet.wear import Wear
from console.fleet.worker_logs import last_line
from console.placement.inventory import Living
from engine.adapters import adapter
from engine.adapters.base import AdapterError
from engine.launchers.base import Launcher, WorkerView

log = logging.getLogger(__name__)

State = Replica.State


class Workers:
    """Looks after replicas one at a time. What it remembers, a new leader learns anew."""

    def __init__(self, launcher: Launcher, heartbeats: Heartbeats, devices: Devices) -> None:
        self.launcher = launcher
        self.endings = Endings(launcher)
        self.places = Places()
        self._heartbeats = heartbeats
        self._devices = devices
        self._readiness = verifying.Readiness()
        self._verifications: dict[UUID, probe.Verification] = {}
        self._since: dict[UUID, tuple[str, float]] = {}  # state and the monotonic time it was entered
        self._living: dict[UUID, Living] = {}
        self._stats: dict[str, dict[str, Any]] = {}
        self._wear = Wear(launcher)
        self._proven: set[tuple[UUID, int]] = set()  # revisions that are known to be marked as verified

    def forget(self) -> None:
        """A new leader knows nothing of the last time it led."""
        self._since.clear()
        self._verifications.clear()
        self._living.clear()
        self._proven.clear()

    def listen(self) -> None:
        """Take what workers said last for this tick."""
        self._stats = self._heartbeats.said()

    @property
    def living(self) -> Mapping[UUID, Living]:
        """Workers that were alive when they were last looked at."""
        return self._living

    @property
    def said(self) -> Mapping[str, Mapping[str, Any]]:
        """What workers said last, by the id of their replica; of those that said nothing of late, nothing."""
        return self._stats

    def stats(self, replica: Replica) -> dict[str, Any] | None:
        """What a worker said last; None where that is too old to mean anything."""
        return self._stats.get(str(replica.id))

    def known(self, replica: Replica) -> Known:
        """What fleet.reshape wants to know of a replica beside its row."""
        _state, since = self._entered(replica)
        full = replica.state == State.PENDING and replica.id in self.places.full
        refused = self.places.refused.get(replica.id, "") if full else ""
        return Known(time.monotonic() - since, self._wear.tired(replica, self.stats(replica) or {}), refused)

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, replica: Replica, may_act: Callable[[], bool]) -> None:
        """Look at one replica and do the one thing that follows. `may_act` is asked again before anything starts."""
        view = self.launcher.observe(str(replica.id))
        ours = view if view is not None and view.epoch == replica.epoch else None
        if ours is None and view is not None and view.alive:
            log.warning("controller: ending a worker of epoch %s of %s, now %s", view.epoch, replica, replica.epoch)
            self.launcher.kill(str(replica.id))
        if self.endings.look(replica):
            return  # what was seen of it is not true any more
        seen = self._seen(replica, ours)
        if self._verified(replica, ours):
            return
        self._prove(replica)
        state, since = self._entered(replica)
        decision = reconcile.decide(
            state, time.monotonic() - since, replica.failures, replica.wanted, seen,
            replica.why or "Its deployment wants it", replica.drain_s or reconcile.DRAIN_S,
        )  # fmt: skip
        self._act(replica, ours, decision, may_act)

    def move(self, replica: Replica, decision: reconcile.Decision, **changes: Any) -> None:
        """Write a new state, and what comes with it."""
        if decision.state == replica.state and not changes:
            return
        if decision.state == State.FAILED != replica.state:
            changes["failures"] = self._failures_after(replica)
        move_replica(replica, decision.state, decision.reason, **changes)
        log.info("replica %s: %s, %s", replica, decision.state, decision.reason)
        self._since[replica.id] = (decision.state, time.monotonic())
        if decision.state == State.STOPPED:
            self.places.give_back(replica, decision.reason)
            self._devices.soon()
            launching.remove_sockets(replica)

    def _act(
        self, replica: Replica, view: WorkerView | None, decision: reconcile.Decision, may_act: Callable[[], bool]
    ) -> None:
        match decision.act:
            case reconcile.Act.KILL if decision.state == State.HUNG:
                self.move(replica, decision)  # out of rotation first
                self.endings.autopsy(replica, replica.reason)
            case reconcile.Act.KILL:
                self.move(replica, decision)
                self.endings.kill(replica)
            case reconcile.Act.END:
                self.endings.drain(replica)
            case reconcile.Act.LAUNCH:
                self._launch(replica, decision, may_act)
            case reconcile.Act.VERIFY if view is not None:
                self._begin_verification(replica, view, decision)
            case _:
                self.move(replica, decision)

    def _seen(self, replica: Replica, view: WorkerView | None) -> reconcile.Seen:
        if view is None or not view.alive:
            self._living.pop(replica.id, None)
            self._heartbeats.forget(str(replica.id))
        if view is None:
            return reconcile.Seen()
        if not view.alive:
            tail = last_line(self.launcher.log_file(str(replica.id)))
            return reconcile.Seen(present=True, exit_reason=view.exit_reason, log_tail=tail)
        if replica.pid != view.pid:
            replica.pid, replica.pid_started_at = view.pid, float(view.pid_ticks)
            replica.save(update_fields=["pid", "pid_started_at"])
        facts = self._readiness.facts(replica, view.ready)
        self._living[replica.id] = self._living_of(replica, view, facts)
        stats = self.stats(replica)
        return reconcile.Seen(
            present=True,
            alive=True,
            ready=bool(facts),
            probe=self._hear(replica, facts),
            requests=None if stats is None else int(stats.get("running", 0)) + int(stats.get("waiting", 0)),
            weights_bytes=replica.deployment.model.weights_bytes or 0,
            robbed=verifying.robbed(replica) if replica.state == State.READY else "",
        )

    def _hear(self, replica: Replica, facts: Mapping[str, Any]) -> reconcile.Probe | None:
        """Watch the worker once it is ready; the newest of what it said."""
        if not facts:
            self._heartbeats.forget(str(replica.id))
            return None
        self._heartbeats.watch(str(replica.id), verifying.address_of(replica, facts))
        share = self._devices.pools.get(replica.id)
        if share is not None:
            self._heartbeats.lend(str(replica.id), replica.uds, share)
        return self._heartbeats.heard(str(replica.id))

    def _living_of(self, replica: Replica, view: WorkerView, facts: Mapping[str, Any]) -> Living:
        stats, runtime = self.stats(replica) or {}, replica.deployment.runtime
        return Living(
            pid=view.pid,
            ready=replica.state == State.READY,
            busy=stats.get("busy"),
            weights_bytes=int(facts.get("weights_bytes") or 0),
            kv_bytes=int(facts.get("kv_bytes") or 0),
            kv_usage=pool_usage(stats),
            kv_wanted=pool_wanted(stats),
            runtime=runtime.requirement if runtime else "",
        )

    # -- launching ----------------------------------------------------------------------------------------------------

    def _launch(self, replica: Replica, decision: reconcile.Decision, may_act: Callable[[], bool]) -> None:
        if not self.places.due(replica.id, self._devices.freed_at):
            return
        epoch = replica.epoch + 1
        try:
            found = launching.configured(replica)
            place = self._find_place(replica, found)
            uds = launching.socket_of(replica, epoch)
            launch = launching.launch_of(replica, epoch, uds, found, place, self.launcher)
        except NoPlace as error:
            self._wait_for_room(replica, str(error))
            return
        except (AdapterError, OSError) as error:
            self.move(replica, reconcile.Decision(State.FAILED, str(error)))
            return
        # The row first: a controller that dies in between finds no worker of this epoch and starts one.
        self.move(
            replica, decision, epoch=epoch, uds=str(uds), restarts=replica.restarts + bool(replica.epoch), pid=None,
            pid_started_at=None, metrics_url="", facts={}, started_at=timezone.now(), ready_at=None,
            devices=list(place.devices), settled_rss_bytes=None,
        )  # fmt: skip
        if not may_act():  # somebody else leads by now, and sees the row
            return
        try:
            self.launcher.launch(launch)
        except OSError as error:
            self.move(replica, reconcile.Decision(State.FAILED, f"Its process could not be started: {error}"))

    def _find_place(self, replica: Replica, found: launching.Configured) -> Place:
        """Only who is there beyond its deployment's minimum may borrow: it can be taken back."""
        deployment = replica.deployment
        others = Replica.objects.filter(deployment=deployment, wanted=True).exclude(pk=replica.pk).count()
        borrows = deployment.autoscale and others >= max(1, deployment.min_replicas)
        if borrows:  # a lender may have grown since the last look into what it would lend now
            self._devices.look()
        return self.places.find(replica, found.config, found.runtime, launching.threads_wanted(), borrows)

    def _wait_for_room(self, replica: Replica, reason: str) -> None:
        """The first refusal is a change of state or reason; later ones only bring the figures up to date."""
        if replica.state != State.PENDING or not replica.reason:
            self.move(replica, reconcile.Decision(State.PENDING, reason), pid=None)
        elif replica.reason != reason:
            replica.reason = reason
            replica.save(update_fields=["reason"])

    # -- verification: a real generation, off the loop ----------------------------------------------------------------

    def _begin_verification(self, replica: Replica, view: WorkerView, decision: reconcile.Decision) -> None:
        facts = self._readiness.facts(replica, view.ready)
        facts["socket"] = verifying.socket_identity(replica.uds)
        metrics = facts.get("introspection_url")
        self.move(
            replica, decision, facts=facts, metrics_url=f"{metrics}/metrics" if metrics else "",
            engine_version=str(facts.get("engine_version", ""))[:40], device=str(facts.get("device", "cpu"))[:64],
        )  # fmt: skip
        judges_itself = adapter(replica.deployment.engine).judges_itself
        words = 0 if judges_itself else probe.measured_words(int(facts.get("max_model_len") or 0))
        served_name = str(facts.get("model", ""))
        self._verifications[replica.id] = probe.Verification(replica.uds, served_name, words=words)

    def _verified(self, replica: Replica, view: WorkerView | None) -> bool:
        """Finish a verification that is under way. Returns whether one still is, or just ended."""
        verification = self._verifications.get(replica.id)
        if verification is None or view is None or not view.alive or replica.state != State.VERIFYING:
            self._verifications.pop(replica.id, None)
            return False
        if not replica.wanted:
            return False
        if verification.is_alive():
            return True
        del self._verifications[replica.id]
        if verification.seconds is None:
            self.move(replica, reconcile.Decision(State.FAILED, verification.failure))
            self.endings.kill(replica)
            return True
        reason = f"Answered a test prompt in {verification.seconds * 1000:.0f} ms"
        facts = replica.facts | ({"token_s": verification.token_s} if verification.token_s else {})
        self.move(replica, reconcile.Decision(State.READY, reason), ready_at=timezone.now(), facts=facts)
        starts.learn(replica)
        return True

    def _prove(self, replica: Replica) -> None:
        """A revision of which a replica is ready can be gone back to."""
        key = (replica.deployment_id, replica.revision)
        if replica.state == State.READY and key not in self._proven:
            rollout_actions.verified(replica.deployment, replica.revision)
            self._proven.add(key)

    # -- what is remembered -------------------------------------------------------------------------------------------

    def _entered(self, replica: Replica) -> tuple[str, float]:
        """State and the time it was entered. A new leader counts from now, but a back-off goes on where it was."""
        known = self._since.get(replica.id)
        if known is None or known[0] != replica.state:
            before = 0.0
            if replica.state == State.FAILED and replica.state_at is not None:
                before = max(0.0, (timezone.now() - replica.state_at).total_seconds())
            known = self._since[replica.id] = (replica.state, time.monotonic() - before)
        return known

    def _failures_after(self, replica: Replica) -> int:
        _state, since = self._entered(replica)
        settled = replica.state == State.READY and time.monotonic() - since > reconcile.SETTLED_S
        return 1 if settled else replica.failures + 1
