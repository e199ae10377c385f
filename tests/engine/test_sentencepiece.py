"""SentencePiece vocabularies against what sentencepiece 0.2.3 itself makes of texts.

sentencepiece.json holds a BPE vocabulary with byte fallback, trained by it on this project's documentation, and the ids
that it gives some texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.errors import UnsupportedModel
from engine.sentencepiece import piece_bytes
from engine.tokenizer import Tokenizer, from_folder, from_gguf

DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix("").with_name("sentencepiece.json").read_text("utf-8"))
META: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": DATA["tokens"],
    "tokenizer.ggml.scores": DATA["scores"],
    "tokenizer.ggml.token_type": DATA["types"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.fixture(scope="module")
def gguf() -> Tokenizer:
    return from_gguf(META)


@pytest.fixture(scope="module")
def folder(gguf: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same as a tokenizer.json, as Llama 2's is."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(gguf.to_json())
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return from_folder(path)


@pytest.mark.parametrize("source", ["gguf", "folder"])
def test_ids_are_those_of_sentencepiece(source: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(source)
    assert len(DATA["texts"]) > 40
    for text, ids in DATA["texts"]:
        assert tokenizer.encode(text) == [1, *ids], text
        detokenizer = tokenizer.detokenizer()
        pieces = "".join([*map(detokenizer.push, [1, *ids]), detokenizer.flush()])
        assert pieces == (" " + text if text else "")
    assert tokenizer.special.end_ids == {2}


def test_characters_without_a_piece_come_whole(gguf: Tokenizer) -> None:
    """Spelled in bytes, one token each."""
    ids = gguf.encode("𝔘")[2:]
    assert len(ids) == 4
    detokenizer = gguf.detokenizer()
    assert [detokenizer.push(id) for id in ids] == ["", "", "", "𝔘"]


def test_a_model_may_want_no_space_before_a_text_and_no_bos() -> None:
    bare = from_gguf(META | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    ids = bare.encode("a  b")
    assert b"".join(bare.token_bytes(id) for id in ids) == b"a  b"


def test_pieces_stand_for_bytes() -> None:
    assert [piece_bytes(p) for p in ("▁the", "a▁b", "<0xE2>", "<0xZZ>")] == [b" the", b"a b", b"\xe2", b"<0xZZ>"]


def test_control_tokens_have_no_text(gguf: Tokenizer) -> None:
    assert [gguf.token_bytes(id) for id in range(3)] == [b"", b"", b""]
    assert gguf.token_text(2) == "</s>"


def test_grammars_read_such_a_vocabulary(gguf: Tokenizer) -> None:
    """What is allowed after `[` by a regex is what spells it, in pieces or in bytes."""
    tokens = LLTokenizer(gguf.to_json(), n_vocab=gguf.vocab_size, eos_token=[2])
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_regex(r"\[[0-9]\]"))
    mask = allocate_token_bitmask(1, gguf.vocab_size)
    fill_next_token_bitmask(matcher, mask, 0)
    allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little").nonzero()[0]
    assert len(allowed) > 0
    assert all(gguf.token_bytes(int(id)).startswith(b"[") for id in allowed)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'t5' is not supported; byte-level and SentencePiece BPE are"):
        from_gguf(META | {"tokenizer.ggml.model": "t5"})
    with pytest.raises(UnsupportedModel, match="normalise texts"):
        from_gguf(META | {"tokenizer.ggml.precompiled_charsmap": [1]})
