"""The memory ledger, pure: cards, who lives on them, and what is free.

Free = total − Σ over residents of max(reserved, measured) − what the driver shows and nobody here holds. What a lender
lent is taken off its own reserve, since the borrower's line holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from engine.footprint import Footprint

LEND_UNTIL = 0.70
"""What a lender holds or needs is at most this share of what a loan leaves it, when the loan is made."""
DRAIN_FROM = 0.90
"""From this share on its newest borrower is drained."""

_NOISE = 64 << 20  # bytes by which a driver's figures wander


@dataclass(frozen=True, slots=True)
class Resident:
    """One line of the ledger: what a replica holds of a card, in bytes. `lent` is the part that `lender` lent to it.

    A lender never lends below `floor`, and `in_use` is what it cannot do without: less than it holds, where its cache
    of prefixes lies in memory that nobody uses; more, where requests wait for room. None: as much as it holds.
    """

    replica: str
    label: str
    model: str
    reserved: int
    engine: str = ""
    deployment: str = ""
    priority_class: str = "normal"
    measured: int = 0
    in_use: int | None = None
    lends: bool = False
    floor: int = 0
    lender: str = ""
    lent: int = 0
    releasing: bool = False
    cores: tuple[int, ...] = ()
    exclusive: bool = True
    since: float = 0.0


@dataclass(frozen=True)
class Card:
    """A device as the planner sees it.

    `used` is what the driver shows in all; `on_disk` are models whose weights lie on its node.
    """

    uid: str
    node: str
    kind: str
    name: str
    total: int
    used: int = 0
    index: int = 0
    temperature: float | None = None
    cores: tuple[int, ...] = ()
    cordoned: bool = False
    lost: bool = False
    simulated: bool = False
    on_disk: frozenset[str] = frozenset()
    residents: tuple[Resident, ...] = ()

    @property
    def label(self) -> str:
        """As people read it: "gpu-a 3 (A100-80G)"."""
        return f"{self.node} {self.kind if self.kind == 'cpu' else self.index} ({self.name})"

    @cached_property
    def lent_out(self) -> dict[str, int]:
        """Bytes lent, by lender."""
        found: dict[str, int] = {}
        for resident in self.residents:
            if resident.lent:
                found[resident.lender] = found.get(resident.lender, 0) + resident.lent
        return found

    def held(self, resident: Resident) -> int:
        """Bytes that a resident keeps from others."""
        return max(resident.reserved - self.lent_out.get(resident.replica, 0), resident.measured)

    @cached_property
    def claimed(self) -> int:
        """Bytes that all residents keep from others."""
        return sum(self.held(resident) for resident in self.residents)

    @cached_property
    def unattributed(self) -> int:
        """Bytes that the driver shows and no resident is known to have taken."""
        return max(0, self.used - sum(resident.measured for resident in self.residents))

    @cached_property
    def free(self) -> int:
        """Bytes that a newcomer may be given; negative where residents grew over what the card has."""
        return self.total - self.claimed - self.unattributed

    @cached_property
    def models(self) -> frozenset[str]:
        """Of all residents."""
        return frozenset(resident.model for resident in self.residents)

    @cached_property
    def classes(self) -> frozenset[str]:
        """Priority classes of all residents: one, or none."""
        return frozenset(resident.priority_class for resident in self.residents)

    def left(self, resident: Resident) -> int:
        """What a lender may use itself, after what it lent."""
        return resident.reserved - self.lent_out.get(resident.replica, 0)

    def lendable(self, resident: Resident) -> int:
        """Bytes that a resident can lend and still hold and need at most LEND_UNTIL of what is left to it."""
        if not resident.lends or resident.releasing or resident.lender:
            return 0
        needed = max(resident.measured, resident.in_use or 0)
        return max(0, self.left(resident) - max(resident.floor, int(needed / LEND_UNTIL)))

    @cached_property
    def best_lender(self) -> tuple[str, int]:
        """Who can lend most, and how much; ("", 0) where nobody can."""
        offers = [(self.lendable(resident), resident.replica) for resident in self.residents]
        most, who = max(offers, default=(0, ""))
        return (who, most) if most else ("", 0)

    def resident(self, replica: str) -> Resident | None:
        """A replica's line on this card."""
        return next((resident for resident in self.residents if resident.replica == replica), None)

    def given(self, resident: Resident) -> Card:
        """The card with one more resident."""
        return replace(self, residents=(*self.residents, resident))

    def without(self, replica: str) -> Card:
        """The card without a replica's line; who borrowed from it owes nobody any more."""
        rest = tuple(
            replace(other, lender="", lent=0) if other.lender == replica else other
            for other in self.residents
            if other.replica != replica
        )
        return replace(self, residents=rest)

    def with_changed(self, replica: str, **changes: object) -> Card:
        """The card with other values in a replica's line."""
        lines = tuple(replace(r, **changes) if r.replica == replica else r for r in self.residents)  # type: ignore[arg-type]
        return replace(self, residents=lines)


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica asks for, on each of its `cards` devices.

    `peak` is what it needs at its planned concurrency and length. What its engine allocates at start may be more:
    `takes` bytes, or `takes_share` of a device. `kinds` are the kinds of device that its engine runs on. `threads` are
    the cores it wants of a CPU; 0: all that are free. A borrower may be stopped when its lender needs the memory. A
    lender keeps at least `floor` bytes.
    """

    model: str
    engine: str
    peak: Footprint
    deployment: str = ""
    priority_class: str = "normal"
    spread: bool = False
    takes: int = 0
    takes_share: float = 0.0
    cards: int = 1
    kinds: frozenset[str] = field(default_factory=lambda: frozenset(("gpu", "cpu")))
    binding: tuple[str, ...] = ()
    threads: int = 0
    lends: bool = False
    floor: int = 0
    borrows: bool = False

    def reserve_on(self, card: Card) -> int:
        """Bytes that the ledger keeps for it: its peak, or what its engine takes at start where that is more."""
        return max(self.peak.total, self.takes, int(self.takes_share * card.total))


@dataclass(frozen=True, slots=True)
class Pressed:
    """A lender whose use came near what it has left: its newest borrower has to go."""

    card: str
    lender: str
    lender_label: str
    borrower: str
    borrower_label: str
    used: int
    left: int


def pressed(card: Card) -> Iterator[Pressed]:
    """Lenders that use DRAIN_FROM of what their loans leave them, each with its newest borrower."""
    for lender in card.residents:
        left = card.left(lender)
        borrowers = [r for r in card.residents if r.lender == lender.replica and r.lent and not r.releasing]
        used = lender.measured if lender.in_use is None else lender.in_use
        if borrowers and used >= DRAIN_FROM * left:
            newest = max(borrowers, key=lambda resident: (resident.since, resident.replica))
            yield Pressed(card.uid, lender.replica, lender.label, newest.replica, newest.label, used, left)


def left_behind(kind: str, total: int, held: int, used: int, known: int, before: int) -> int:
    """Bytes that a device still shows of a worker that is gone; 0 where its memory is free.

    A CPU frees memory with the process. A card may keep it (a zombie, a driver that hangs): then nobody is known to
    hold it, and the device shows more that is unattributed than when the release began.

    Args:
        held: what the device still counts for the worker.
        used: what it shows in all, of which `known` is the others'.
        before: what was unattributed when the release began.
    """
    if kind == "cpu":
        return 0
    gap = used - known - before
    return held or (gap if gap > max(_NOISE, total // 200) else 0)


def share_of_cores(card: Card, wanted: int) -> tuple[tuple[int, ...], bool]:
    """Ids of the cores that a newcomer gets on a CPU, and whether it has them for itself.

    Free ones where there are enough; else the least crowded, shared: then everybody on them must wait passively, since
    threads that spin for one another collapse when a core is taken away.
    """
    crowd = dict.fromkeys(card.cores, 0)
    for resident in card.residents:
        for core in resident.cores:
            crowd[core] = crowd.get(core, 0) + 1
    free = [core for core in card.cores if not crowd[core]]
    wanted = min(wanted, len(card.cores)) or len(free) or len(card.cores)
    if wanted <= len(free):
        return tuple(free[:wanted]), True
    by_crowd = sorted(card.cores, key=lambda core: (crowd[core], core))
    return tuple(sorted(by_crowd[:wanted])), False
