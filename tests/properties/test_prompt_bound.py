"""A prompt never has more tokens than the gateway reserves for it before anybody has counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.gguf_file import GgufFile
from engine.tokenizer import Tokenizer, load_tokenizer
from serving.schemas.chat import chat
from serving.schemas.completions import completion
from serving.schemas.embeddings import embeddings
from serving.translate.messages import messages
from serving.translate.responses import responses

# JSON cannot carry lone surrogates; these are the characters that cost the most: marks, rare scripts, controls, emoji
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=200) | st.sampled_from(
    ("\u0378" * 50, "\U0001f9d1\u200d\U0001f680" * 20, "\ufdfa" * 40, "\x00\x01" * 40, "<|im_start|>" * 9, " \n\t" * 60)
)
VALUE = st.recursive(st.none() | st.integers(-9, 9) | TEXT, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=3)
NAME = st.text("abc_", min_size=1, max_size=9)
FUNCTION = st.fixed_dictionaries({"name": NAME, "description": TEXT, "parameters": OBJECT})
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path) -> Tokenizer:
    return load_tokenizer(GgufFile(bundled_model).metadata, bundled_model)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_of_plain_text(tokenizer: Tokenizer, text: str) -> None:
    count = len(tokenizer.encode(text))
    assert completion(body(prompt=text)).prompt_bound >= count
    assert completion(body(prompt=[text, text])).prompt_bound >= 2 * count
    assert embeddings(body(input=[text, text])).prompt_bound >= 2 * len(tokenizer.encode_document(text))


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=6), tools=TOOLS)
def test_of_a_chat_beyond_what_the_template_adds(tokenizer: Tokenizer, texts: list[str], tools: list[Any]) -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    # what the template says of tools in its own words, whatever they are
    frame = len(tokenizer.encode_chat(said, [{"function": {}}])) - len(tokenizer.encode_chat(said)) if tools else 0
    count = len(tokenizer.encode_chat(said, tools)) - frame
    assert chat(body(messages=said, tools=tools)).prompt_bound >= count


@settings(max_examples=100, deadline=None)
@given(system=TEXT, asked=TEXT, called=OBJECT, result=TEXT)
def test_of_calls_and_their_results_in_the_translated_apis(
    tokenizer: Tokenizer, system: str, asked: str, called: dict[str, Any], result: str
) -> None:
    turns = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": called}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}]},
    ]
    items = [
        {"role": "user", "content": asked},
        {"type": "function_call", "call_id": "t1", "name": "look", "arguments": json.dumps(called)},
        {"type": "function_call_output", "call_id": "t1", "output": result},
    ]
    for ask in (
        messages(body(max_tokens=1, system=system, messages=turns)),
        responses(body(instructions=system, input=items)),
    ):
        assert ask.prompt_bound >= len(tokenizer.encode_chat(ask.upstream["messages"]))
