"""From the step thread to one HTTP response: deltas that coalesce while the reader is slow.

Bounded by construction: whatever a reader has not taken is one merged Delta per choice, never
longer than the model's window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.stops import StopFilter
from engine.tokenizer import Detokenizer
from engine.types import FinishReason, Sampled


@dataclass(slots=True)
class Delta:
    """What is new in one choice: text safe to show, and all tokens behind it, held back or not."""

    text: str = ""
    tokens: int = 0
    sampled: list[Sampled] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    def merge(self, later: Delta) -> None:
        """Append a later delta of the same choice."""
        self.text += later.text
        self.tokens += later.tokens
        self.sampled += later.sampled
        self.finish = later.finish
        self.error = later.error


class Choice:
    """One sequence of a request, with its decoder and stop strings. Used by the step thread."""

    __slots__ = ("_detokenizer", "_stops", "_wants_logprobs", "index", "outbox", "sequence")

    def __init__(self, index: int, sequence: Sequence, detokenizer: Detokenizer, outbox: Outbox) -> None:
        self.index = index
        self.sequence = sequence
        self.outbox = outbox
        self._detokenizer = detokenizer
        self._stops = StopFilter(sequence.params.stop)
        self._wants_logprobs = sequence.params.top_logprobs is not None

    def accept(self, sampled: Sampled, reason: FinishReason | None) -> Delta:
        """Turn a token into a delta; `finish` is `stop` when a stop string appeared, or the grammar has ended."""
        # A stop token's own text is not part of the answer.
        text = "" if reason is FinishReason.STOP else self._detokenizer.push(sampled.token_id)
        grammar = self.sequence.grammar
        if grammar is not None and grammar.ended:
            reason = FinishReason.STOP  # whatever min_tokens, ignore_eos or max_tokens say: nothing can follow
        shown = self._stops.push(text)
        delta = Delta(shown, 1, [sampled] if self._wants_logprobs else [])
        if self._stops.matched:
            delta.finish = FinishReason.STOP
        elif reason is not None:
            delta.finish = reason
            delta.text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return delta


class Outbox:
    """All choices of one request, on the event loop's side.

    `undelivered` is told, once nothing more can come, how many generated tokens the reader was
    never told about: generation counter = sum of reported usage + undelivered.
    """

    def __init__(self, undelivered: Callable[[int], None] = lambda tokens: None) -> None:
        self.generated = 0
        self.reported = 0
        self.open = 0
        self._undelivered = undelivered
        self._left = False
        self._pending: dict[int, Delta] = {}
        self._ready = asyncio.Event()

    def deliver(self, index: int, delta: Delta) -> None:
        """Add a delta; called on the event loop only."""
        self.generated += delta.tokens
        if index in self._pending:
            self._pending[index].merge(delta)
        else:
            self._pending[index] = delta
        if delta.finish is not None:
            self.open -= 1
            self._account()
        self._ready.set()

    async def take(self) -> list[tuple[int, Delta]]:
        """Wait for, and remove, everything that is ready, by choice."""
        await self._ready.wait()
        self._ready.clear()
        ready, self._pending = sorted(self._pending.items()), {}
        return ready

    def leave(self) -> None:
        """The reader is gone, having been told of `reported` tokens."""
        self._left = True
        self._account()

    def _account(self) -> None:
        if self._left and self.open == 0:
            self._undelivered(self.generated - self.reported)
