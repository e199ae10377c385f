"""Structured output and function calling on the real engine with the bundled model, through the official client."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

from tests.engine.schemas import accepts, is_json_prefix, random_schema
from tests.engine.served import NAME, Served

USER = [{"role": "user", "content": "What is the weather in Paris? Answer with JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def create(served: Served, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name not in KNOWN}
    body = {"model": NAME, "messages": USER, "max_tokens": 100} | fields
    return served.api.chat.completions.create(**body, extra_body=extra)


KNOWN = frozenset(
    ("messages", "max_tokens", "stream", "seed", "n", "response_format", "tools", "tool_choice", "temperature", "stop")
    + ("logit_bias", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "logprobs")
)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def told(answer: Any) -> tuple[str, str]:
    """Text and finish reason, of a stream or of a whole answer."""
    if not isinstance(answer, openai.Stream):
        return answer.choices[0].message.content, answer.choices[0].finish_reason
    chunks = [chunk.choices[0] for chunk in answer]
    return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_answers_to_random_schemas_are_valid_or_cut_prefixes(served: Served, stream: bool) -> None:
    """A smaller run of what bench/engine_guided.py does with 200."""
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in range(12)]

    def one(schema: Any) -> tuple[Any, str, str]:
        answer = create(served, response_format=schema_format(schema), stream=stream, seed=3, max_tokens=80)
        return schema, *told(answer)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, schemas))
    wrong = [(s, t, r) for s, t, r in answers if not (is_json_prefix(t) if r == "length" else accepts(s, t))]
    assert wrong == []
    assert any(reason == "stop" for _, _, reason in answers)


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 300}, lambda t: isinstance(json.loads(t), dict)),
        ({"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}}, lambda t: len(t) == 6),
        ({"structured_outputs": {"choice": ["red", "green"]}}, lambda t: t in ("red", "green")),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, lambda t: t[0] == "x" and t[1:].isdigit()),
        ({"structured_outputs": {"json": PERSON}}, lambda t: accepts(PERSON, t)),
        ({"guided_json": json.dumps(PERSON)}, lambda t: accepts(PERSON, t)),
        ({"guided_regex": "ab|cd"}, lambda t: t in ("ab", "cd")),
        ({"guided_choice": ["red", "green"]}, lambda t: t in ("red", "green")),
        ({"guided_grammar": 'root ::= "x" | "y"'}, lambda t: t in ("x", "y")),
    ],
)
def test_every_way_to_ask_for_a_form(served: Served, fields: dict[str, Any], check: Any) -> None:
    text, reason = told(create(served, **fields))
    if reason == "length" and "max_tokens" in fields:  # nothing bounds an object without a schema but the tokens
        assert is_json_prefix(text), text
        return
    assert reason == "stop"
    assert check(text), text


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 50},
        {"ignore_eos": True},
        {"logit_bias": {str(id): 100 for id in range(40)}},
        {"logit_bias": {"2": -100, "0": -100}},
        {"temperature": 2},
        {"temperature": 0, "top_k": 1},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 5, "top_p": 0.1},
        {"min_tokens": 50, "ignore_eos": True, "min_p": 1},
    ],
)
def test_nothing_that_shifts_the_odds_breaks_the_form(served: Served, fields: dict[str, Any]) -> None:
    """A complete answer ends, whatever min_tokens or ignore_eos say: there is nothing left to say."""
    answer = create(served, response_format=schema_format(PERSON), **fields)
    text, reason = told(answer)
    assert reason == "stop"
    assert accepts(PERSON, text)
    assert answer.usage.completion_tokens < 50


def test_a_stop_string_cuts_a_form_too(served: Served) -> None:
    text, reason = told(create(served, structured_outputs={"regex": "abc[0-9]{5}"}, stop=["c"]))
    assert (text, reason) == ("ab", "stop")


def test_max_tokens_cuts_a_form_and_says_so(served: Served) -> None:
    text, reason = told(create(served, response_format=schema_format(PERSON), max_tokens=4))
    assert reason == "length"
    assert is_json_prefix(text)


def test_a_complete_answer_that_fills_max_tokens_ends_with_stop(served: Served) -> None:
    text, reason = told(create(served, structured_outputs={"choice": ["a"]}, max_tokens=1))
    assert (text, reason) == ("a", "stop")


def test_each_choice_has_a_grammar_of_its_own(served: Served) -> None:
    answer = create(served, response_format=schema_format(PERSON), n=3, seed=5)
    assert all(accepts(PERSON, choice.message.content) for choice in answer.choices)


def test_completions_take_forms_too(served: Served) -> None:
    answer = served.api.completions.create(model=NAME, prompt="x", extra_body={"guided_regex": "[0-9]{4}"})
    assert answer.choices[0].text.isdigit()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": schema_format({"not": {}})}, "response_format", "unsupported schema keyword: not"),
        ({"response_format": schema_format({"enum": list(range(3000))})}, "response_format", "the limit is 2000"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_grammar": "start: ("}, "guided_grammar", ""),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "surrogates"),
        ({"guided_json": '{"minimum": NaN}'}, "guided_json", ""),
        ({"guided_grammar": 'root ::= "a" missing'}, "guided_grammar", "missing"),
        ({"guided_grammar": "root ::= " + "(" * 3000}, "guided_grammar", ""),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "another form"),
        ({"guided_regex": "a", "tools": TOOLS}, "guided_regex", "response_format can"),
        ({"tools": TOOLS * 100}, "tools", "the limit is 128"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "auto"),
    ],
)
def test_what_cannot_be_held_is_a_400_that_names_the_field(
    served: Served, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(served, stream=stream, **fields)
    assert caught.value.param == param
    assert words in caught.value.message
    served.wait_idle()


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_a_forced_call_has_valid_arguments_streamed_or_not(served: Served, choice: Any, reason: str) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 4}
    whole = create(served, **fields).choices[0]
    assert whole.finish_reason == reason
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    schema = TOOLS[0 if call.function.name == "get_weather" else 1]["function"].get("parameters", {"maxProperties": 0})
    assert accepts(schema, call.function.arguments)
    chunks = [chunk.choices[0] for chunk in create(served, stream=True, **fields)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert [bool(part.id) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert parts[0].function.name == call.function.name
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == reason


def test_the_model_may_answer_or_call_by_itself_and_tags_never_show(served: Served) -> None:
    told = "".join(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}", "unit": "c"}}}}\n</tool_call>'
        for city in ("Oslo",)
    )
    # A history that calls each time leads the small model to call, too.
    turns = [{"role": "user", "content": "Weather in Oslo?"}, {"role": "assistant", "content": told}]
    for messages in (USER, [*turns, *turns, {"role": "user", "content": "Weather in Paris?"}]):
        answer = create(served, messages=messages, tools=TOOLS, temperature=0, max_tokens=120).choices[0]
        assert "tool_call" not in (answer.message.content or "")
        for call in answer.message.tool_calls or []:
            assert accepts(TOOLS[0]["function"]["parameters"], call.function.arguments)
        called = bool(answer.message.tool_calls)
        assert answer.finish_reason == ("tool_calls" if called else "stop") or answer.finish_reason == "length"
    assert called, "the history leads to a call"


def test_a_conversation_goes_on_after_a_call(served: Served) -> None:
    first = create(served, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 20 degrees"}
    again = create(served, messages=[*USER, message.model_dump(), result], tools=TOOLS, tool_choice="none")
    assert again.choices[0].message.content
    assert again.choices[0].message.tool_calls is None


def test_an_answer_without_a_call_may_have_a_form_of_its_own(served: Served) -> None:
    answer = create(served, tools=TOOLS, response_format=schema_format(PERSON)).choices[0]
    assert answer.message.tool_calls or accepts(PERSON, answer.message.content)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)


def test_the_official_client_parses_into_a_model(served: Served) -> None:
    parsed = served.api.chat.completions.parse(
        model=NAME, messages=[{"role": "user", "content": "Who are you?"}], response_format=Person, max_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
