"""The fields that chat and plain completions share, and the Ask that they make."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.errors import BadRequest
from serving.port import SUMMARISED
from serving.schemas.ask import Ask, summarised

MAX_STOP_LENGTH = 256

ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens = Annotated[int, Meta(ge=1, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
EndUser = Annotated[str, Meta(max_length=512)]
Anything = Any  # accepted and dropped

CONTENT = frozenset(("messages", "prompt", "input", "tokens"))
"""Fields that a record keeps nothing of."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """vLLM's extra: exactly one member, checked no deeper than that; what it asks for is the engine's matter."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What stands in both bodies."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    max_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: EndUser | None = None
    # extras that reach the engine
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    structured_outputs: StructuredOutputs | None = None
    # the same by the names of older clients
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


SAMPLING = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logprobs",
)
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def ask(body: Sampling, upstream: dict[str, Any], *, limit: int | None, choices: int, estimate: int, bound: int) -> Ask:
    """Put together what both endpoints have in common."""
    structured = _structured(body)
    if structured:
        upstream["structured_outputs"] = structured
    options = body.stream_options
    if options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    params = summarised(upstream, SUMMARISED, CONTENT)
    if limit is not None:
        upstream["max_tokens"] = params["max_tokens"] = limit
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if stops:
        params["stop"] = len(stops)
    return Ask(
        model=body.model,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        upstream=upstream,
        params=params,
        stops=stops,
        choices=choices,
        max_tokens=limit,
        prompt_estimate=estimate,
        prompt_bound=bound,
        user=body.user,
    )


def picked(body: msgspec.Struct, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields that were sent, null being the same as nothing."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _structured(body: Sampling) -> dict[str, Any]:
    """The one form asked for by vLLM's extras, by their newer name."""
    told: dict[str, Any] = {}
    asked = body.structured_outputs
    if asked is not None:
        told = msgspec.to_builtins(asked)
        if len(told) != 1:
            raise BadRequest(
                "structured_outputs needs one of json, regex, choice, grammar, json_object", param="structured_outputs"
            )
    for name in _GUIDED:
        value = getattr(body, name)
        if value is not None:
            if told:
                raise BadRequest(f"{name}: another form is asked for already", param=name)
            told = {name.removeprefix("guided_"): value}
    return told
