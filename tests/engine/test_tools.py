"""Function calling: calls are read alike however the text is cut; models are told of tools in the way they know."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.guided import GuidedGrammar
from engine.outbox import Delta
from engine.server.reader import ChoiceReader, Said
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer
from engine.tools.parser import CallPart, ToolParser
from engine.tools.tool import CLOSE, OPEN, Tool, ToolUse, grammar_of, read_tools, tool_use
from engine.types import FinishReason, Sampled
from tests.engine.test_guided import allowed, compiled, compiler


def definition(name: str = "get_weather", **function: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters} | function}


def tools(*definitions: dict[str, Any]) -> tuple[Tool, ...]:
    return tuple(read_tools(list(definitions or [definition()])))


def read(pieces: list[str], *, complete: bool = True) -> tuple[str, list[list[str]]]:
    """Content, and [id, name, arguments] of each call, as a client joins the parts."""
    ids = iter(range(99))
    parser = ToolParser(lambda: str(next(ids)))
    parsed = [parser.push(piece) for piece in pieces] + [parser.finish(complete=complete)]
    calls: list[list[str]] = []
    for part in (part for one in parsed for part in one.calls):
        if part.id is not None:
            assert part.index == len(calls)
            calls.append([part.id, part.name or "", ""])
        calls[part.index][2] += part.arguments
    return "".join(one.content for one in parsed), calls


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(edge % (len(text) + 1) for edge in at), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.sampled_from([OPEN, CLOSE, '"}', "\\", "{["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["get_weather", "now", "a-b_c"]), st.dictionaries(st.text(max_size=6), VALUES, max_size=3)
    ),
    max_size=3,
)
CONTENT = st.text(alphabet="ab <>/_\n{}tool_call", max_size=30).filter(lambda text: OPEN not in text)
GAPS = st.sampled_from(["", " ", "\n"])


@given(CONTENT, CALLS, GAPS, st.booleans(), st.lists(st.integers(0, 10_000), max_size=30))
def test_calls_are_read_alike_at_every_cut(
    content: str, calls: list[tuple[str, dict[str, Any]]], gap: str, ascii: bool, at: list[int]
) -> None:
    written = [json.dumps(arguments, ensure_ascii=ascii) for _, arguments in calls]
    text = content + gap.join(
        f'{OPEN}{gap}{{"name": "{name}", "arguments": {arguments}}}{gap}{CLOSE}'
        for (name, _), arguments in zip(calls, written, strict=True)
    )
    expected = [
        [str(at), name, arguments] for at, ((name, _), arguments) in enumerate(zip(calls, written, strict=True))
    ]
    whole = read([text])
    assert whole == (content.rstrip() if calls else content, expected)
    assert read(cut(text, at)) == whole
    assert read(list(text)) == whole


@given(CALLS.filter(bool), st.integers(0, 10_000), st.lists(st.integers(0, 10_000), max_size=10))
def test_a_call_cut_short_shows_a_prefix_of_its_arguments_and_no_tag(
    calls: list[tuple[str, dict[str, Any]]], end: int, at: list[int]
) -> None:
    name, arguments = calls[0][0], json.dumps(calls[0][1])
    text = f'Well,\n{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'
    text = text[: end % (len(text) + 1)]
    content, read_calls = read(cut(text, at), complete=False)
    assert "Well,\n".startswith(content)
    assert read_calls == read([text], complete=False)[1]
    assert all(call[1] == name and arguments.startswith(call[2]) for call in read_calls)


@given(CONTENT, st.lists(st.integers(0, 10_000), max_size=10))
def test_text_without_calls_stays_as_it_is(content: str, at: list[int]) -> None:
    assert read(cut(content, at)) == (content, [])


def said(text: str, use: ToolUse, finish: FinishReason = FinishReason.STOP) -> tuple[Said, list[Said]]:
    """One answer read at once, and character by character."""
    reader = ChoiceReader(use)
    parts = [reader.read(Delta(char, 1, [Sampled(at)])) for at, char in enumerate(text)]
    parts.append(reader.read(Delta(finish=finish)))
    return ChoiceReader(use).read(Delta(text, len(text), finish=finish)), parts


CALL = f'{OPEN}\n{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}\n{CLOSE}'


@pytest.mark.parametrize(
    ("text", "use", "finish", "reason"),
    [
        (CALL, ToolUse(tools()), FinishReason.STOP, "tool_calls"),
        (CALL, ToolUse(tools(), required=True), FinishReason.STOP, "tool_calls"),
        (CALL, ToolUse(tools(), named="get_weather"), FinishReason.STOP, "stop"),
        (CALL[:-4], ToolUse(tools()), FinishReason.LENGTH, "length"),
        ("It is sunny.", ToolUse(tools()), FinishReason.STOP, "stop"),
    ],
)
def test_finish_reasons(text: str, use: ToolUse, finish: FinishReason, reason: str) -> None:
    whole, parts = said(text, use, finish)
    assert whole.reason == parts[-1].reason == reason
    assert all(part.reason is None for part in parts[:-1])


def test_log_probabilities_belong_to_content_only() -> None:
    """A token that may begin a tag waits; those of calls are dropped."""
    _, parts = said("a <b" + CALL, ToolUse(tools()))
    assert [sampled.token_id for part in parts for sampled in part.sampled] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("x", "a list"),
        ([{"type": "function"}], "tool 0 must be"),
        ([{"type": "retrieval", "function": {"name": "a"}}], "tool 0 must be"),
        ([definition("bad name")], "1 to 64 letters"),
        ([definition(), definition()], "the same name"),
        ([definition(parameters={"type": "array"})], "type object"),
        ([definition(parameters=[])], "type object"),
        ([definition(description=5)], "must be a string"),
        ([definition(strict="yes")], "true or false"),
        ([definition(colour="red")], "unknown field 'colour'"),
        ([definition(f"f{i}") for i in range(129)], "129 tools; the limit is 128"),
        ([definition(f"f{i}", description="x" * 4_000) for i in range(40)], "bytes; the limit is 131072"),
        ([definition(parameters={"properties": {f"p{i}": {} for i in range(600)}})], "the limit is 512"),
    ],
)
def test_bad_or_too_many_tools_are_refused_with_the_reason(value: Any, told: str) -> None:
    with pytest.raises((ValueError, RequestError)) as caught:
        read_tools(value)
    assert told in str(caught.value)


@pytest.mark.parametrize("choice", ["sometimes", {"type": "function"}, {"type": "function", "function": {"name": "x"}}])
def test_a_choice_that_cannot_be_made_names_the_field(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        tool_use(list(tools()), choice, parallel=True)
    assert caught.value.param == "tool_choice"


def test_no_tools_or_none_means_no_tool_use() -> None:
    assert tool_use([], None, parallel=True) is None
    assert tool_use(list(tools()), "none", parallel=True) is None
    with pytest.raises(RequestError):
        tool_use([], "required", parallel=True)


GRAMMARS = [
    (ToolUse(tools()), "Hello <b> there, <tool", True),
    (ToolUse(tools()), f"Let me see.\n{CALL}", True),
    (ToolUse(tools()), f"{CALL}\n{CALL}", True),
    (ToolUse(tools(), parallel=False), f"{CALL}\n{CALL}", False),
    (ToolUse(tools()), f'{OPEN}\n{{"name": "other"', False),
    (ToolUse(tools()), f'{OPEN}{{"name": "get_weather", "arguments": {{"city": 5', False),
    (ToolUse(tools(), required=True), "Hello", False),
    (ToolUse(tools(), required=True), CALL, True),
    (ToolUse(tools(definition(), definition("now", parameters=None)), named="now"), CALL, False),
]


@pytest.mark.parametrize(("use", "text", "passes"), GRAMMARS)
async def test_what_the_grammar_of_calls_lets_through(
    tokenizer: Tokenizer, use: ToolUse, text: str, passes: bool
) -> None:
    entry = await compiled(compiler(tokenizer), grammar_of(use))
    assert entry.error is None
    grammar = GuidedGrammar(entry)
    assert lets_through(grammar, tokenizer, text) is passes


def lets_through(grammar: GuidedGrammar, tokenizer: Tokenizer, text: str) -> bool:
    for token in tokenizer.encode(text):
        if token not in allowed(grammar):
            return False
        grammar.accept(token)
    return True


async def test_beside_tools_an_answer_may_have_a_form_of_its_own(tokenizer: Tokenizer) -> None:
    entry = await compiled(compiler(tokenizer), grammar_of(ToolUse(tools()), {"type": "object"}))
    assert lets_through(GuidedGrammar(entry), tokenizer, '{"a": 1}')
    assert lets_through(GuidedGrammar(entry), tokenizer, CALL)
    assert not lets_through(GuidedGrammar(entry), tokenizer, "Hello")


async def test_keywords_that_cannot_be_enforced_pass_only_where_nothing_is_promised(tokenizer: Tokenizer) -> None:
    odd = definition(parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    strict = definition(parameters=odd["function"]["parameters"], strict=True)
    one = compiler(tokenizer)
    assert (await compiled(one, grammar_of(ToolUse(tools(odd))))).error is None
    for use in (ToolUse(tools(odd), required=True), ToolUse(tools(strict))):
        entry = await compiled(one, grammar_of(use))
        assert entry.error is not None
        assert "uniqueItems" in entry.error


PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
HERMES = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}]"
    "{% endfor %}"
)
HISTORY = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "content": "cold"},
]


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects() -> None:
    template = ChatTemplate(HERMES)
    assert template.takes_tools
    text = template.render(HISTORY, [definition()])
    assert text.startswith('{"type": "function", "function": {"name": "get_weather"')
    assert '<tool_call>{"city": "Oslo"}</tool_call>' in text
    assert "[tool:sunny]" in text


def test_another_template_gets_our_own_prompt_and_everything_as_text() -> None:
    template = ChatTemplate(PLAIN)
    assert not template.takes_tools
    text = template.render([{"role": "system", "content": "Be brief."}, *HISTORY], [definition()])
    assert text.startswith("[system:Be brief.\n\nYou can call functions.")
    assert '{"name": "get_weather", "parameters":' in text
    assert f"[assistant:{CALL}]" in text
    told = "[user:<tool_response>\nsunny\n</tool_response>\n<tool_response>\ncold\n</tool_response>]"
    assert text.endswith(told)
    assert template.render([{"role": "user", "content": "x"}], [definition()]).startswith("[system:You can call")


def test_a_history_with_calls_needs_no_tools() -> None:
    assert ChatTemplate(PLAIN).render(HISTORY).startswith("[user:hi][assistant:<tool_call>")


def test_a_template_of_another_form_is_treated_as_knowing_none() -> None:
    for other in ("{{ tools }}[TOOL_CALLS]", "{{ tools }}<tool_call><function=x>", "<tool_call>"):
        assert not ChatTemplate(other).takes_tools


def test_parts_of_one_call_share_a_chunk() -> None:
    """Clients join the entries of a chunk by index, so there must be one for each call."""
    parsed = ToolParser(lambda: "id").push(CALL + CALL)
    assert parsed.calls == [
        CallPart(0, "id", "get_weather", '{"city": "Oslo"}'),
        CallPart(1, "id", "get_weather", '{"city": "Oslo"}'),
    ]
