"""Grammars: what they let through is valid, what they cost is bounded, and each tenant has its own."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest

from engine import constraints
from engine.constraints import Constraint
from engine.errors import Overloaded, RequestError
from engine.guided import Compiled, Compiler, CompilerLimits, GuidedGrammar
from engine.tokenizer import Tokenizer
from tests.engine.schemas import accepts, is_json_prefix, random_schema

VOCAB = 49_152


def compiler(tokenizer: Tokenizer, wake: Any = lambda: None, **limits: Any) -> Compiler:
    return Compiler(tokenizer, VOCAB, wake, CompilerLimits(**limits))


async def compiled(compiler: Compiler, constraint: Constraint, tenant: str = "") -> Compiled:
    """Acquire, and wait until it is ready."""
    entry = compiler.acquire(constraint, tenant)
    async with asyncio.timeout(30):
        while not entry.ready:
            await asyncio.sleep(0.001)
    return entry


def allowed(grammar: GuidedGrammar) -> np.ndarray[Any, Any]:
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])


def write(grammar: GuidedGrammar, tokenizer: Tokenizer, rng: random.Random, limit: int) -> tuple[str, bool]:
    """Random tokens that the grammar allows, the end as soon as it may: text, and whether it ended by itself."""
    detokenizer, text = tokenizer.detokenizer(), ""
    ends = tokenizer.special.end_ids
    for _ in range(limit):
        ids = allowed(grammar)
        assert grammar.error is None
        assert len(ids)
        able_to_end = [id for id in ids if id in ends]
        # Short tokens end strings and lists sooner than the vocabulary's average would.
        choices = sorted((len(tokenizer.token_bytes(id)), id) for id in rng.sample(ids.tolist(), min(len(ids), 40)))
        token = able_to_end[0] if able_to_end else choices[rng.randrange(min(8, len(choices)))][1]
        grammar.accept(int(token))
        text += detokenizer.push(int(token))
        if grammar.ended:
            return text, True
    return text, False


async def test_what_random_schemas_let_through_is_valid_or_a_prefix(tokenizer: Tokenizer) -> None:
    rng, ended = random.Random(7), 0
    one = compiler(tokenizer)
    for _ in range(60):
        schema = random_schema(rng)
        entry = await compiled(one, constraints.of_json_schema(schema, "response_format"))
        assert entry.error is None, schema
        text, complete = write(GuidedGrammar(entry), tokenizer, rng, 60)
        assert accepts(schema, text) if complete else is_json_prefix(text), (schema, text)
        ended += complete
        one.release(entry)
    assert ended > 15


def test_the_prefix_check_itself() -> None:
    whole = '{"a": [1, -2.5e+3, true, null, "x\\u00e9\\n"], "b": {}}'
    assert all(is_json_prefix(whole[:size]) for size in range(len(whole) + 1))
    assert not any(map(is_json_prefix, ("}", "{a", '{"a" 1', "[1,]", "[1 2", "01", "nul!", '"\n', "{} x", '"\\x')))


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        (constraints.of_regex(r"^[a-c]{2,3}-\d$", "x"), lambda t: 4 <= len(t) <= 5 and t[-2] == "-"),
        (constraints.of_choice(["yes", "no", 'quo"te\\'], "x"), lambda t: t in ("yes", "no", 'quo"te\\')),
        (constraints.of_grammar('start: "a" b\nb: "1" | "2"', "x"), lambda t: t in ("a1", "a2")),
        (constraints.of_grammar('root ::= "x" ("y" | "z")', "x"), lambda t: t in ("xy", "xz")),
        (constraints.of_json_object("x"), lambda t: isinstance(json.loads(t), dict)),
    ],
)
async def test_every_kind_is_held(tokenizer: Tokenizer, constraint: Constraint, matches: Any) -> None:
    entry = await compiled(compiler(tokenizer), constraint)
    rng = random.Random(3)
    for _ in range(10):
        text, complete = write(GuidedGrammar(entry), tokenizer, rng, 200)
        assert matches(text) if complete else is_json_prefix(text), text


async def test_whitespace_is_flexible_but_bounded(tokenizer: Tokenizer) -> None:
    """Pretty-printed JSON passes; a model that likes nothing but spaces still gets on."""
    entry = await compiled(compiler(tokenizer), constraints.of_json_object("x"))
    for text in (json.dumps({"a": {"b": [1, 2]}}, indent=4), '{"a":{"b":[1]}}'):
        grammar = GuidedGrammar(entry)
        for token in tokenizer.encode(text):
            assert token in allowed(grammar)
            grammar.accept(token)
        assert grammar.ended
    grammar, spaces = GuidedGrammar(entry), 0
    for token in tokenizer.encode("{"):
        grammar.fill(np.zeros(VOCAB // 32, np.int32))
        grammar.accept(token)
    while blank := [t for t in allowed(grammar).tolist() if tokenizer.token_bytes(t).isspace()]:
        grammar.accept(max(blank, key=lambda t: len(tokenizer.token_bytes(t))))
        spaces += 1
        assert spaces < 40


async def test_an_ended_grammar_allows_the_end_only(tokenizer: Tokenizer) -> None:
    grammar = GuidedGrammar(await compiled(compiler(tokenizer), constraints.of_choice(["ab"], "x")))
    for token in tokenizer.encode("ab"):
        assert not grammar.ended
        grammar.fill(np.zeros(VOCAB // 32, np.int32))
        grammar.accept(token)
    assert grammar.ended
    assert set(allowed(grammar).tolist()) == tokenizer.special.end_ids


async def test_the_text_of_every_token_is_the_library_s_too(tokenizer: Tokenizer) -> None:
    """The grammar must see the very bytes that the client gets."""
    tokens = compiler(tokenizer)._vocabulary._tokens
    plain = [id for id in range(tokenizer.vocab_size) if not tokens.is_special_token(id)]
    assert [id for id in plain if tokens.decode_bytes([id]) != tokenizer.token_bytes(id)] == []
    assert [id for id in range(tokenizer.vocab_size) if tokens.is_special_token(id) and tokenizer.token_bytes(id)] == []


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"not": {"type": "string"}}, "unsupported schema keyword: not"),
        ({"type": "array", "uniqueItems": True}, "unsupported schema keyword: uniqueItems"),
        ({"type": "string", "if": {}, "then": {}}, "unsupported schema keyword: if, then"),
        ({"type": "string", "format": "wombat"}, "Unknown format: wombat"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "http://example.com/schema"}, "not fetch"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "#"}, "no finite text has this form"),
    ],
)
async def test_what_cannot_be_enforced_is_named(tokenizer: Tokenizer, schema: Any, told: str) -> None:
    entry = await compiled(compiler(tokenizer), constraints.of_json_schema(schema, "response_format"))
    assert entry.error is not None
    assert told in entry.error
    assert "'response_format'" in entry.error
    assert "\n" not in entry.error


async def test_a_pattern_too_costly_to_begin_is_refused_at_once(tokenizer: Tokenizer) -> None:
    entry = await compiled(compiler(tokenizer), constraints.of_regex("(.{0,1000}){0,1000}x", "x"))
    assert entry.error is not None
    assert "too many expressions" in entry.error


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (deep(70), "levels of nesting; the limit is 64"),
        ({"properties": {f"p{i}": {} for i in range(600)}}, "600 properties; the limit is 512"),
        ({"enum": list(range(2_001))}, "2001 enum values; the limit is 2000"),
        ({"const": "x" * 70_000}, "bytes; the limit is 65536"),
        ({"type": "string", "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ([1], "a schema is an object"),
    ],
)
def test_limits_of_a_schema_are_named(schema: Any, told: str) -> None:
    with pytest.raises(RequestError, match="Invalid 'field'") as caught:
        constraints.of_json_schema(schema, "field")
    assert told in caught.value.message
    assert caught.value.param == "field"


def test_names_of_properties_and_plain_values_are_no_keywords() -> None:
    names = {"enum": {"type": "string"}, "properties": {"type": "integer"}, "x-guidance": {"type": "null"}}
    constraints.of_json_schema({"properties": names, "default": {"x-guidance": 1, "minProperties": 9}}, "x")


@pytest.mark.parametrize(
    "make",
    [
        lambda: constraints.of_choice([], "x"),
        lambda: constraints.of_choice(["a", ""], "x"),
        lambda: constraints.of_choice(["a"] * 1_001, "x"),
        lambda: constraints.of_regex("a" * 70_000, "x"),
        lambda: constraints.of_grammar("root ::= (", "x"),
        lambda: constraints.of_grammar("#" * 70_000, "x"),
    ],
)
def test_other_kinds_are_bounded_too(make: Any) -> None:
    with pytest.raises(RequestError, match="Invalid 'x'"):
        make()


async def test_a_grammar_that_costs_too_much_per_token_ends_with_an_error(tokenizer: Tokenizer) -> None:
    """The library's fuel bounds one mask; the allowance bounds what many of them take from the other sequences."""
    entry = await compiled(compiler(tokenizer), constraints.of_grammar('start: start start | "a"', "x"))
    grammar = GuidedGrammar(entry)
    token = tokenizer.encode("a")[0]
    with pytest.raises(ValueError, match="'x'"):
        for _ in range(2_000):
            assert token in allowed(grammar)
            grammar.accept(token)
    assert grammar.error is not None
    assert not grammar.ended


async def test_equal_grammars_are_compiled_once_for_a_tenant_and_never_shared(tokenizer: Tokenizer) -> None:
    one = compiler(tokenizer)
    first = await compiled(one, constraints.of_regex("a+", "x"), "red")
    assert one.acquire(constraints.of_regex("a+", "x"), "red") is first
    assert one.acquire(constraints.of_regex("a+", "x"), "blue") is not first
    assert one.stats()["grammars"] == 2


async def test_choices_do_not_share_their_state(tokenizer: Tokenizer) -> None:
    entry = await compiled(compiler(tokenizer), constraints.of_regex("ab|cd", "x"))
    left, right = GuidedGrammar(entry), GuidedGrammar(entry)
    for grammar in (left, right):
        allowed(grammar)
    left.accept(tokenizer.encode("a")[0])
    assert tokenizer.encode("c")[0] in allowed(right)
    assert tokenizer.encode("c")[0] not in allowed(left)


async def test_a_tenant_s_grammars_are_bounded_and_the_unused_make_room(tokenizer: Tokenizer) -> None:
    one = compiler(tokenizer, tenant_bytes=1_400_000, total_bytes=2_000_000)
    held = [await compiled(one, constraints.of_regex(f"a{i}", "x"), "red") for i in range(2)]
    with pytest.raises(RequestError, match="the limit is 1400000 bytes") as caught:
        one.acquire(constraints.of_regex("a9", "x"), "red")
    assert caught.value.status == 400
    other = await compiled(one, constraints.of_regex("a0", "x"), "blue")
    with pytest.raises(Overloaded):
        one.acquire(constraints.of_regex("a0", "x"), "green")
    one.release(other)
    await compiled(one, constraints.of_regex("a0", "x"), "green")
    one.release(held[0])
    await compiled(one, constraints.of_regex("a9", "x"), "red")
    assert one.stats()["grammars"] == 3
    assert one.stats()["grammar_bytes"] <= 2_000_000


async def test_pending_compilations_of_a_tenant_are_bounded(tokenizer: Tokenizer) -> None:
    one = compiler(tokenizer, tenant_pending=2)
    for i in range(2):
        one.acquire(constraints.of_regex(f"a{i}", "x"), "red")
    with pytest.raises(RequestError, match="the limit is 2"):
        one.acquire(constraints.of_regex("a9", "x"), "red")
    one.acquire(constraints.of_regex("a9", "x"), "blue")


async def test_a_late_compilation_is_given_up_and_wakes_the_waiting(tokenizer: Tokenizer) -> None:
    """The thread goes on, the request does not; what it brings later is dropped."""
    woken = asyncio.Event()
    one = compiler(tokenizer, wake=woken.set, compile_seconds=0.0)
    entry = one.acquire(constraints.of_json_object("response_format"), "")
    grammar = GuidedGrammar(entry)
    assert not grammar.ready
    async with asyncio.timeout(30):
        await woken.wait()
    assert grammar.ready
    assert grammar.error == "Invalid 'response_format': the grammar was not compiled within 0 s."
    assert one.stats()["grammars"] == 0


async def test_a_failed_grammar_is_not_kept(tokenizer: Tokenizer) -> None:
    one = compiler(tokenizer)
    entry = await compiled(one, constraints.of_json_schema({"not": {}}, "x"))
    assert entry.error
    assert one.stats()["grammars"] == 0
    one.release(entry)
