"""A rollout under way as steps that a person can follow: what is done, what goes on now, what is still to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from console.fleet.models import Replica, Rollout
from console.fleet.rollout import OPEN

_GONE = {Replica.State.STOPPED}
_DOWN = {Replica.State.FAILED, Replica.State.HUNG}
DONE, NOW, COMING, BAD = "good", "busy", "idle", "bad"  # of dots


@dataclass(frozen=True)
class Step:
    """One of them. `since` is when what goes on now began."""

    title: str
    css: str
    text: str
    since: datetime | None = None

    @property
    def place(self) -> str:
        """Of its cell: the one that goes on now stands out."""
        return {NOW: "now", BAD: "now", COMING: "todo"}.get(self.css, "")


def steps(rollout: Rollout, replicas: Sequence[Replica], stats: Mapping[str, Any]) -> tuple[Step, ...]:
    """The steps of a rollout; none once it is over: its replicas go their own ways. `stats` as `live.read` tells."""
    if rollout.state not in OPEN:
        return ()
    aim = rollout.back_to or rollout.to_revision
    fresh = [each for each in replicas if each.wanted and each.revision == aim]
    stale = [each for each in replicas if each.revision != aim and each.state not in _GONE]
    wanted = max(rollout.deployment.desired_replicas, 1)
    rising = (_start(fresh, wanted), _verify(fresh, wanted))
    drain = _drain(stale, stats)
    order = (drain, *rising) if rollout.strategy == Rollout.Strategy.DIP else (*rising, drain)
    return (_begin(rollout, aim), *order, Step(_("Done"), COMING, _("All on revision %(n)s, verified.") % {"n": aim}))


def _begin(rollout: Rollout, aim: int) -> Step:
    if rollout.back_to:
        return Step(_("Back to revision %(n)s") % {"n": aim}, DONE, rollout.reason, rollout.started_at)
    dips = rollout.strategy == Rollout.Strategy.DIP
    text = _("No room for one more: one goes first.") if dips else _("One more is started before an old one goes.")
    return Step(_("Begun"), DONE, text, rollout.started_at)


def _start(fresh: Sequence[Replica], wanted: int) -> Step:
    up = [each for each in fresh if each.state in (Replica.State.VERIFYING, Replica.State.READY)]
    title, count = _("Start"), _("%(n)s of %(all)s started.") % {"n": len(up), "all": wanted}
    down = next((each for each in fresh if each.state in _DOWN), None)
    if down is not None:
        return Step(title, BAD, f"{_name(down)}: {down.reason}", down.state_at)
    coming = next((each for each in fresh if each not in up), None)
    if coming is None:
        return Step(title, DONE if len(up) >= wanted else COMING, count)
    told = f"{count} {_name(coming)}: {coming.get_state_display()}"
    if coming.failures:
        again = ngettext("after %(n)s failure", "after %(n)s failures", coming.failures) % {"n": coming.failures}
        told = f"{told}, {again}"
    return Step(title, NOW, told, coming.state_at)


def _verify(fresh: Sequence[Replica], wanted: int) -> Step:
    ready = sum(each.state == Replica.State.READY for each in fresh)
    now = [each for each in fresh if each.state == Replica.State.VERIFYING]
    text = _("%(n)s of %(all)s answered a test prompt.") % {"n": ready, "all": wanted}
    css = NOW if now else DONE if ready >= wanted else COMING
    return Step(_("Verify"), css, text, now[0].state_at if now else None)


def _drain(stale: Sequence[Replica], stats: Mapping[str, Any]) -> Step:
    if not stale:
        return Step(_("Drain"), DONE, _("No old replica is left."))
    going = [each for each in stale if not each.wanted]
    if not going:
        left = ngettext("%(n)s old replica serves on.", "%(n)s old replicas serve on.", len(stale)) % {"n": len(stale)}
        return Step(_("Drain"), COMING, left)
    first = going[0]
    running = int((stats.get(str(first.id)) or {}).get("running", 0))
    text = ngettext("%(r)s ends %(n)s request.", "%(r)s ends %(n)s requests.", running)
    return Step(_("Drain"), NOW, text % {"r": _name(first), "n": running}, first.state_at)


def _name(replica: Replica) -> str:
    return f"r{replica.ordinal}"
