"""One request from body to last byte: tokenise, submit, follow, account."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.constraints import Constraint
from engine.core import Abort, Add
from engine.errors import ContextTooLong, DeadlineExceeded, EngineFault, RequestError
from engine.guided import Compiled, GuidedGrammar
from engine.outbox import Choice, Outbox
from engine.sequence import Sequence, hash_root
from engine.server.form import constraint_of, wants_form
from engine.server.schema import CompletionRequest
from engine.server.service import Service
from engine.server.wire import Usage
from engine.timeline import Timeline
from engine.types import FinishReason

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


@dataclass(slots=True)
class Anchor:
    """The same moment on both clocks, so that stamps of several processes can be merged."""

    wall_ns: int = field(default_factory=time.time_ns)
    mono_ns: int = field(default_factory=time.monotonic_ns)


class Generation:
    """The sequences of one request and what has been told about them."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self.request = request
        self.anchor = Anchor()
        self.timeline = Timeline()
        self.timeline.note("RECEIVED", at=self.anchor.mono_ns)
        self.outbox = Outbox(service.count_undelivered)
        self.choices: list[Choice] = []
        self._service = service
        self._compiled: Compiled | None = None
        self._posted = 0
        self._open = 0

    async def submit(self) -> None:
        """Tokenise, have the grammar compiled, and queue; the sequence waits for it there. Raises RequestError."""
        prompt, constraint = await asyncio.gather(self._tokenise(), self._form())
        if constraint is not None:
            tenant = self.request.fields.get("cache_salt", "")
            self._compiled = self._service.compiler.acquire(constraint, tenant)
        max_tokens = self._bound(len(prompt))
        self._service.refuse_overload(self.request.choices, len(prompt) * self.request.choices)
        root = hash_root(self._service.config.revision, self.request.fields.get("cache_salt", ""))
        for index in range(self.request.choices):
            self.choices.append(self._choice(index, prompt, max_tokens, root))
        self.timeline.note("QUEUED")
        await self._service.fault_delay("engine_queue")
        self._post(1)

    def follow_first(self) -> None:
        """Start the other choices once the first has a token: the prompt is then cached."""
        if self._posted < len(self.choices):
            self._post(len(self.choices))

    def settle(self) -> None:
        """Abort whatever still runs; called exactly once, on every way out."""
        ids = tuple(c.sequence.id for c in self.choices[: self._posted])
        if self.outbox.open:
            self._service.core.post(Abort(ids))
        self.outbox.leave()
        if self._compiled is not None:
            self._service.compiler.release(self._compiled)

    def usage(self) -> Usage:
        """Counts of everything delivered so far; what is returned counts as reported."""
        self.outbox.reported = self.outbox.generated
        first = self.choices[0].sequence
        return Usage(first.num_prompt, first.num_cached, self.outbox.generated)

    def ended(self, finish: FinishReason, error: str | None) -> None:
        """Note the end of a choice. Raises RequestError unless it is an end that a client knows."""
        self._open -= 1
        if finish is FinishReason.DEADLINE:
            raise DeadlineExceeded(error or "The deadline passed.", "deadline_ms")
        if finish is FinishReason.ERROR:
            self._blame_grammar()
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise EngineFault(error or f"The generation ended with: {finish.value}.")

    @property
    def done(self) -> bool:
        """True when every choice has ended."""
        return self._open == 0 and self._posted == len(self.choices)

    def report(self) -> dict[str, Any]:
        """The `fanlight` object: the timeline of the first choice, and its cache facts."""
        first = self.choices[0].sequence
        return {
            "boot_id": BOOT_ID,
            "anchor": {"wall_ns": self.anchor.wall_ns, "mono_ns": self.anchor.mono_ns},
            "events": self.timeline.as_list(),
            "dropped": self.timeline.dropped,
            "sequence_id": first.id,
            "cached_tokens": first.num_cached,
            "host_tokens": first.num_cached_host,
            "computed_tokens": first.num_prompt - first.num_cached,
            "block_size": self._service.config.block_size,
            "preemptions": first.preemptions,
        }

    @property
    def _deadline(self) -> float | None:
        """When the answer must be complete, on the monotonic clock, counted from when the body was received."""
        allowed = self.request.fields.get("deadline_ms")
        return None if allowed is None else self.anchor.mono_ns / 1e9 + allowed / 1e3

    async def _form(self) -> Constraint | None:
        """What the request asks of its text's form."""
        request = self.request
        if not wants_form(request.fields, request.tool_use):
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, constraint_of, request.fields, request.tool_use)

    def _blame_grammar(self) -> None:
        """A grammar that cannot be compiled, or costs too much, is the caller's to change."""
        for choice in self.choices:
            grammar = choice.sequence.grammar
            if grammar is not None and grammar.error is not None and self._compiled is not None:
                raise RequestError(grammar.error, self._compiled.constraint.param)

    async def _tokenise(self) -> list[int]:
        request, tokenizer = self.request, self._service.tokenizer
        loop, window = asyncio.get_running_loop(), self._service.max_model_len
        if request.messages is not None:
            tools = request.tool_use.definitions if request.tool_use else []
            ids = await loop.run_in_executor(None, tokenizer.encode_chat, request.messages, tools, window)
        elif isinstance(request.prompt, str):
            ids = await loop.run_in_executor(None, tokenizer.encode, request.prompt, window)
        else:
            ids = request.prompt or []
        await self._service.fault_delay("tokenize")
        self._check_ids(ids)
        self.timeline.note("TOKENIZED", prompt_tokens=len(ids))
        return ids

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("The prompt is empty.", "prompt")
        vocab = self._service.vocab_size
        if max(ids) >= vocab:
            raise RequestError(f"A token id exceeds the vocabulary of {vocab}.", "prompt")
        asked = self.request.fields
        for name, used in (
            ("logit_bias", [id for id, _ in asked.get("logit_bias", ())]),
            ("stop_token_ids", asked.get("stop_token_ids", [])),
        ):
            if used and max(used) >= vocab:
                raise RequestError(f"Token id {max(used)} is not in the vocabulary.", name)

    def _bound(self, prompt_tokens: int) -> int:
        """max_tokens, or all that fits. Raises ContextTooLong."""
        window = self._service.max_model_len
        wanted = self.request.max_tokens
        if prompt_tokens >= window or prompt_tokens + (wanted or 0) > window:
            asked = "" if wanted is None else f" and {wanted} for the answer"
            raise ContextTooLong(
                f"This model's window is {window} tokens; the request has {prompt_tokens} in the prompt{asked}.",
                "messages" if self.request.chat else "prompt",
            )
        return wanted or window - prompt_tokens

    def _choice(self, index: int, prompt: list[int], max_tokens: int, root: bytes) -> Choice:
        tokenizer = self._service.tokenizer
        sequence = Sequence(
            self._service.next_id(),
            prompt,
            self.request.sampling(max_tokens, tokenizer.special.end_ids, index),
            root=root,
            priority=self.request.fields.get("priority", 0),
            tenant=self.request.fields.get("cache_salt", ""),
            deadline=self._deadline,
            grammar=GuidedGrammar(self._compiled) if self._compiled else None,
            timeline=self.timeline if index == 0 else Timeline(),
        )
        return Choice(index, sequence, tokenizer.detokenizer(), self.outbox)

    def _post(self, upto: int) -> None:
        for choice in self.choices[self._posted : upto]:
            self._service.core.post(Add(choice))
            self._open += 1
            self.outbox.open += 1
        self._posted = upto
