"""What leaves a process in its log: JSON, and never an API key."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from console.base import logs
from serving import apikey


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    logs.configure("INFO")
    yield stream
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level


def fail_with(key: str) -> None:
    raise ValueError(f"bad {key}")


def test_a_key_never_appears_however_it_gets_into_a_line(stdout: io.StringIO) -> None:
    key = apikey.generate()
    log = logging.getLogger("somebody.elses")
    log.warning("got %s", key)
    log.warning(f"got {key}")
    log.warning("got it", extra={"header": f"Bearer {key}", "nested": {"keys": [key]}})
    log.warning({"key": key})
    try:
        fail_with(key)
    except ValueError:
        log.exception("refused")
    text = stdout.getvalue()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 5
    assert key not in text
    assert key[3:] not in text
    assert text.count("fl-[redacted]") >= 6
    assert "ValueError: bad fl-[redacted]" in lines[4]["exc_info"]


def test_a_line_says_when_who_and_how_bad(stdout: io.StringIO) -> None:
    logging.getLogger("web").error("it broke")
    line = json.loads(stdout.getvalue())
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "web", "it broke")
    assert line["at"].endswith("+00:00")
