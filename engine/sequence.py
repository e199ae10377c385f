"""One token stream: its tokens, its block table, and how far it has been computed."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Any

from engine.embeddings import Pool
from engine.grammar import Grammar
from engine.timeline import Timeline
from engine.types import FinishReason, SamplingParams, Status

HASH_BYTES = 16


def hash_root(model_revision: str, cache_salt: str) -> bytes:
    """Start of every prefix-hash chain; another salt or revision shares no block."""
    root = blake2b(digest_size=HASH_BYTES, person=b"fanlight-prefix")
    for part in (model_revision.encode(), cache_salt.encode()):
        root.update(len(part).to_bytes(8, "little"))
        root.update(part)
    return root.digest()


class Sequence:
    """Prompt and output tokens of one choice of one request.

    There are no phases: a sequence has `num_tokens` and `num_computed` of them are in the KV
    cache. Prefill, decode, resume and a prefix hit differ only in how large the gap is.

    `tenant` is whom its service is counted for; `deadline` is when it must have ended, on the caller's clock.
    With a `pool` it generates nothing: the pool gathers the states of its tokens, and then it ends.
    """

    def __init__(
        self,
        id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        root: bytes = b"",
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        grammar: Grammar | None = None,
        pool: Pool | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.id = id
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.params = params
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self.grammar = grammar
        self.pool = pool
        self.timeline = timeline or Timeline()
        self.status = Status.WAITING if grammar is None or grammar.ready else Status.WAITING_FOR_GRAMMAR
        self.finish_reason: FinishReason | None = None
        self.num_computed = 0
        self.num_cached = 0
        self.num_cached_host = 0
        self.num_published = 0
        self.block_table: list[int] = []
        self.preemptions = 0
        self._root = root
        self._hashes: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Sequence {self.id} {self.status} {self.num_computed}/{self.num_tokens}>"

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Known tokens that are not in the KV cache yet."""
        return len(self.tokens) - self.num_computed

    @property
    def reuses_prefix(self) -> bool:
        """False where every token has to be computed, whatever caches hold."""
        return self.pool is None or not self.pool.needs_all

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: lower priority values first, then earlier ids (= arrival)."""
        return (self.priority, self.id)

    @property
    def max_total(self) -> int:
        """The most tokens that ever need KV; the last sampled one is never computed."""
        return max(self.num_prompt, self.num_prompt + self.params.max_tokens - 1)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Chained hashes of all full blocks, extended incrementally and kept."""
        for index in range(len(self._hashes), len(self.tokens) // block_size):
            parent = self._hashes[-1] if self._hashes else self._root
            ids = array("I", self.tokens[index * block_size : (index + 1) * block_size])
            self._hashes.append(blake2b(parent + ids.tobytes(), digest_size=HASH_BYTES).digest())
        return self._hashes

    def note(self, name: str, **args: Any) -> None:
        """Append a timeline event that changes no status."""
        self.timeline.note(name, **args)

    def move_to(self, status: Status, event: str, **args: Any) -> None:
        """The only place a status changes; every change leaves an event."""
        if self.status is Status.FINISHED:
            raise AssertionError(f"{self!r} has ended and cannot become {status}")
        self.status = status
        self.timeline.note(event, **args)

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; returns why the sequence now ends, or None."""
        self.tokens.append(token_id)
        if self.num_output == 1:
            self.note("FIRST_TOKEN")
        params = self.params
        if token_id in params.stop_token_ids and self.num_output > params.min_tokens:
            return FinishReason.STOP
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if self.num_output >= params.max_tokens:
            return FinishReason.LENGTH
        return None
