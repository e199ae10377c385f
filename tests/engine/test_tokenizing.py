"""POST /tokenize and /detokenize of a real engine process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.tokenizer import Tokenizer
from tests.engine.served import NAME, Served, serve

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def post(served: Served, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/{path}", json={"model": NAME, **fields}, timeout=60)


def test_a_prompt_has_the_tokens_that_it_is_billed_for(served: Served, tokenizer: Tokenizer) -> None:
    told = post(served, "tokenize", prompt="Hello, Wörld").json()
    assert told == {"count": len(told["tokens"]), "max_model_len": 8192, "tokens": tokenizer.encode("Hello, Wörld")}
    billed = served.api.completions.create(model=NAME, prompt="Hello, Wörld", max_tokens=1).usage
    assert billed is not None and billed.prompt_tokens == told["count"]
    spelled = post(served, "tokenize", prompt="Hello", return_token_strs=True, add_special_tokens=False).json()
    assert "".join(spelled["token_strs"]) == "Hello" and len(spelled["token_strs"]) == spelled["count"]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
def test_a_chat_has_the_tokens_that_it_is_billed_for(served: Served, fields: dict[str, Any]) -> None:
    told = post(served, "tokenize", messages=FRANCE, **fields).json()
    billed = served.api.chat.completions.create(model=NAME, messages=FRANCE, max_tokens=1, **fields).usage  # type: ignore[call-overload]
    assert billed.prompt_tokens == told["count"] == len(told["tokens"])


def test_ids_become_the_text_that_they_came_from(served: Served) -> None:
    ids = post(served, "tokenize", messages=FRANCE).json()["tokens"]
    text = post(served, "detokenize", tokens=ids).json()["prompt"]
    assert FRANCE[0]["content"] in text
    assert post(served, "tokenize", prompt=text, add_special_tokens=False).json()["tokens"] == ids
    assert post(served, "detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_text_beyond_the_window_is_counted_too(served: Served) -> None:
    assert post(served, "tokenize", prompt="word " * 9000).json()["count"] > 8192


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": FRANCE}, 400, "prompt"),
        ("tokenize", {"prompt": 3}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "temperature": 1}, 400, "temperature"),
        ("tokenize", {"messages": FRANCE, "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_a_bad_field_is_named(served: Served, path: str, fields: dict[str, Any], status: int, param: str) -> None:
    answer = post(served, path, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_key_guards_them(bundled_model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-secret-key-of-the-engine")
    with serve(bundled_model, tmp_path, "--api-key-file", str(key), "--num-blocks", "64") as engine:
        assert post(engine, "tokenize", prompt="a").status_code == 401
        assert post(engine, "detokenize", tokens=[1]).status_code == 401
        headers = {"Authorization": f"Bearer {key.read_text()}"}
        body = {"model": NAME, "prompt": "a"}
        assert httpx.post(f"{engine.url}/tokenize", json=body, headers=headers, timeout=60).status_code == 200
