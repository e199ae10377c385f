"""POST /v1/embeddings: each text becomes one vector, pooled from the states of its tokens."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core import Abort, Add
from engine.embeddings import Pool, Vector
from engine.errors import ContextTooLong, DeadlineExceeded, EngineFault, RequestError, UnknownModel
from engine.outbox import Choice, Delta, Outbox
from engine.sequence import Sequence, hash_root
from engine.server.http import Exchange, while_connected
from engine.server.schema import COMMON, Check, integer, read_fields
from engine.server.service import Service
from engine.timeline import Timeline
from engine.types import FinishReason, SamplingParams

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all inputs of one request together."""
NOTHING = SamplingParams(max_tokens=0)


def _inputs(value: Any) -> list[str] | list[list[int]]:
    """One text, texts, ids, or lists of ids; always as a list. Raises ValueError."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_INPUTS:
        raise ValueError(f"1 to {MAX_INPUTS} inputs are expected: a text, token ids, or a list of either.")
    texts = all(isinstance(item, str) for item in value)
    if not texts and not all(_is_ids(item) for item in value):
        raise ValueError("all texts, or all lists of token ids, are expected.")
    return list(value)


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and all(type(id) is int and id >= 0 for id in item)


def _encoding(value: Any) -> str:
    if value not in ("float", "base64"):
        raise ValueError("float or base64 is expected.")
    return str(value)


SHARED = ("model", "user", "cache_salt", "priority", "request_id", "deadline_ms")
FIELDS: dict[str, Check] = {name: COMMON[name] for name in SHARED} | {
    "input": _inputs,
    "encoding_format": _encoding,
    "dimensions": integer(1),
}


async def embed(service: Service, exchange: Exchange) -> None:
    """Serve one request; a client that leaves aborts it."""
    fields = read_fields(await exchange.body(), FIELDS, ("model", "input"))
    received = time.monotonic()
    if fields["model"] != service.config.name:
        raise UnknownModel(f"The model '{fields['model']}' does not exist.", "model")
    if service.pooling is None:
        raise RequestError("This model is not an embedding model; the engine's option --pooling makes it one.", "model")
    width = service.hidden_size
    if fields.get("dimensions", 1) > width:
        raise RequestError(f"Invalid 'dimensions': the model's embeddings have {width}.", "dimensions")
    exchange.request_id = fields.get("request_id", exchange.request_id)
    request = Embedding(service, fields, service.pooling, received)
    try:
        await while_connected(exchange, request.run(exchange))
    finally:
        request.settle()


@dataclass(slots=True)
class Item:
    """One input: its sequence, and where its states are gathered."""

    choice: Choice
    pool: Pool


class Embedding:
    """The sequences of one request, from tokens to vectors."""

    def __init__(self, service: Service, fields: dict[str, Any], pooling: str, received: float) -> None:
        self._service = service
        self._fields = fields
        self._pooling = pooling
        self._received = received
        self._outbox = Outbox()
        self._items: list[Item] = []

    async def run(self, exchange: Exchange) -> None:
        """Queue all inputs, wait for the last, and answer."""
        prompts = await asyncio.get_running_loop().run_in_executor(None, self._tokenise)
        # More inputs than may wait need an empty queue; else no time would ever be right for them.
        sequences = min(len(prompts), self._service.config.max_queued)
        self._service.refuse_overload(sequences, sum(map(len, prompts)))
        for index, prompt in enumerate(prompts):
            self._items.append(self._item(index, prompt))
        self._outbox.open = len(self._items)
        for item in self._items:
            item.choice.sequence.note("QUEUED")
            self._service.core.post(Add(item.choice))
        while self._outbox.open:
            for _, delta in await self._outbox.take():
                _check_end(delta)
        await exchange.reply(200, await self._body(sum(map(len, prompts))), "application/json")

    def settle(self) -> None:
        """Abort whatever still runs."""
        if self._outbox.open:
            self._service.core.post(Abort(tuple(item.choice.sequence.id for item in self._items)))

    def _tokenise(self) -> list[list[int]]:
        """Ids of every input, special tokens as the model's own tokenizer adds them. Raises RequestError."""
        encode, total = self._service.tokenizer.encode_document, 0
        prompts = []
        for index, given in enumerate(self._fields["input"]):
            ids = encode(given, self._service.max_model_len) if isinstance(given, str) else given
            self._check(index, ids)
            total += len(ids)
            if total > MAX_TOKENS:
                raise RequestError(f"Invalid 'input': at most {MAX_TOKENS} tokens in one request.", "input")
            prompts.append(ids)
        return prompts

    def _check(self, index: int, ids: list[int]) -> None:
        window, vocab = self._service.max_model_len, self._service.vocab_size
        if not ids:
            raise RequestError(f"Invalid 'input': input {index} is empty.", "input")
        if len(ids) > window:
            raise ContextTooLong(f"This model's window is {window} tokens; input {index} has {len(ids)}.", "input")
        if max(ids) >= vocab:
            raise RequestError(f"Invalid 'input': input {index} has a token id beyond {vocab - 1}.", "input")

    def _item(self, index: int, prompt: list[int]) -> Item:
        salt, allowed = self._fields.get("cache_salt", ""), self._fields.get("deadline_ms")
        pool, timeline = Pool(self._pooling), Timeline()
        timeline.note("RECEIVED", at=int(self._received * 1e9))
        sequence = Sequence(
            self._service.next_id(),
            prompt,
            NOTHING,
            root=hash_root(self._service.config.revision, salt),
            priority=self._fields.get("priority", 0),
            tenant=salt,
            deadline=None if allowed is None else self._received + allowed / 1e3,
            pool=pool,
            timeline=timeline,
        )
        return Item(Choice(index, sequence, self._service.tokenizer.detokenizer(), self._outbox), pool)

    async def _body(self, tokens: int) -> bytes:
        """OpenAI's list, encoded piece by piece: other requests get their turns between the vectors."""
        pieces = []
        for index, item in enumerate(self._items):
            vector = self._encoded(item.pool.vector(self._fields.get("dimensions")))
            pieces.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": vector}))
            await asyncio.sleep(0)
        rest = {"model": self._service.config.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        return b'{"object":"list","data":[' + b",".join(pieces) + b"]," + msgspec.json.encode(rest)[1:]

    def _encoded(self, vector: Vector) -> str | list[float]:
        if self._fields.get("encoding_format") == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        return list(vector.tolist())


def _check_end(delta: Delta) -> None:
    """Raises RequestError unless the sequence has given all its states."""
    if delta.finish is FinishReason.DEADLINE:
        raise DeadlineExceeded(delta.error or "The deadline passed.", "deadline_ms")
    if delta.finish is not FinishReason.STOP:
        raise EngineFault(delta.error or f"The embedding ended with: {delta.finish}.")
