"""Request bodies: what is unknown or out of range is a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.server.schema import CompletionRequest, parse

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> CompletionRequest:
    return parse(json.dumps(CHAT | fields).encode(), chat=True)


def text(**fields: Any) -> CompletionRequest:
    return parse(json.dumps(TEXT | fields).encode(), chat=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("n", 0),
        ("n", 17),
        ("seed", 1.5),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [""]),
        ("stop", 5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", [5]),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"5": 10**400}),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", list(range(1025))),
        ("cache_salt", 7),
        ("priority", "high"),
        ("request_id", "bad id\n"),
        ("stream", 1),
        ("stream_options", {"surprise": True}),
        ("response_format", {"type": "wombat"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"structural_tag": "x"}),
        ("guided_regex", 5),
        ("guided_choice", "a"),
        ("guided_grammar", ["a"]),
        ("guided_json", 5),
        ("tools", [{"type": "function", "function": {"name": "f g"}}]),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]),
        ("messages", [{"role": "assistant", "tool_calls": "x"}]),
        ("user", 5),
        ("metadata", "x"),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": None}]}]),
        ("best_of", 1),
        ("chat_template", "{{ evil }}"),
        ("kv_transfer_params", {}),
    ],
)
def test_a_bad_chat_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("best_of", 2),
        ("suffix", "end"),
        ("logprobs", 6),
        ("prompt", ["a", "b"]),
        ("prompt", 5),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("messages", []),
        ("max_completion_tokens", 5),
    ],
)
def test_a_bad_completion_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        text(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'"x"'])
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        parse(data, chat=True)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize("levels", [970, 975, 980, 985, 990, 100_000])
def test_a_body_nested_too_deep_is_refused(levels: int) -> None:
    """Some levels can be read, but not written again to measure the tools."""
    tool = b'{"type": "function", "function": {"name": "f"}, "x": ' + nested(levels) + b"}"
    with pytest.raises(RequestError):
        parse(json.dumps(CHAT)[:-1].encode() + b', "metadata": ' + nested(levels) + b', "tools": [5]}', chat=True)
    if levels > 975:
        with pytest.raises(RequestError):
            parse(json.dumps(CHAT)[:-1].encode() + b', "tools": [' + tool + b"]}", chat=True)


def test_missing_fields_are_named() -> None:
    for body, param in (({"messages": CHAT["messages"]}, "model"), ({"model": "m"}, "messages")):
        with pytest.raises(RequestError) as caught:
            parse(json.dumps(body).encode(), chat=True)
        assert caught.value.param == param


def test_fields_that_need_each_other_are_checked_together() -> None:
    for fields, param in (
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            chat(**fields)
        assert caught.value.param == param


def test_documented_fields_without_effect_and_nulls_are_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        temperature=None,
        stop=None,
        max_tokens=None,
        logit_bias=None,
    )
    text(echo=False, best_of=1, suffix=None)


def test_the_newer_limit_wins_and_completions_default_to_16() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat().max_tokens is None
    assert text().max_tokens == 16


@pytest.mark.parametrize(("prompt", "expected"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_a_prompt_is_text_or_ids_or_a_list_of_one(prompt: Any, expected: Any) -> None:
    assert text(prompt=prompt).prompt == expected


def test_end_tokens_are_added_unless_ignored() -> None:
    ends = frozenset([2])
    assert chat(stop_token_ids=[9]).sampling(5, ends, 0).stop_token_ids == {2, 9}
    assert chat(stop_token_ids=[9], ignore_eos=True).sampling(5, ends, 0).stop_token_ids == {9}


def test_choices_differ_by_seed_and_unseeded_requests_differ() -> None:
    request = chat(seed=5, n=2)
    assert [request.sampling(5, frozenset(), at).seed for at in (0, 1)] == [5, 6]
    assert chat().sampling(5, frozenset(), 0).seed != chat().sampling(5, frozenset(), 0).seed
