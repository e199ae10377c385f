"""/metrics: who may read it, what it says, and what no label or log may hold."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.telemetry import names
from tests.serving.conftest import chat, connected
from tests.serving.fakes import (
    EXPIRED_KEY,
    KEY,
    PROMPT_TOKENS,
    REVOKED_KEY,
    WORDS,
    EngineCall,
    Stack,
    running,
)

CHAT = "/v1/chat/completions"


async def test_every_metric_is_there_under_its_name(stack: Stack, client: httpx.AsyncClient) -> None:
    async def first_time_bad(call: EngineCall) -> None:
        if len(stack.engine.calls) == 1:
            call.die()
        else:
            await call.say()

    stack.engine.script = first_time_bad
    await client.post(CHAT, json=chat(stream=True))
    await client.post(CHAT, json=chat(model="made-up-by-a-caller"))
    await client.post(CHAT, json=chat(), headers={"Authorization": "Bearer nope"})
    await stack.idle()
    text = (await client.get("/metrics")).text
    told = text_string_to_metric_families(text)
    families = {family.name: family for family in told if not family.name.endswith("_created")}
    assert set(families) == set(names.METRICS)
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert labels <= {
        "model",
        "route",
        "deployment",
        "replica",
        "outcome",
        "reason",
        "kind",
        "le",
        "version",
        "python",
    }
    assert "made-up-by-a-caller" not in text
    assert "tenant-1" not in text
    tokens = {s.labels["kind"]: s.value for s in families["fanlight_tokens"].samples if s.name.endswith("_total")}
    assert (tokens["prompt"], tokens["completion"]) == (PROMPT_TOKENS, len(WORDS))
    itl = next(s for s in families[names.ITL].samples if s.name.endswith("_count"))
    assert itl.value == len(WORDS) - 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"X-Forwarded-For": "8.8.8.8"}, 401),
        ({"X-Forwarded-For": "127.0.0.1"}, 401),
        ({"Forwarded": "for=127.0.0.1"}, 401),
        ({"X-Forwarded-For": "8.8.8.8", "Authorization": "Bearer wrong"}, 401),
        ({"X-Forwarded-For": "8.8.8.8", "Authorization": "Bearer scrape-me"}, 200),
    ],
)
async def test_metrics_are_free_on_loopback_only(root: Path, headers: dict[str, str], status: int) -> None:
    """A proxy that nobody declared as trusted is not believed, so what comes through it is not loopback."""
    async with running(root, metrics_token="scrape-me") as stack, connected(stack, None) as client:
        response = await client.get("/metrics", headers=headers)
        assert response.status_code == status
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(("forwarded", "status"), [("8.8.8.8", 401), ("127.0.0.9", 200), ("8.8.8.8, 127.0.0.1", 401)])
async def test_a_trusted_proxy_is_believed(root: Path, forwarded: str, status: int) -> None:
    async with (
        running(root, trusted_proxies=("127.0.0.1",)) as stack,
        connected(stack, None) as client,
    ):
        response = await client.get("/metrics", headers={"X-Forwarded-For": forwarded})
        assert response.status_code == status


async def test_no_key_and_no_content_in_any_log(
    stack: Stack, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret_words = "my-secret-prompt"

    async def fail(call: EngineCall) -> None:
        await call.head()
        await call.token("my-secret-answer")
        call.die()

    stack.engine.script = fail
    body = chat(messages=[{"role": "user", "content": secret_words}], stream=True)
    for key in (KEY, EXPIRED_KEY, REVOKED_KEY, KEY[:-1] + "0", "sk-other"):
        await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})
    await client.post(
        CHAT,
        content=b'{"model": "' + KEY.encode() + b'"',
        headers={"content-type": "application/json"},
    )
    await stack.idle()
    ours = "\n".join(
        f"{r.getMessage()} {r.exc_text or ''}" for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))
    )
    assert ours
    assert not re.search(r"fl-[A-Za-z0-9_-]{20,}", ours)
    assert secret_words not in ours
    assert "my-secret-answer" not in ours
    for entry in stack.entries():
        told = str(entry)
        assert not re.search(r"fl-[A-Za-z0-9_-]{43}", told)
        assert secret_words not in told
