"""Values that cross the engine's seams; no behaviour beyond small derived properties."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.sequence import Sequence


class Status(StrEnum):
    """Where a sequence stands.

    WAITING_FOR_GRAMMAR ──compiled──▶ WAITING ──admitted──▶ RUNNING ──last token, stop──▶ FINISHED
                                                             │   ▲
                                               no free block │   │ admitted again: blocks found on the
                                                             ▼   │ device or the host, the rest recomputed
                                                           PREEMPTED
    From anywhere: abort, deadline or error ──▶ FINISHED.
    """

    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended. Only `stop` and `length` ever reach an OpenAI client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to stop; ranges are checked where requests are parsed."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when earlier tokens change the distribution."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Sampled(NamedTuple):
    """One sampled token; log-probabilities (natural log) only where they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of one sequence, from position `start`, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """True when the chunk reaches the sequence's last known token, so a new one follows."""
        return self.end == self.sequence.num_tokens and self.sequence.pool is None

    @property
    def completes(self) -> bool:
        """True when with the chunk all states are there that the sequence was to give."""
        return self.end == self.sequence.num_tokens and self.sequence.pool is not None


@dataclass(slots=True)
class Step:
    """One engine iteration: block copies, then a mixed batch of decode and prefill chunks.

    The device does `copies_out` (device block, host slot) first, then `copies_in` (host slot, device block), then the
    chunks: so a block is saved before it is written to, and filled before it is read.
    """

    index: int
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    copies_out: list[tuple[int, int]] = field(default_factory=list)
    copies_in: list[tuple[int, int]] = field(default_factory=list)
    decode_tokens: int = 0
    admitted: int = 0
    cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all chunks."""
        return sum([chunk.count for chunk in self.chunks])
