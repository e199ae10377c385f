"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from serving.errors import BadRequest
from serving.schemas.ask import Ask, bound, estimate, size
from serving.schemas.decode import decode
from serving.schemas.sampling import SAMPLING, Sampling, TokenId, ask, picked


class CompletionBody(Sampling, forbid_unknown_fields=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None


_FORWARDED = (*SAMPLING, "echo", "suffix")
_decoder = msgspec.json.Decoder(CompletionBody)


def completion(raw: bytes) -> Ask:
    """Read a plain completion request; raises BadRequest naming the field."""
    body = decode(_decoder, raw)
    prompts, tokens, most = prompt_sizes(body.prompt)
    upstream = picked(body, _FORWARDED)
    upstream["prompt"] = body.prompt
    most += size(body.suffix or "")
    choices = prompts * (body.n or 1)
    return ask(body, upstream, limit=body.max_tokens, choices=choices, estimate=tokens, bound=bound(most, prompts))


def prompt_sizes(prompt: str | list[str | int | list[int]], name: str = "prompt") -> tuple[int, int, int]:
    """How many prompts there are, about how many tokens the longest has, and at most how many all have together."""
    if isinstance(prompt, str):
        return 1, estimate(len(prompt)), size(prompt)
    if all(isinstance(item, int) for item in prompt):
        return 1, len(prompt), len(prompt)
    if all(isinstance(item, str) for item in prompt):
        texts = [item for item in prompt if isinstance(item, str)]
        return len(texts), estimate(max(map(len, texts))), sum(map(size, texts))
    if all(isinstance(item, list) for item in prompt):
        lengths = [len(item) for item in prompt if isinstance(item, list)]
        return len(lengths), max(lengths), sum(lengths)
    raise BadRequest(f"a list in `{name}` holds texts, token ids or lists of token ids, not a mix", param=name)
