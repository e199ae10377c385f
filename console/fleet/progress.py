"""Whether an engine makes progress and how busy it is, judged from outside by the counters that it tells. Pure.

For engines whose /health says only that they are alive. Slow is not hung: a prefill made of chunks keeps stepping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

HUNG_FLOOR_S = 10.0
HUNG_FACTOR = 5.0
FIXED_TOKENS = 32  # tokens' worth of time that a step costs before its first token
DEFAULT_STEP_TOKENS = 2048  # of the largest step, where nobody said
LARGE_STEP_TOKENS = 128  # from here on a step costs what its tokens cost
LONGEST_GAP_S = 2.0  # between two looks; more was our own absence, and is not counted against the engine
BUSY_WINDOW_S = 30.0


class Progress:
    """Steps seen so far. Feed it every answer in order; it says why the engine is not healthy, or None.

    `token_s` is what a token of a prompt was measured to take. Without it, and until prompts of some size come, a
    token's time is judged by small steps, whose fixed costs make it look longer than it is.
    """

    def __init__(self, max_step_tokens: int = 0, token_s: float = 0.0) -> None:
        self.max_step_tokens = max_step_tokens or DEFAULT_STEP_TOKENS
        self.without_step_s = 0.0  # time seen with sequences running and no step
        self.idle_s = 0.0  # time seen with neither
        self.stepped = False  # between the last two looks
        self._large_s = token_s  # a token of a large step
        self._small_s = 0.0  # a token of a small one, with its share of what a step costs by itself
        self._last: tuple[float, Mapping[str, Any]] | None = None

    @property
    def limit_s(self) -> float:
        """How long the longest step may take: 10 s, or five times what one of the largest size should."""
        token_s = self._large_s or self._small_s
        return max(HUNG_FLOOR_S, HUNG_FACTOR * token_s * (self.max_step_tokens + FIXED_TOKENS))

    def see(self, now: float, stats: Mapping[str, Any]) -> str | None:
        """Take one answer into account. `now` is monotonic; `stats` has running, steps and step_tokens."""
        before, self._last = self._last, (now, stats)
        if before is None or stats["steps"] < before[1]["steps"]:  # the first answer of a worker
            self.without_step_s = self.idle_s = 0.0
            return None
        passed = min(now - before[0], LONGEST_GAP_S)
        steps = stats["steps"] - before[1]["steps"]
        self.stepped = steps > 0
        if steps:
            self._learn(now - before[0], steps, before[1], stats)
            self.without_step_s = self.idle_s = 0.0
        elif stats["running"]:
            self.idle_s = 0.0
            # It began to run somewhere between the two looks: only a whole interval counts.
            self.without_step_s += passed if before[1]["running"] else 0.0
        else:
            self.without_step_s = 0.0
            self.idle_s += passed
        if self.without_step_s <= self.limit_s:
            return None
        return f"{stats['running']} running and no step for {self.without_step_s:.0f} s (limit {self.limit_s:.0f} s)"

    def _learn(self, seconds: float, steps: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """How long a token takes, from the time since the last step, if it never rested in it."""
        if not (before["running"] and after["running"]) or seconds > LONGEST_GAP_S:
            return
        tokens = after.get("step_tokens", 0) - before.get("step_tokens", 0)
        token_s = (self.without_step_s + seconds) / (tokens + steps * FIXED_TOKENS)
        if tokens >= steps * LARGE_STEP_TOKENS:
            self._large_s = _drawn(self._large_s, token_s)
        else:
            self._small_s = _drawn(self._small_s, token_s)


def _drawn(mean: float, value: float) -> float:
    """A running mean, drawn to a new value."""
    return mean + (value - mean) * (0.05 if mean else 1.0)


class Busy:
    """Share of wall time in steps × how full the batches were, over the last half minute."""

    def __init__(self, max_num_seqs: int, max_step_tokens: int = 0) -> None:
        self._slots = max(max_num_seqs, 1)
        self._step_tokens = max_step_tokens
        self._last: tuple[float, Mapping[str, Any]] | None = None
        self._step_s = 0.0
        self._spans: deque[tuple[float, float, float]] = deque()  # when it ended, seconds, share × fill

    def see(self, now: float, stats: Mapping[str, Any]) -> float:
        """Take one answer into account; returns the new value, 0 to 1."""
        before, self._last = self._last, (now, stats)
        if before is not None and stats["steps"] >= before[1]["steps"] and now > before[0]:
            seconds = now - before[0]
            self._spans.append((now, seconds, self._share(seconds, before[1], stats) * self._fill(before[1], stats)))
        while self._spans and self._spans[0][0] < now - BUSY_WINDOW_S:
            self._spans.popleft()
        whole = sum(seconds for _, seconds, _ in self._spans)
        return round(sum(seconds * value for _, seconds, value in self._spans) / whole, 4) if whole else 0.0

    def _share(self, seconds: float, before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
        """Of an interval, what was spent in steps."""
        steps = after["steps"] - before["steps"]
        if before["running"] and after["running"]:
            if steps:
                self._step_s += (seconds / steps - self._step_s) * (0.1 if self._step_s else 1.0)
            return 1.0
        told_s = after.get("step_ms_p50", 0.0) / 1000
        step_s = told_s or self._step_s
        if not step_s:
            return 1.0 if steps else 0.0
        return float(min(1.0, steps * step_s / seconds))

    def _fill(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
        """How full the steps were: by sequences, or by tokens where prompts filled them."""
        steps = after["steps"] - before["steps"]
        if not steps:
            return float(min(1.0, after["running"] / self._slots))
        made = after["generation_tokens"] - before["generation_tokens"]
        by_sequences = max(made / steps, 0.0) / self._slots
        return float(min(1.0, max(by_sequences, self._by_tokens(steps, made, before, after))))

    def _by_tokens(self, steps: int, made: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
        if not self._step_tokens:
            return 0.0
        read = after["prompt_tokens"] - before["prompt_tokens"]
        cached = after["prefix_hit_tokens"] - before["prefix_hit_tokens"]
        return float(max(read - cached + made, 0) / steps / self._step_tokens)
