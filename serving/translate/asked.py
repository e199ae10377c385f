"""A chat completion put together for the engine, with what the pipeline must know of it."""

from __future__ import annotations

from typing import Any

from serving.port import SUMMARISED
from serving.schemas.ask import Ask, bound, estimate, json_size, size, summarised
from serving.schemas.sampling import CONTENT

Chat = list[dict[str, Any]]  # messages as the engine gets them, their content being text


def asked(
    upstream: dict[str, Any],
    *,
    model: str,
    stream: bool = False,
    limit: int | None = None,
    stops: tuple[str, ...] = (),
    user: str | None = None,
    told: Any = None,
) -> Ask:
    """An Ask for one choice; `upstream` holds messages, tools and sampling, None being the same as nothing."""
    upstream = {name: value for name, value in upstream.items() if value is not None}
    params = summarised(upstream, SUMMARISED, CONTENT)
    if limit:
        upstream["max_tokens"] = params["max_tokens"] = limit
    if stops:
        params["stop"] = len(stops)
    about, most = _sizes(upstream["messages"], upstream.get("tools"), upstream.get("response_format"))
    return Ask(
        model=model,
        stream=stream,
        include_usage=False,
        upstream=upstream,
        params=params,
        stops=stops,
        max_tokens=limit,
        prompt_estimate=about,
        prompt_bound=most,
        user=user,
        told=told,
    )


def said(role: str, content: str, into: Chat) -> None:
    """Add a message of text; one role's texts in a row become one, as many templates want roles to alternate."""
    last = into[-1] if into else None
    if last is not None and last["role"] == role and "tool_calls" not in last:
        last["content"] += "\n\n" + content
    else:
        into.append({"role": role, "content": content})


def called(call_id: str, name: str, arguments: str, into: Chat) -> None:
    """Add a call to the assistant's turn, which may have begun with text."""
    if not into or into[-1]["role"] != "assistant":
        into.append({"role": "assistant", "content": None})
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    into[-1].setdefault("tool_calls", []).append(call)


def returned(call_id: str, content: str, into: Chat) -> None:
    """Add what a function gave back."""
    into.append({"role": "tool", "tool_call_id": call_id, "content": content})


def function(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Any:
    """A function as chat completions describe it."""
    told = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def named(name: str) -> dict[str, Any]:
    """The choice of one function."""
    return {"type": "function", "function": {"name": name}}


def _sizes(messages: Chat, *forms: Any) -> tuple[int, int]:
    """Tokens of the prompt, roughly and at most."""
    characters = most = 0
    for message in messages:
        for value in message.values():
            length = len(value) if isinstance(value, str) else json_size(value)
            characters += length
            most += size(value) if isinstance(value, str) else length
    return estimate(characters), bound(most + sum(map(json_size, forms)), len(messages))
