"""Tokenizer and detokenizer against the Hugging Face tokenizer of the same file."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer

from engine.errors import ContextTooLong
from engine.tokenizer import Tokenizer, byte_alphabet, from_gguf

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\ttabs and 1234567890 numbers 3.14",
    "I'll, you're, they've, DON'T",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|",
    "naïve café Ünïcödé ß ﬁ",
    "日本語のテキスト 中文 한국어 العربية עברית",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 \U0001f600\u200d",
    "\x00\x01\x7f\u00a0\u2028\ufeff",
    "a" * 300,
    "x = {'k': [1, 2]}  # comment\r\n",
]


@pytest.fixture(scope="module")
def reference(bundled_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(bundled_model.parent, gguf_file=bundled_model.name)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    plain = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids) == plain == pieces(tokenizer, ids)


def test_a_long_text_leaves_the_interpreter_to_others(tokenizer: Tokenizer) -> None:
    """The step thread and the event loop need it while a prompt is cut into tokens."""
    done, gaps = threading.Event(), [0.0]

    def watch() -> None:
        last = time.monotonic()
        while not done.wait(0.001):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    tokenizer.encode("some words " * 200_000)
    took = time.monotonic() - began
    done.set()
    watcher.join()
    assert max(gaps) < took / 2


def test_a_text_that_no_window_holds_is_refused_unread(tokenizer: Tokenizer) -> None:
    longest = max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size))
    for encode in (tokenizer.encode, tokenizer.encode_document):
        with pytest.raises(ContextTooLong, match="window is 100 tokens; the text has more than 101"):
            encode("a" * (101 * longest), 100)
    with pytest.raises(ContextTooLong):
        tokenizer.encode_chat([{"role": "user", "content": "a" * (101 * longest)}], (), 100)
    space = next(id for id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(id)) == longest)
    text = tokenizer.token_bytes(space).decode() * 100
    assert len(tokenizer.encode(text, 100)) <= len(text), "what may fit is left to the tokenizer"


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """The bundled vocabulary lacks a token for a few bytes; text with those cannot survive."""
    known = {tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)}
    assume(all(bytes([byte]) in known for byte in text.encode()))
    assert pieces(tokenizer, tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_incremental_decoding_equals_decoding_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Also for token salad that is not valid UTF-8."""
    assert pieces(tokenizer, ids) == tokenizer.decode(ids)


def test_no_piece_shows_half_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("🦜🧉𝔘")
    assert len(ids) > 3
    assert all("\ufffd" not in detokenizer.push(id) for id in ids)


def test_chat_prompts_equal_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    chats = [
        [{"role": "user", "content": "Hi"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Name a colour."},
        ],
    ]
    for messages in chats:
        theirs = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = reference.encode(theirs, add_special_tokens=False)
        assert tokenizer.encode_chat(messages) == expected


def test_null_content_and_lists_of_parts_are_legal(tokenizer: Tokenizer) -> None:
    """The bundled template adds strings; neither null nor a list may reach it."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert tokenizer.encode_chat([{"role": "user", "content": parts}]) == tokenizer.encode_chat(
        [{"role": "user", "content": "Hello"}]
    )
    assert tokenizer.encode_chat([{"role": "assistant", "content": None}]) == tokenizer.encode_chat(
        [{"role": "assistant", "content": ""}]
    )


def test_every_end_token_of_the_family_ends_a_generation(tokenizer: Tokenizer) -> None:
    assert tokenizer.special.end_ids == {0, 2}


def test_the_newer_mistrals_cut_words_where_case_changes() -> None:
    """Their vocabulary is called tekken in GGUF files; digits stand alone, a slash stays with what it ends."""
    alphabet = {char: id for id, char in enumerate(byte_alphabet())}
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken", "tokenizer.ggml.tokens": [*alphabet]}
    tokenizer = json.loads(from_gguf(meta | {"tokenizer.ggml.merges": []}).to_json())
    cut = tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    split = Split(Regex(cut), "isolated")
    pieces = [piece for piece, _ in split.pre_tokenize_str("HelloWorld isn't 42 JSONText ()/ été")]
    assert pieces == ["Hello", "World", " isn", "'t", " ", "4", "2", " JSONText", " ()/", " été"]
    assert tokenizer["model"]["ignore_merges"]
