"""Pretended cards: they fill while a worker loads, heat up while it works, and take a moment to show memory free.

Where they stand in for real ones (FANLIGHT_DEVICES=sim:…), a replica's worker runs on the CPU; everything that shows
such a card says that it is simulated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.devices.base import DeviceFacts, DevicesError, Measured, Occupant

LOAD_S = 6.0
"""An empty card is full after so long."""
FREE_S = 2.0
"""Memory of an ended worker shows as free after so long."""
DRIVER_SHARE = 0.006
"""What a driver keeps of a card for itself."""
_IDLE_C, _HOT_C, _HEAT_S = 34.0, 78.0, 60.0
_POWER = {"H200": 700.0, "H100": 700.0, "A100": 400.0, "L40S": 350.0, "L4": 72.0, "A10": 150.0, "B200": 1000.0}
_GROUP = re.compile(r"(\d{1,4})x([A-Za-z0-9]{1,20})-(\d{1,4})G")
_MOST = 16_384


@dataclass(slots=True)
class _State:
    """A card as it was at the last look."""

    heat: float = _IDLE_C
    busy: float = 0.02


class SimulatedProvider:
    """`8xA100-80G,4xL40S-48G`: a node for each group. Raises DevicesError."""

    def __init__(self, spec: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cards = [card for number, group in enumerate(spec.split(",")) for card in _cards(number, group)]
        if len(self._cards) > _MOST:
            raise DevicesError(f"at most {_MOST:,} simulated cards")
        self._clock = clock
        self._at: float | None = None
        self._held: dict[tuple[str, str], float] = {}
        self._states = {card.uid: _State() for card in self._cards}

    def inventory(self) -> list[DeviceFacts]:
        """See Provider."""
        return list(self._cards)

    def measure(self, occupants: Sequence[Occupant]) -> list[Measured]:
        """See Provider. At the first look everybody is loaded already, as after a controller's restart."""
        now = self._clock()
        passed = None if self._at is None else max(0.0, now - self._at)
        self._at = now
        by_card: dict[str, list[Occupant]] = {}
        for occupant in occupants:
            by_card.setdefault(occupant.uid, []).append(occupant)
        return [self._look(card, by_card.get(card.uid, []), passed) for card in self._cards]

    def _look(self, card: DeviceFacts, here: list[Occupant], passed: float | None) -> Measured:
        held = {occupant.replica: self._fill(card, occupant, passed) for occupant in here}
        self._free_leavers(card, held, passed)
        left = sum(int(size) for (uid, replica), size in self._held.items() if uid == card.uid and replica not in held)
        used = int(DRIVER_SHARE * card.total_bytes) + sum(held.values()) + left
        state = self._warm(card, here, passed or 0.0)
        limit = card.power_limit_w or 300.0
        power = limit * (0.15 + 0.85 * state.busy)
        return Measured(
            card.uid, min(used, card.total_bytes), held, (), round(state.busy, 4), round(state.heat, 1), round(power)
        )

    def _fill(self, card: DeviceFacts, occupant: Occupant, passed: float | None) -> int:
        key = (card.uid, occupant.replica)
        target = float(occupant.target if occupant.pids else 0)
        held = self._held.get(key, target if passed is None else 0.0)
        step = card.total_bytes * (passed or 0.0)
        held = min(target, held + step / LOAD_S) if held < target else max(target, held - step / FREE_S)
        self._held[key] = held
        if not held:
            del self._held[key]
        return int(held)

    def _free_leavers(self, card: DeviceFacts, held: dict[str, int], passed: float | None) -> None:
        """Memory of replicas that have no line any more goes too, as slowly."""
        for uid, replica in [key for key in self._held if key[0] == card.uid and key[1] not in held]:
            left = self._held[uid, replica] - card.total_bytes * (passed or 0.0) / FREE_S
            self._held[uid, replica] = left
            if left <= 0:
                del self._held[uid, replica]

    def _warm(self, card: DeviceFacts, here: list[Occupant], passed: float) -> _State:
        state = self._states[card.uid]
        state.busy = min(1.0, 0.02 + sum(occupant.busy or 0.0 for occupant in here if occupant.pids))
        target = _IDLE_C + (_HOT_C - _IDLE_C) * state.busy
        state.heat += (target - state.heat) * min(1.0, passed / _HEAT_S)
        return state


def _cards(number: int, group: str) -> list[DeviceFacts]:
    """The cards of one group, which are one node. Raises DevicesError."""
    match = _GROUP.fullmatch(group.strip())
    if match is None or not int(match[1]) or not int(match[3]):
        raise DevicesError(f"{group.strip()!r} is no group of simulated cards; they look like 8xA100-80G")
    count, name, size = int(match[1]), match[2], int(match[3])
    return [
        DeviceFacts(
            f"sim-{_letters(number)}", f"sim/{number}/{index}", "gpu", index, f"{name}-{size}G", size << 30,
            simulated=True, power_limit_w=_POWER.get(name, 300.0),
        )
        for index in range(count)
    ]  # fmt: skip


def _letters(number: int) -> str:
    """0, 1, … as a, b, …, z, aa, …"""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("a") + rest) + text
    return text
