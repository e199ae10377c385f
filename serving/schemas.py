"""What callers may send: typed bodies, and the one form (`Ask`) that the pipeline works on.

Every field is listed, so an unknown one is refused by name. OpenAI's documented fields without effect here are accepted
and dropped; fields of identity and isolation are refused, because the gateway sets them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from serving.errors import BadRequest

IDENTITY_FIELDS = frozenset(
    (
        "cache_salt",
        "priority",
        "request_id",
        "kv_transfer_params",
        "vllm_xargs",
        "chat_template",
        "chat_template_kwargs",
        "prompt_logprobs",
    )
)
MAX_STOP_LENGTH = 256
_BYTES_PER_TOKEN = 4  # for estimates only; nothing is billed or counted by it

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens = Annotated[int, Meta(ge=1, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Anything = Any  # accepted and dropped


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
    """The fields that chat and plain completions share."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
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


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # what an answer carries when a client sends it back as history
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Anything = None
    audio: None = None  # only null
    function_call: None = None

    def forwarded(self) -> dict[str, Any]:
        """As the engine gets it: `developer` is the newer word for `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message

    def characters(self) -> int:
        calls = len(msgspec.json.encode(self.tool_calls)) if self.tool_calls else 0
        if isinstance(self.content, str):
            return len(self.content) + calls
        return sum(len(part.text) for part in self.content or () if isinstance(part, TextPart)) + calls


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Checked for its type only; what it asks for is the engine's matter."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]


class ChatBody(Sampling, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # documented by OpenAI, without effect here
    metadata: Anything = None
    store: Anything = None
    service_tier: Anything = None
    prediction: Anything = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Anything = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(Sampling, forbid_unknown_fields=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None


class Ask(msgspec.Struct, kw_only=True):
    """A validated request, whichever endpoint it came by."""

    model: str
    stream: bool
    include_usage: bool
    upstream: dict[str, Any]  # what reaches the engine; identity fields are added at dispatch
    params: dict[str, Any]  # the sampling part of it, for the record: never content
    stops: tuple[str, ...] = ()
    choices: int = 1
    max_tokens: int | None = None
    prompt_estimate: int = 0  # tokens, from the length of the text
    prompt_bound: int = 0  # tokens at most, before what the chat template adds of its own
    user: str | None = None


_SAMPLING = (
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
_CHAT = (*_SAMPLING, "top_logprobs", "response_format", "tools", "tool_choice")
_COMPLETION = (*_SAMPLING, "echo", "suffix")
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_SUMMARISED = frozenset(("logit_bias", "response_format", "tools", "tool_choice", "suffix", "structured_outputs"))
EXTRAS = frozenset(
    ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "structured_outputs")
)
"""What OpenAI does not document: it reaches an engine whose adapter lists it as safe for callers."""

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)

Body = TypeVar("Body", ChatBody, CompletionBody)


def chat(raw: bytes) -> Ask:
    """Read a chat completion request; raises BadRequest naming the field."""
    body = _decode(_chat_decoder, raw)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.response_format is not None:
        _check_response_format(body.response_format)
    upstream = _picked(body, _CHAT)
    upstream["messages"] = [message.forwarded() for message in body.messages]
    if body.tools and body.parallel_tool_calls is not None:
        upstream["parallel_tool_calls"] = body.parallel_tool_calls
    limit = body.max_completion_tokens or body.max_tokens
    characters = sum(message.characters() for message in body.messages)
    return _ask(body, upstream, limit=limit, choices=body.n or 1, estimate=_estimate(characters))


def completion(raw: bytes) -> Ask:
    """Read a plain completion request; raises BadRequest naming the field."""
    body = _decode(_completion_decoder, raw)
    prompts, estimate = _prompts(body.prompt)
    upstream = _picked(body, _COMPLETION)
    upstream["prompt"] = body.prompt
    choices = prompts * (body.n or 1)
    return _ask(body, upstream, limit=body.max_tokens, choices=choices, estimate=estimate)


def _ask(body: Sampling, upstream: dict[str, Any], *, limit: int | None, choices: int, estimate: int) -> Ask:
    structured = _structured(body)
    if structured:
        upstream["structured_outputs"] = structured
    options = body.stream_options
    if options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    params = {
        key: _summary(value) if key in _SUMMARISED else value
        for key, value in upstream.items()
        if key not in ("messages", "prompt")
    }
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
        user=body.user,
    )


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


def _picked(body: Sampling, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[int, int]:
    """How many prompts there are, and about how many tokens they hold together."""
    if isinstance(prompt, str):
        return 1, _estimate(len(prompt))
    if all(isinstance(item, int) for item in prompt):
        return 1, len(prompt)
    if all(isinstance(item, str) for item in prompt):
        return len(prompt), sum(_estimate(len(item)) for item in prompt if isinstance(item, str))
    if all(isinstance(item, list) for item in prompt):
        return len(prompt), sum(len(item) for item in prompt if isinstance(item, list))
    raise BadRequest("a list of prompts holds texts, token ids or lists of token ids, not a mix", param="prompt")


def _estimate(characters: int) -> int:
    return -(-characters // _BYTES_PER_TOKEN)


def _summary(value: Any) -> Any:
    """What a record may keep of a field whose value is the caller's content: never a schema, a name or an argument."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return value["type"][:32]
    return len(value) if isinstance(value, (list, dict)) else True


def _check_response_format(value: dict[str, Any]) -> None:
    try:
        msgspec.convert(value, ResponseFormat)
    except msgspec.ValidationError as error:
        raise _explained(error, prefix="response_format") from None


def _decode(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _explained(error) from None
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("The body is not valid JSON.", code="invalid_json") from None


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(unknown|missing required) field `(?P<name>[^`]+)`")
_PART = re.compile(r"^messages\[\d+\]\.content\[\d+\]\.type$")


def _explained(error: msgspec.ValidationError, prefix: str = "") -> BadRequest:
    """Turn msgspec's words into a 400 that names the field."""
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    named = _NAMED.search(what)
    param = ".".join(part for part in (prefix, path, named["name"] if named else "") if part)
    if named and named[1] == "unknown":
        if param in IDENTITY_FIELDS:
            return BadRequest(
                f"`{param}` is set by the gateway and cannot be sent.",
                param=param,
                code="forbidden_parameter",
            )
        return BadRequest(f"Unknown parameter: `{param}`.", param=param, code="unknown_parameter")
    if named:
        return BadRequest(
            f"Missing required parameter: `{param}`.",
            param=param,
            code="missing_required_parameter",
        )
    if _PART.match(path):
        return BadRequest(f"{what}: only text content is supported.", param=param, code="unsupported_content")
    if not param:
        return BadRequest(f"The body must be a JSON object: {what}.", code="invalid_json")
    return BadRequest(f"Invalid value for `{param}`: {what}.", param=param, code="invalid_value")
