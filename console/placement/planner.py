"""Where a replica goes, pure: filter → fit → score, and of every card why not.

`plan` answers one question. `Board` answers many over thousands of cards: it keeps what it found out about each node
for each kind of need, and looks again only at nodes where something changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from console.placement.ledger import Card, Need, Resident, share_of_cores

BUFFER = 0.20
MIXED_BUFFER = 0.40
_COOL, _HOT = 50.0, 85.0  # degrees Celsius: from no penalty to the whole of it
_PACK = {"space": 0.60, "disk": 0.20, "cool": 0.20}
_SPREAD = {"space": 0.35, "apart": 0.35, "disk": 0.15, "cool": 0.15}
_BORROWING = 0.30
_SHARING = 0.20


@dataclass(frozen=True, slots=True)
class Policy:
    """How the buffer is read: of the need ("need": free ≥ peak × 1.2) or of the card ("card": 20 % stays free)."""

    buffer_of: str = "need"

    def buffer(self, need: Need, card: Card) -> float:
        """The share: larger where models mix on a card."""
        return BUFFER if card.models <= {need.model} else MIXED_BUFFER

    def needed(self, need: Need, card: Card) -> int:
        """Bytes that must be free for a need to be admitted, buffer included."""
        share = self.buffer(need, card)
        return need.peak.total + int(share * (card.total if self.buffer_of == "card" else need.peak.total))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why, as a code and its figures; console.placement.words makes the sentence."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the planner thinks of one card. `reasons` against it, all of them; empty where it fits. Bytes."""

    uid: str
    node: str
    label: str
    simulated: bool
    needed: int
    free: int
    buffer: float
    reasons: tuple[Reason, ...]
    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    lender: str = ""
    lent: int = 0
    chosen: bool = False

    @property
    def fits(self) -> bool:
        """Whether a replica could go there."""
        return not self.reasons


@dataclass(frozen=True, slots=True)
class Share:
    """What a placed replica gets of one device."""

    uid: str
    reserved: int
    lender: str = ""
    lent: int = 0
    cores: tuple[int, ...] = ()
    exclusive: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: where, or nowhere, and why. `verdicts` are of every card that was looked at, best first."""

    need: Need
    shares: tuple[Share, ...]
    reason: Reason
    verdicts: tuple[Verdict, ...] = ()
    score: float | None = None

    @property
    def placed(self) -> bool:
        """Whether there is room."""
        return bool(self.shares)

    @property
    def devices(self) -> tuple[str, ...]:
        """Uids of the devices it goes to."""
        return tuple(share.uid for share in self.shares)


def plan(need: Need, cards: Iterable[Card], policy: Policy | None = None) -> Plan:
    """Where one replica goes, with a verdict on every card."""
    return Board(cards, policy).plan(need)


# -- one card -------------------------------------------------------------------------------------------------------


def objections(need: Need, card: Card, policy: Policy) -> Iterator[Reason]:
    """All that speaks against a card, the filters before the fit."""
    if card.lost:
        yield Reason("lost")
    if card.cordoned:
        yield Reason("cordoned")
    if need.binding and card.uid not in need.binding:
        yield Reason("bound", {"cards": len(need.binding)})
    if not card.simulated and card.kind not in need.kinds:
        yield Reason("kind", {"engine": need.engine, "kind": card.kind})
    if card.classes and need.priority_class not in card.classes:
        yield Reason("class", {"theirs": ", ".join(sorted(card.classes)), "ours": need.priority_class})
    yield from _space(need, card, policy)


def _space(need: Need, card: Card, policy: Policy) -> Iterator[Reason]:
    needed, reserve = policy.needed(need, card), need.reserve_on(card)
    # A loan covers what the newcomer keeps, never what others grew beyond their plan.
    room = card.free + (card.best_lender[1] if need.borrows and card.free >= 0 else 0)
    values = {"peak": need.peak.total, "needed": needed, "free": card.free, "missing": needed - room}
    if needed > room:
        if card.models <= {need.model}:
            yield Reason("space", values)
        else:
            yield Reason("mixed", {**values, "models": ", ".join(sorted(card.models - {need.model}))})
    elif reserve > room:
        share = max(0, int(100 * room / card.total)) / 100 if need.takes_share else 0.0
        yield Reason("takes", {"takes": reserve, "free": card.free, "share": share})


def loan(need: Need, card: Card, policy: Policy) -> tuple[str, int]:
    """Who must lend how much so that the need fits; ("", 0) where nobody has to.

    Never more than the borrower keeps: when it leaves, its lender has back what it lent, and nobody else has taken it.
    """
    reserve = need.reserve_on(card)
    missing = max(policy.needed(need, card), reserve) - card.free
    return (card.best_lender[0], min(missing, reserve)) if need.borrows and missing > 0 else ("", 0)


def score(need: Need, card: Card, policy: Policy, siblings: int = 0) -> tuple[float, dict[str, float]]:
    """How good a card that fits is, 0 to 1, and the parts of that. `siblings`: replicas of its deployment there."""
    after = max(0.0, (card.free - need.reserve_on(card)) / card.total)
    parts = {
        "space": after if need.spread else 1 - after,
        "disk": float(need.model in card.on_disk),
        "cool": coolness(card),
        "apart": 1 / (1 + siblings),
    }
    weights = _SPREAD if need.spread else _PACK
    whole = sum(weight * parts[name] for name, weight in weights.items())
    if loan(need, card, policy)[1]:
        whole -= _BORROWING
    if card.cores and not share_of_cores(card, need.threads)[1]:
        whole -= _SHARING
    return round(whole, 6), {name: round(parts[name], 3) for name in weights}


def coolness(card: Card) -> float:
    """1 for a cool card, 0 for a hot one, in twentieths: a degree more or less decides nothing."""
    if card.temperature is None:
        return 1.0
    return round(20 * (1 - min(1.0, max(0.0, (card.temperature - _COOL) / (_HOT - _COOL))))) / 20


# -- many cards -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Table:
    """What is known of every node for one need: a heap of (−score, order, version, node), stale entries skipped.

    `worth` has the score of every kind of card, None where it does not fit: most cards are like many others.
    """

    heap: list[tuple[float, int, int, str]] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    worth: dict[tuple[int, bool, int], float | None] = field(default_factory=dict)


class Board:
    """Cards with their residents, changed by events and asked for plans."""

    def __init__(self, cards: Iterable[Card], policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.cards: dict[str, Card] = {}
        self.homes: dict[str, tuple[Need, tuple[str, ...]]] = {}
        self._nodes: dict[str, list[str]] = {}
        self._order: dict[str, int] = {}
        self._tables: dict[Need, _Table] = {}
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._kind_of: dict[str, int] = {}
        for card in cards:
            self._keep(card)
            self._nodes.setdefault(card.node, []).append(card.uid)
            self._order.setdefault(card.node, len(self._order))

    def plan(self, need: Need) -> Plan:
        """The best place for a need, with a verdict on every card."""
        found = self.choose(need)
        verdicts = sorted(
            (self._verdict(need, card, found.devices) for card in self.cards.values()),
            key=lambda verdict: (not verdict.chosen, not verdict.fits, -(verdict.score or 0), len(verdict.reasons)),
        )
        reason = found.reason if found.placed else _refusal(verdicts)
        return replace(found, verdicts=tuple(verdicts), reason=reason)

    def choose(self, need: Need) -> Plan:
        """As `plan`, without the verdicts: fast on thousands of cards."""
        table = self._table(need)
        while table.heap:
            negative, _order, version, node = table.heap[0]
            if table.versions[node] == version:
                uids = table.chosen[node]
                shares = tuple(self._share(need, self.cards[uid]) for uid in uids)
                return Plan(need, shares, self._praise(need, uids), score=-negative)
            heapq.heappop(table.heap)
        return Plan(need, (), Reason("nowhere"))

    def put(self, plan: Plan, replica: str, label: str = "", since: float = 0.0) -> None:
        """Note a plan's replica on its cards."""
        need = plan.need
        for share in plan.shares:
            self.change(
                self.cards[share.uid].given(
                    Resident(
                        replica, label, need.model, share.reserved, need.engine, need.deployment, need.priority_class,
                        lends=need.lends, floor=need.floor, lender=share.lender, lent=share.lent, cores=share.cores,
                        exclusive=share.exclusive, since=since,
                    )
                )
            )  # fmt: skip
        self.homes[replica] = (need, plan.devices)

    def drop(self, replica: str) -> None:
        """Forget a replica: the driver shows its memory free."""
        _need, uids = self.homes.pop(replica)
        for uid in uids:
            self.change(self.cards[uid].without(replica))

    def change(self, card: Card) -> None:
        """A card is another one now: measured, grown, cordoned, lost."""
        self._keep(card)
        for table in self._tables.values():
            table.dirty.add(card.node)

    def lose(self, nodes: Iterable[str]) -> list[str]:
        """Nodes are gone. Returns the replicas that must move: those with a card there, and no others."""
        gone = set(nodes)
        for node in gone:
            for uid in self._nodes[node]:
                self.change(replace(self.cards[uid], lost=True))
        return [r for r, (_need, uids) in self.homes.items() if any(self.cards[uid].node in gone for uid in uids)]

    def siblings(self, need: Need, node: str) -> int:
        """Replicas of the same deployment on a node."""
        if not need.deployment:
            return 0
        found = {
            resident.replica
            for uid in self._nodes[node]
            for resident in self.cards[uid].residents
            if resident.deployment == need.deployment
        }
        return len(found)

    # -- what is known ------------------------------------------------------------------------------------------------

    def _table(self, need: Need) -> _Table:
        table = self._tables.get(need)
        if table is None:
            table = self._tables[need] = _Table(dirty=set(self._nodes))
        for node in table.dirty:
            self._look(table, need, node)
        table.dirty.clear()
        return table

    def _keep(self, card: Card) -> None:
        """Cards of one kind are worth the same to every need that is not bound by hand."""
        self.cards[card.uid] = card
        kind = (
            card.name, card.kind, card.total, card.free, card.classes, card.models, card.best_lender[1], card.cordoned,
            card.lost, card.simulated, coolness(card), card.cores and card.uid,
        )  # fmt: skip
        self._kind_of[card.uid] = self._kinds.setdefault(kind, len(self._kinds))

    def _look(self, table: _Table, need: Need, node: str) -> None:
        """Judge a node anew; its older entries in the heap are stale from now on."""
        version = table.versions[node] = table.versions.get(node, 0) + 1
        best = self._best_group(table, need, node)
        if best is not None:
            whole, uids = best
            table.chosen[node] = uids
            heapq.heappush(table.heap, (-whole, self._order[node], version, node))

    def _best_group(self, table: _Table, need: Need, node: str) -> tuple[float, tuple[str, ...]] | None:
        """The best cards of one name on a node, as many as the need has, and their mean score."""
        siblings = self.siblings(need, node) if need.spread else 0
        by_name: dict[str, list[tuple[float, int, str]]] = {}
        for uid in self._nodes[node]:
            card = self.cards[uid]
            worth = self._worth(table, need, card, siblings)
            if worth is not None:
                by_name.setdefault(card.name, []).append((-worth, card.index, uid))
        best: tuple[float, tuple[str, ...]] | None = None
        for entries in by_name.values():
            if len(entries) >= need.cards:
                taken = sorted(entries)[: need.cards]
                whole = -sum(entry[0] for entry in taken) / need.cards
                if best is None or whole > best[0]:
                    best = (whole, tuple(entry[2] for entry in taken))
        return best

    def _worth(self, table: _Table, need: Need, card: Card, siblings: int) -> float | None:
        """The score of a card, None where it does not fit. A card bound by hand, or a CPU, is looked at itself."""
        if need.binding or card.cores:
            return self._judged(need, card, siblings)
        key = (self._kind_of[card.uid], need.model in card.on_disk, siblings)
        if key not in table.worth:
            table.worth[key] = self._judged(need, card, siblings)
        return table.worth[key]

    def _judged(self, need: Need, card: Card, siblings: int) -> float | None:
        if next(objections(need, card, self.policy), None) is not None:
            return None
        return score(need, card, self.policy, siblings)[0]

    def _share(self, need: Need, card: Card) -> Share:
        lender, lent = loan(need, card, self.policy)
        cores, exclusive = share_of_cores(card, need.threads) if card.cores else ((), True)
        return Share(card.uid, need.reserve_on(card), lender, lent, cores, exclusive)

    def _verdict(self, need: Need, card: Card, chosen: tuple[str, ...]) -> Verdict:
        reasons = tuple(objections(need, card, self.policy))
        whole, parts = (None, {}) if reasons else score(need, card, self.policy, self.siblings(need, card.node))
        alone = need.cards > 1 and card.uid not in chosen and not reasons
        if alone and self._best_group(self._table(need), need, card.node) is None:
            reasons, whole = (Reason("group", {"cards": need.cards}),), None
        lender, lent = ("", 0) if reasons else loan(need, card, self.policy)
        return Verdict(
            card.uid, card.node, card.label, card.simulated, self.policy.needed(need, card), card.free,
            self.policy.buffer(need, card), reasons, whole, parts, lender, lent, card.uid in chosen,
        )  # fmt: skip

    def _praise(self, need: Need, uids: tuple[str, ...]) -> Reason:
        card = min((self.cards[uid] for uid in uids), key=lambda card: card.free)
        values = {
            "cards": len(uids), "card": card.label, "needed": self.policy.needed(need, card), "free": card.free,
            "percent": round(100 * self.policy.buffer(need, card)), "peak": need.peak.total,
        }  # fmt: skip
        lender, lent = loan(need, card, self.policy)
        if lent:
            owner = card.resident(lender)
            return Reason("borrowed", {**values, "lent": lent, "lender": owner.label if owner else lender})
        return Reason("placed", values)


def _refusal(verdicts: list[Verdict]) -> Reason:
    """Why nowhere, in figures: how many cards for each first reason, and the nearest miss of those with too little."""
    if not verdicts:
        return Reason("no_cards")
    counts: dict[str, int] = {}
    for verdict in verdicts:
        code = verdict.reasons[0].code
        counts[code] = counts.get(code, 0) + 1
    if len(verdicts) == 1:
        return verdicts[0].reasons[0]
    short = [v for v in verdicts if v.reasons[0].code in ("space", "mixed", "takes")]
    nearest = min(short, key=lambda verdict: verdict.needed - verdict.free, default=None)
    values: dict[str, Any] = {"counts": counts}
    if nearest is not None:
        values |= {"nearest": nearest.label, "needed": nearest.needed, "free": nearest.free}
    return Reason("nowhere", values)
