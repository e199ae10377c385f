"""Guided decoding: constraints become grammars off the step thread, bounded and cached for each tenant.

The library bounds every single computation by fuel, not by time: a compilation or a mask that would run away fails
instead. So threads are enough; nothing has to be killed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraints import Constraint, explain
from engine.errors import Overloaded, RequestError
from engine.tokenizer import Tokenizer

FUEL = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_items_in_row=4_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""The most that one compilation or one mask may cost: tens of milliseconds, and about 40 MB of lexer states."""

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{1,{size}}}" for size in (3, 5, 8, 12, 30)), f"{_IN_STRING}+"]
"""Tokens that strings mostly allow together; with more steps than the library's a maxLength costs a third."""

MASK_ALLOWANCE_S = 0.25
MASK_SECONDS_PER_TOKEN = 0.005
BASE_BYTES = 512 << 10
BYTES_PER_SOURCE_BYTE = 128


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """What one tenant, and all together, may have compiled or being compiled."""

    tenant_pending: int = 8
    tenant_bytes: int = 32 << 20
    total_bytes: int = 256 << 20
    compile_seconds: float = 5.0
    workers: int = 2


class Compiled:
    """One constraint of one tenant, compiled or about to be. Written on the event loop, read by the step thread."""

    __slots__ = ("constraint", "error", "matcher", "ready", "size", "tenant", "users")

    def __init__(self, constraint: Constraint, tenant: str) -> None:
        self.constraint = constraint
        self.tenant = tenant
        self.size = BASE_BYTES + BYTES_PER_SOURCE_BYTE * len(constraint.source)
        self.users = 0
        self.matcher: LLMatcher | None = None
        self.error: str | None = None
        self.ready = False

    @property
    def key(self) -> tuple[str, str]:
        """What the cache knows it by; another tenant's equal grammar is another entry, so timing tells nothing."""
        return (self.tenant, self.constraint.source)


class Compiler:
    """Compiles constraints for one tokenizer in a few threads. To be used on one event loop.

    An entry counts against its tenant from the moment it is asked for until it is neither used nor cached.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        wake: Callable[[], None] = lambda: None,
        limits: CompilerLimits | None = None,
    ) -> None:
        self.limits = limits or CompilerLimits()
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        self._wake = wake
        self._entries: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
        self._pool = ThreadPoolExecutor(self.limits.workers, thread_name_prefix="grammar")

    def prepare(self) -> None:
        """Build the vocabulary now: it takes 0.2 s of the interpreter, which the first guided request need not see."""
        self._pool.submit(self._vocabulary.prepare)

    def acquire(self, constraint: Constraint, tenant: str) -> Compiled:
        """The compiled constraint, from the cache or soon ready. Raises RequestError or Overloaded."""
        wanted = Compiled(constraint, tenant)
        entry = self._entries.get(wanted.key)
        if entry is None:
            entry = wanted
            self._make_room(entry)
            self._entries[entry.key] = entry
            self._start(entry)
        self._entries.move_to_end(entry.key)
        entry.users += 1
        return entry

    def release(self, entry: Compiled) -> None:
        """A request is done with it; it stays cached, unless it failed."""
        entry.users -= 1
        self._forget_failed(entry)

    def stats(self) -> dict[str, int]:
        """Entries and their estimated bytes, used and cached together."""
        return {"grammars": len(self._entries), "grammar_bytes": sum(e.size for e in self._entries.values())}

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, wanted: Compiled) -> None:
        """Drop what was unused longest, the tenant's own first, until it fits."""
        limits, param = self.limits, wanted.constraint.param
        mine = [entry for entry in self._entries.values() if entry.tenant == wanted.tenant]
        pending = sum(not entry.ready for entry in mine)
        if pending >= limits.tenant_pending:
            raise RequestError(
                f"Invalid '{param}': {pending} grammars of this tenant are being compiled; the limit is "
                f"{limits.tenant_pending}.",
                param,
            )
        if not self._evict(mine, wanted.size, limits.tenant_bytes):
            raise RequestError(
                f"Invalid '{param}': the tenant's grammars in use leave no room; the limit is {limits.tenant_bytes} "
                "bytes.",
                param,
            )
        if not self._evict(list(self._entries.values()), wanted.size, limits.total_bytes):
            raise Overloaded("The grammars in use leave no room for another.", retry_after=1)

    def _evict(self, entries: list[Compiled], needed: int, limit: int) -> bool:
        held = sum(entry.size for entry in entries)
        for entry in entries:
            if held + needed <= limit:
                break
            if entry.users == 0 and entry.ready:
                del self._entries[entry.key]
                held -= entry.size
        return held + needed <= limit

    def _start(self, entry: Compiled) -> None:
        loop = asyncio.get_running_loop()
        seconds = self.limits.compile_seconds
        param = entry.constraint.param
        late = f"Invalid '{param}': the grammar was not compiled within {seconds:g} s."
        deadline = loop.call_later(seconds, self._finish, entry, None, late)

        def work() -> None:
            matcher, error = self._vocabulary.compile(entry.constraint)
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, matcher, error)

        def finish(matcher: LLMatcher | None, error: str | None) -> None:
            deadline.cancel()
            self._finish(entry, matcher, error)

        self._pool.submit(work)

    def _finish(self, entry: Compiled, matcher: LLMatcher | None, error: str | None) -> None:
        if entry.ready:
            return  # it was too late already
        entry.matcher, entry.error = matcher, error
        entry.ready = True
        self._forget_failed(entry)
        self._wake()

    def _forget_failed(self, entry: Compiled) -> None:
        if entry.error is not None and self._entries.get(entry.key) is entry:
            del self._entries[entry.key]


class Vocabulary:
    """The tokenizer as the library needs it, built once. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._source = tokenizer
        self._size = vocab_size
        self._lock = threading.Lock()

    def prepare(self) -> LLTokenizer:
        """The library's tokenizer, built if it is not yet."""
        with self._lock:
            return self._tokens

    def compile(self, constraint: Constraint) -> tuple[LLMatcher | None, str | None]:
        """A matcher at its start, or why there is none. The first mask is tried too, as much fails there."""
        matcher = LLMatcher(self.prepare(), constraint.source, log_level=0, limits=FUEL)
        if not matcher.is_error():
            first = matcher.deep_copy()
            compute(first, np.zeros(-(-self._size // 32), np.int32))
            if not first.is_error():
                return matcher, None
            matcher = first
        return None, explain(matcher.get_error(), constraint.param)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        ends = sorted(self._source.special.end_ids)
        return LLTokenizer(self._source.to_json(), n_vocab=self._size, eos_token=ends, slices=SLICES)


def compute(matcher: LLMatcher, mask: npt.NDArray[np.int32]) -> None:
    """Write the allowed tokens into a row; a matcher that fails allows the end only and has an error afterwards."""
    assert mask.flags.c_contiguous
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class GuidedGrammar:
    """See Grammar: the state of one choice. Besides the library's fuel, its masks have an allowance of CPU time."""

    __slots__ = ("_compiled", "_error", "_matcher", "_spent", "_tokens", "ended")

    def __init__(self, compiled: Compiled) -> None:
        self.ended = False
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._error: str | None = None
        self._spent = 0.0
        self._tokens = 0

    @property
    def ready(self) -> bool:
        """See Grammar."""
        return self._compiled.ready

    @property
    def error(self) -> str | None:
        """See Grammar; it may also come later, when a mask costs too much."""
        return self._compiled.error or self._error

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """See Grammar. Raises ValueError once there is an error."""
        matcher = self._start()
        began = time.thread_time()
        compute(matcher, mask)
        self._spent += time.thread_time() - began
        if self._spent > MASK_ALLOWANCE_S + MASK_SECONDS_PER_TOKEN * self._tokens:
            self._error = f"Invalid '{self._compiled.constraint.param}': the grammar costs too much time per token."
        self._note_error(matcher)
        if self._error is not None:
            raise ValueError(self._error)

    def accept(self, token_id: int) -> None:
        """See Grammar."""
        matcher = self._start()
        self._tokens += 1
        matcher.consume_token(token_id)
        self._note_error(matcher)
        self.ended = self._error is None and matcher.is_stopped()

    def _start(self) -> LLMatcher:
        if self._matcher is None:
            if self._compiled.matcher is None:
                raise ValueError(self._compiled.error or "not compiled yet")
            self._matcher = self._compiled.matcher.deep_copy()
        return self._matcher

    def _note_error(self, matcher: LLMatcher) -> None:
        if self._error is None and matcher.is_error():
            self._error = explain(matcher.get_error(), self._compiled.constraint.param)
