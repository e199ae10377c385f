"""Which replicas there should be: desired number and revision + what there is → whom to start and whom to drain.

Pure. The controller writes what comes out into rows (`wanted`, `revision`) and calls again; every call is enough by
itself, so a controller that takes over in the middle of a rollout goes on where the rows are.

A replica is *stale* when it runs another revision than the deployment's, or is *tired* (see fleet.recycling). Stale
ones are replaced one at a time:

    surge  one more is started; once it is ready a stale one is drained           ready ≥ desired throughout
    dip    there was no room for one more: a stale one is drained, then replaced   ready ≥ desired − 1 throughout

Whoever serves nobody (has no worker, loads, or failed) is replaced without either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from console.fleet.models import Replica

State = Replica.State
_WORST_FIRST = (
    State.STOPPED, State.PENDING, State.FAILED, State.HUNG, State.STARTING, State.LOADING, State.VERIFYING,
    State.DRAINING, State.READY,
)  # fmt: skip


@dataclass(frozen=True)
class Have:
    """One replica's row, and what is known of it."""

    ordinal: int
    revision: int
    state: str
    wanted: bool = True
    tired: str = ""  # why a fresh one should take its place
    refused: bool = False  # pending: the planner found no room for it
    failures: int = 0  # failed starts and deaths in a row
    in_state_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.wanted and self.state == State.READY

    @property
    def is_leaving(self) -> bool:
        """Drained or ended: it serves nobody new, and still holds what it holds."""
        return not self.wanted and self.state != State.STOPPED


@dataclass(frozen=True)
class Start:
    """Want a replica: a new one, or one that had been stopped."""

    ordinal: int
    revision: int
    why: str


@dataclass(frozen=True)
class Drain:
    """Want a replica no longer."""

    ordinal: int
    why: str


Step = Start | Drain


@dataclass(frozen=True)
class Group:
    """A deployment's replicas, sorted by what is to become of them."""

    desired: int
    revision: int
    rows: tuple[Have, ...]

    @property
    def active(self) -> list[Have]:
        return [row for row in self.rows if row.wanted]

    @property
    def stale(self) -> list[Have]:
        return [row for row in self.active if row.revision != self.revision or row.tired]

    @property
    def stale_revisions(self) -> set[int]:
        return {row.revision for row in self.active} - {self.revision}

    @property
    def fresh(self) -> list[Have]:
        return [row for row in self.active if row.revision == self.revision and not row.tired]

    @property
    def ready(self) -> int:
        return sum(row.is_ready for row in self.rows)

    @property
    def leaving(self) -> list[Have]:
        return [row for row in self.rows if row.is_leaving]

    @property
    def refused(self) -> list[Have]:
        """Fresh ones without room: there cannot be one more, so there must be one fewer first."""
        return [row for row in self.fresh if row.refused and row.state == State.PENDING]


def plan(desired: int, revision: int, rows: Sequence[Have], dip: bool = False) -> list[Step]:
    """Return whom to start and drain now; nothing where there is nothing to do, or something must happen first.

    Args:
        desired: how many there should be.
        revision: that they should run.
        rows: all of the deployment's replicas.
        dip: whether it is known already that there is no room for one more.
    """
    group = Group(desired, revision, tuple(rows))
    missing = desired - len(group.active)
    if missing > 0:
        why = _why_started(group)
        return [Start(ordinal, revision, why) for ordinal in _free_ordinals(rows, missing)]
    if group.stale:
        return _replace(group, dip)
    surplus = _worst_first(group.active)[: len(group.active) - desired]
    return [Drain(row.ordinal, _fewer(group)) for row in surplus]


def _replace(group: Group, dip: bool) -> list[Step]:
    """One step of putting fresh replicas in the place of stale ones. There are at least as many as desired."""
    idle = [row for row in group.stale if not row.is_ready]
    if idle:
        return [Drain(row.ordinal, _why_drained(row, group)) for row in idle]
    waiting = [row for row in group.fresh if not row.is_ready]
    extra = min(len(waiting), len(group.active) - group.desired - 1)
    if extra > 0:  # fewer were wanted meanwhile
        return [Drain(row.ordinal, _fewer(group)) for row in _worst_first(waiting)[:extra]]
    victim = _worst_first(group.stale)[0]
    out = Drain(victim.ordinal, _why_drained(victim, group))
    if len(group.active) > group.desired and group.ready > group.desired:
        return [out]
    may_dip = not group.leaving and group.ready >= group.desired
    if group.refused or (dip and not waiting):
        return [out] if may_dip else []
    if waiting or group.leaving or len(group.active) > group.desired:
        return []
    (ordinal,) = _free_ordinals(group.rows, 1)
    return [Start(ordinal, group.revision, f"Takes the place of r{victim.ordinal}: {_lower(out.why)}")]


def _free_ordinals(rows: Iterable[Have], count: int) -> list[int]:
    """The lowest numbers that no replica has, or one that was stopped."""
    taken = {row.ordinal for row in rows if row.wanted or row.is_leaving}
    found: list[int] = []
    number = 1
    while len(found) < count:
        if number not in taken:
            found.append(number)
        number += 1
    return found


def _worst_first(rows: Iterable[Have]) -> list[Have]:
    """In the order in which they can be done without: who serves nobody first, then the youngest number."""
    return sorted(rows, key=lambda row: (_WORST_FIRST.index(State(row.state)), -row.ordinal))


def _why_started(group: Group) -> str:
    return f"{group.desired} wanted at revision {group.revision}"


def _why_drained(row: Have, group: Group) -> str:
    if row.revision != group.revision:
        return f"Revision {group.revision} takes the place of revision {row.revision}"
    return f"Recycled: {row.tired}"


def _fewer(group: Group) -> str:
    return f"Its deployment wants {group.desired} instead of {len(group.active)}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
