"""Money reserved and spent, in whole nano-units, by scope and calendar window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.coordination.model.windows import whole_seconds

Budget = Sequence[Any]  # (name, window, amount, start, end) as `wire` makes it


class Budgets:
    """Amounts by the name of a budget's window, `<scope>:<currency>:<window>:<start>`."""

    def __init__(self) -> None:
        self.amounts: dict[str, list[int]] = {}  # [reserved, spent]

    def read(self, name: str) -> tuple[int, int]:
        reserved, spent = self.amounts.get(name, (0, 0))
        return reserved, spent

    def change(self, name: str, reserved: int, spent: int) -> None:
        amounts = self.amounts.setdefault(name, [0, 0])
        amounts[0] += reserved
        amounts[1] += spent

    def refuse(self, budgets: Sequence[Budget], cost: int, now: float) -> list[Any] | None:
        """[limit, allowed, used, wanted, retry after, retryable] of the first budget that `cost` would break."""
        for name, window, amount, _, ends in budgets:
            reserved, spent = self.read(name)
            if reserved + spent + cost <= amount:
                continue
            wait, retryable = 60.0, False
            if spent + cost <= amount:
                wait, retryable = 1, True  # requests that run now may give it back
            elif window != "total" and ends - now <= 60 and cost <= amount:
                wait, retryable = ends - now, True
            return ["budget_" + window, amount, reserved + spent, cost, whole_seconds(wait), retryable]
        return None

    def drop_ended(self, now: float) -> None:
        """Forget windows that began longer ago than any lasts; totals stay."""
        for name in list(self.amounts):
            window, start = name.rsplit(":", 2)[1:]
            if window != "total" and int(start) + 33 * 86400 < now and self.amounts[name][0] == 0:
                del self.amounts[name]


def window_missed(budgets: Sequence[Budget], now: float) -> bool:
    """Whether a window has not begun or is over: the caller's idea of the time was wrong."""
    return any(window != "total" and not starts <= now < ends for _, window, _, starts, ends in budgets)
