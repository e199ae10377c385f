"""Chat templates run in a sandbox with bounds on time and size."""

from __future__ import annotations

import sys

import pytest

from engine import template
from engine.errors import TemplateError, UnsupportedModel
from engine.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def test_special_tokens_json_and_the_generation_flag_reach_the_template() -> None:
    source = "{{ bos_token }}{{ messages[0] | tojson }}{% if add_generation_prompt %}>{% endif %}"
    rendered = ChatTemplate(source, bos_token="<s>").render([{"role": "user", "content": "é<b>"}])
    assert rendered == '<s>{"role": "user", "content": "é<b>"}>'


def test_developer_messages_become_system_messages() -> None:
    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "developer", "content": "x"}]) == "system"


def test_the_template_can_refuse_messages() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ undefined_thing.attribute }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_dangerous_templates_are_refused(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(USER)


def test_a_silent_endless_loop_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing, so only the clock can stop it; the tracer of before is put back."""
    monkeypatch.setattr(template, "TIME_LIMIT_S", 0.1)
    loop = "{% for i in range(9999) %}{% for j in range(9999) %}{% set x = j %}{% endfor %}{% endfor %}"
    before = sys.gettrace()
    with pytest.raises(TemplateError, match="took longer than"):
        ChatTemplate(loop).render(USER)
    assert sys.gettrace() is before


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_OUTPUT_CHARS", 100)
    with pytest.raises(TemplateError, match="wrote too much"):
        ChatTemplate("{% for i in range(99) %}xx{{ i }}{% endfor %}").render(USER)


def test_templates_that_do_not_compile_or_are_huge_stop_the_load() -> None:
    with pytest.raises(UnsupportedModel, match="does not compile"):
        ChatTemplate("{% for %}")
    with pytest.raises(UnsupportedModel, match="exceeds"):
        ChatTemplate("x" * 300_000)
