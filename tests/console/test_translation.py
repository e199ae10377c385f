"""Every sentence a person can meet is there in the second language, and the compiled catalog is the written one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from gettext import GNUTranslations
from pathlib import Path

import pytest
from django.conf import settings
from django.utils.translation.template import templatize

ROOT = Path(__file__).parents[2]
FOLDER = Path(settings.LOCALE_PATHS[0]) / "zh_Hans" / "LC_MESSAGES"
Catalog = dict[tuple[str, str], str]  # translations by context and text
CALLS = {"_": 0, "gettext": 0, "gettext_lazy": 0, "ngettext": 0, "ngettext_lazy": 0, "pgettext": 1, "pgettext_lazy": 1}


def said(source: str) -> Iterator[tuple[str, str]]:
    """Context and text of each sentence that a Python source has translated."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            place = CALLS[node.func.id]
            texts = [each.value for each in node.args[: place + 1] if isinstance(each, ast.Constant)]
            if len(texts) == place + 1 and texts[-1]:
                yield texts[0] if place else "", texts[-1]


def as_python(template: str) -> str:
    """The calls that Django finds in a template, one a line."""
    given = r"(?:u?'(?:[^'\\]|\\.)*'|u?\"(?:[^\"\\]|\\.)*\"|[\w.]+)"
    call = rf"(?:\b[np]?gettext|\b_)\(\s*{given}(?:\s*,\s*{given})*\s*\)"
    return "\n".join(re.findall(call, templatize(template)))


@pytest.fixture(scope="module")
def translated() -> Catalog:
    """What the compiled catalog holds."""
    with (FOLDER / "django.mo").open("rb") as file:
        catalog: dict[str | tuple[str, int], str] = GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    found: Catalog = {}
    for key, value in catalog.items():
        context, _, text = (key if isinstance(key, str) else key[0]).rpartition("\x04")
        found[context, text] = value
    return found


def test_the_check_sees_what_templates_and_code_say() -> None:
    template = '{% translate "5 % off" %}{% blocktranslate with a=b %}it\'s {{ a }}{% endblocktranslate %}{{ _("hi") }}'
    assert set(said(as_python(template))) == {("", "5 %% off"), ("", "it's %(a)s"), ("", "hi")}
    assert set(said('pgettext("verb", "drain"); _(name); ngettext("a", "b", n)')) == {("verb", "drain"), ("", "a")}


def test_every_sentence_of_a_template_is_translated(translated: Catalog) -> None:
    files = sorted((ROOT / "templates").rglob("*.html"))
    missing = [(file, *each) for file in files for each in said(as_python(file.read_text())) if each not in translated]
    assert files and not missing, missing


def test_every_sentence_of_the_code_is_translated(translated: Catalog) -> None:
    files = sorted((ROOT / "console").rglob("*.py"))
    missing = [(file, *each) for file in files for each in said(file.read_text()) if each not in translated]
    assert files and not missing, missing


def test_nothing_is_left_open_and_the_compiled_catalog_is_the_written_one(translated: Catalog) -> None:
    text = (FOLDER / "django.po").read_text()
    assert 'msgstr ""\n\n' not in text.split("\n\n", 1)[1] + "\n\n"
    assert "#, fuzzy" not in text and all(translated.values())
    written = [ast.literal_eval(each) for each in re.findall(r'^msgid (".+")$', text, re.M)]
    assert written and {each for each in written if each} <= {text for _, text in translated}
