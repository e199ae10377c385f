"""The console in a real browser: a wrong console message, a policy violation or an overflowing page is a failure."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uuid_utils

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from console import contract
from console.catalog.models import Model, Runtime
from serving.port import Delta, Principal
from tests.e2e.world import PASSWORD, World, deliver, settled
from tests.e2e.world import shared_world as shared_world

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume"),
]
WORDS = "The capital of France is Paris.\n\nIt lies on the Seine. ".split(" ")


class Pipeline:
    """Stands for the gateway: streams words and delivers the request as the shipper would."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cancelled = 0

    async def chat(self, principal: Principal, body: dict[str, Any]) -> AsyncIterator[Delta]:
        made, began, done = str(uuid_utils.uuid7()), time.monotonic(), False
        try:
            yield Delta(kind="started", request_id=made)
            if "fail" in body["messages"][-1]["content"]:
                yield Delta(
                    kind="error",
                    request_id=made,
                    status=503,
                    code="service_unavailable",
                    message="No replica is ready.",
                )
                return
            slow = "slowly" in body["messages"][-1]["content"]
            for n, word in enumerate(WORDS * (50 if slow else 1)):
                await asyncio.sleep(0.02)
                elapsed = (time.monotonic() - began) * 1000
                yield Delta(
                    kind="delta",
                    request_id=made,
                    text=word + " ",
                    prompt_tokens=64,
                    cached_tokens=32,
                    completion_tokens=n + 1,
                    ttft_ms=20.0,
                    elapsed_ms=elapsed,
                )
            await asyncio.to_thread(self._deliver, principal, made)
            done = True
            yield Delta(
                kind="done",
                request_id=made,
                finish_reason="stop",
                prompt_tokens=64,
                cached_tokens=32,
                completion_tokens=len(WORDS),
                ttft_ms=20.0,
                elapsed_ms=elapsed,
            )
        finally:
            self.cancelled += not done

    def _deliver(self, principal: Principal, made: str) -> None:
        import msgspec
        from django.db import connections

        one = settled(self.world.aurora, None, self.world.replica, source="playground")
        at = (uuid.UUID(made).int >> 80) / 1000
        same = {"id": made, "started_at": at}
        deliver(
            msgspec.structs.replace(
                one,
                usage=None,
                record=msgspec.structs.replace(one.record, key_id=principal.key_id, **same),
                detail=msgspec.structs.replace(one.detail, **same),
            )
        )
        connections.close_all()


@dataclass
class Site:
    """The console on a port of its own."""

    url: str
    world: World
    pipeline: Pipeline


@pytest.fixture
def site(shared_world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    import uvicorn
    from channels.auth import AuthMiddlewareStack
    from channels.routing import ProtocolTypeRouter, URLRouter
    from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
    from django.core.asgi import get_asgi_application

    from console.routing import websocket_urlpatterns

    pipeline = Pipeline(shared_world)
    monkeypatch.setattr(contract, "inference", lambda: pipeline)
    app = ProtocolTypeRouter(
        {
            "http": ASGIStaticFilesHandler(get_asgi_application()),
            "websocket": AuthMiddlewareStack(URLRouter(websocket_urlpatterns)),
        }
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield Site(f"http://127.0.0.1:{port}", shared_world, pipeline)
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Playwright's loop runs in this thread, and Django refuses its ORM where a loop runs; the ORM is used here alone.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    try:
        with sync_playwright() as playwright:
            launched = playwright.chromium.launch(
                executable_path=CHROMIUM,
                args=["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"],
            )
            yield launched
            launched.close()
    finally:
        if before is None:
            del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
        else:
            os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


@dataclass
class Visit:
    """A person at a browser; `wrong` collects whatever must not happen."""

    page: Page
    context: BrowserContext
    site: Site
    wrong: list[str] = field(default_factory=list)
    expected: str = "$^"  # a pattern of messages this test provokes

    def go(self, path: str) -> None:
        self.page.goto(self.site.url + path)

    def sign_in(self, name: str) -> None:
        self.go("/login/")
        self.page.fill("[name=username]", name)
        self.page.fill("[name=password]", PASSWORD)
        self.page.click("button.big-btn")
        self.page.wait_for_url(re.compile(r"/$"))

    def fits(self) -> None:
        """Nothing sticks out of the window."""
        wide = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{self.page.url} is {wide} px too wide"

    def shot(self, name: str) -> None:
        """A picture for a person, where one asked for it."""
        folder = os.environ.get("SHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


UNNAMED = """[...document.querySelectorAll("input:not([type=hidden]), select, textarea, button, summary")].filter(node => {
  const named = node.getAttribute("aria-label") || node.labels?.length || node.textContent.trim();
  return !named;
}).map(node => node.outerHTML.slice(0, 120))"""  # noqa: E501


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Visit]:
    context = browser.new_context(
        viewport={"width": 1440, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.add_init_script(
        "addEventListener('securitypolicyviolation', e => console.error('CSP ' + e.violatedDirective + ' ' + e.blockedURI))"  # noqa: E501
    )
    context.set_default_timeout(10_000)
    page = context.new_page()
    visit = Visit(page, context, site)
    page.on(
        "console", lambda m: visit.wrong.append(f"{page.url}: {m.text}") if m.type in {"error", "warning"} else None
    )
    page.on("pageerror", lambda e: visit.wrong.append(f"{page.url}: {e}"))
    yield visit
    context.close()
    assert [w for w in visit.wrong if not re.search(visit.expected, w)] == []


def test_from_signing_in_over_the_playground_to_the_trace(visit: Visit) -> None:
    visit.sign_in("mario")
    page = visit.page
    page.keyboard.press("g")
    page.keyboard.press("p")
    page.wait_for_url("**/playground/")
    page.fill("#message", "What is the capital of France?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer").last).to_contain_text("Paris")
    expect(page.locator("[data-p=state]")).to_have_text("stop")
    expect(page.locator("[data-p=hit]")).to_have_text("50.0")
    expect(page.locator("[data-p=ttft]")).to_have_text("20.0")
    page.click(".trace")
    expect(page.locator("h1")).to_contain_text("Chat completion")
    assert page.locator(".wf-row .t svg rect[class^=l-]").count() >= 8
    assert page.locator("[data-draw=tokens] rect.l-decode").count() == 11
    assert page.locator("[data-draw=blocks] rect").count() == 5
    page.click("[data-wf-scale] button[value=linear]")
    expect(page.locator(".cut")).to_have_count(0)
    visit.fits()
    page.click(".acts [data-copy='#curl']")
    assert "$FANLIGHT_KEY" in page.evaluate("navigator.clipboard.readText()")
    page.click("text=Replay in playground >> nth=0")
    page.wait_for_url("**/playground/?*")
    assert page.input_value("#p-temperature") == "0.5"


def test_the_playground_stops_and_tells_errors(visit: Visit) -> None:
    visit.sign_in("olga")
    page = visit.page
    visit.go("/playground/")
    page.fill("#message", "slowly")
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#message") == "slowly\n"
    page.click("#go")
    expect(page.locator("[data-p=state]")).to_have_text("streaming")
    page.click("#halt")
    expect(page.locator("[data-p=state]")).to_have_text("stopped")
    assert visit.site.pipeline.cancelled == 1
    page.fill("#message", "fail <b>now</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".say .note.bad")).to_contain_text("No replica is ready.")
    expect(page.locator(".say .note.bad")).to_contain_text("HTTP 503")
    assert page.locator(".say b").count() == 0  # text stays text
    page.click("[data-code=python]")
    assert "chat.completions.create" in page.evaluate("navigator.clipboard.readText()")


def test_the_overview_is_live(visit: Visit) -> None:
    visit.sign_in("olga")
    page = visit.page
    expect(page.locator("[data-live-state]")).to_have_text("Live")
    expect(page.locator("[data-empty]")).to_be_visible()
    deliver(*(settled(visit.site.world.aurora, visit.site.world.key, age=n + 1) for n in range(3)))
    expect(page.locator("[data-part=figures]")).to_contain_text("3 in this time")
    expect(page.locator("[data-empty]")).to_have_count(0)
    expect(page.locator("[data-part=slow] a")).to_have_count(3)
    assert page.locator("[data-draw=traffic] rect.o-ok").count() >= 1
    page.click("[data-latency] button[value=itl]")
    expect(page.locator("[data-latency-title]")).to_have_text("Between tokens")


def test_requests_are_filtered_by_typing(visit: Visit) -> None:
    world = visit.site.world
    deliver(*(settled(world.aurora, world.key, world.replica, age=n + 1, ttft_us=100_000 * (n + 1)) for n in range(12)))
    visit.sign_in("olga")
    page = visit.page
    visit.go("/requests/")
    expect(page.locator(".reqs tbody tr")).to_have_count(12)
    page.fill("[data-add]", "ttft>800ms")
    page.keyboard.press("Enter")
    expect(page.locator(".reqs tbody tr")).to_have_count(4)
    assert "ttft%3E800ms" in page.url
    page.fill("[data-add]", "nonsense")
    page.keyboard.press("Enter")
    expect(page.locator("#query-error")).to_contain_text("no condition")
    page.go_back()
    expect(page.locator(".reqs tbody tr")).to_have_count(4)
    page.click(".tok a")
    expect(page.locator(".reqs tbody tr")).to_have_count(12)
    page.select_option("#group", "replica")
    page.wait_for_url(re.compile("group=replica"))
    expect(page.locator("td.lead a:has-text('smollm2 r1')")).to_be_visible()
    expect(page.locator("[data-draw=hist] svg")).to_be_visible()
    box = page.locator("[data-draw=hist] svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile("ttft%3E"))
    assert 0 < page.locator(".reqs tbody tr").count() < 12


def test_a_custom_range_stands_in_the_url(visit: Visit) -> None:
    world = visit.site.world
    deliver(settled(world.aurora, world.key, age=120), settled(world.aurora, world.key, age=7200))
    visit.sign_in("olga")
    page = visit.page
    visit.go("/requests/?q=status:ok")
    expect(page.locator(".reqs tbody tr")).to_have_count(1)
    page.click(".top [data-dialog=range-dialog]")
    before = page.input_value("#range-from")
    page.fill("#range-from", f"{int(before[:4]) - 1}{before[4:]}")
    page.click("#range-dialog button.primary")
    expect(page.locator(".note.warn")).to_contain_text("31 days")
    expect(page.locator(".reqs tbody tr")).to_have_count(2)
    assert "from=" in page.url and "q=status%3Aok" in page.url
    page.click(".range-pick a:has-text('15 m') >> nth=-1")
    page.wait_for_url(re.compile("range=15m"))
    assert "from=" not in page.url


def test_a_request_appears_once_it_is_delivered(visit: Visit) -> None:
    world = visit.site.world
    one = settled(world.aurora, world.key, world.replica)
    visit.sign_in("olga")
    visit.page.keyboard.press("/")
    visit.page.keyboard.type(one.record.id)
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("h1")).to_contain_text("not delivered yet")
    deliver(one)
    expect(visit.page.locator("h1")).to_contain_text("Chat completion")
    assert visit.page.locator(".wf-row .t svg").count() >= 8


def test_a_key_is_made_and_revoked(visit: Visit) -> None:
    visit.sign_in("olga")
    page = visit.page
    visit.go("/keys/")
    page.click("text=Create a key")
    page.fill("#id_name", "ci")
    page.click("#newkey button.primary")
    secret = page.locator("#thekey").text_content() or ""
    assert secret.startswith("fl-")
    page.click("#made [data-copy]")
    assert page.evaluate("navigator.clipboard.readText()") == secret
    page.check("[data-enables]")
    page.click("#made-done")
    expect(page.locator("#made")).to_have_count(0)
    page.click("tr:has-text('ci') >> text=Revoke")
    expect(page.locator("#revoke")).to_contain_text("ci")
    page.click("#revoke button.danger")
    expect(page.locator("tr.ended")).to_contain_text("ci")


def test_a_person_and_a_model_are_let_go_only_after_a_question(visit: Visit) -> None:
    bad = Model.objects.create(name="bad", source="file:bad", state=Model.State.REFUSED, reason="It is a pickle.")
    runtime = Runtime.objects.create(requirement="vllm==1", engine="vllm", version="1", state=Runtime.State.FAILED)
    visit.sign_in("admin")
    page = visit.page
    for path, row, dialog, name in (
        ("/models/", "section:has(h2:text-is('bad'))", "#forget-model", "bad"),
        ("/models/", "#runtimes tr:has-text('vllm==1')", "#forget-runtime", "vllm==1"),
        ("/tenants/aurora/", "tr:has-text('vera')", "#remove", "vera"),
    ):
        visit.go(path)
        opener = page.locator(row).locator("[data-dialog]")
        opener.click()
        expect(page.locator(f"{dialog} [data-name]")).to_have_text(name)
        visit.shot(dialog.removeprefix("#"))
        page.click(f"{dialog} [data-close]")
        expect(page.locator(row)).to_have_count(1)
        opener.click()
        page.click(f"{dialog} button.danger")
        expect(page.locator(row)).to_have_count(0)
    assert not Model.objects.filter(pk=bad.pk).exists() and not Runtime.objects.filter(pk=runtime.pk).exists()


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
@pytest.mark.parametrize(("theme", "language"), [("light", "en"), ("dark", "zh-hans")])
def test_every_page_fits_both_sizes_themes_and_languages(
    visit: Visit, width: int, height: int, theme: str, language: str
) -> None:
    world = visit.site.world
    made = deliver(
        *(settled(world.aurora, world.key, world.replica, age=n + 1) for n in range(30)),
        settled(world.aurora, world.key, world.replica, outcome="error", status=502, code="engine_unreachable"),
    )
    type(world.admin).objects.filter(pk=world.admin.pk).update(theme=theme, language=language)
    visit.page.set_viewport_size({"width": width, "height": height})
    visit.sign_in("admin")
    for path in (
        "/",
        "/requests/",
        f"/requests/{made[0]}/",
        f"/requests/{made[-1]}/",
        "/playground/",
        "/keys/",
        "/models/",
        "/deployments/",
        "/routes/",
        f"/routes/{world.deployment.routes.get().id}/",
        "/audit/",
        "/tenants/",
        "/tenants/aurora/",
        "/docs/",
        "/account/",
        "/admin/",
        "/admin/fleet/replica/",
    ):
        visit.go(path)
        if not path.startswith("/admin/"):
            expect(visit.page.locator("h1").first).to_be_visible()
            visit.fits()
            assert visit.page.evaluate(UNNAMED) == [], path
            visit.shot(f"{path.strip('/').replace('/', '-')[:20] or 'overview'}-{width}-{theme}")
    visit.go("/")
    visit.page.keyboard.press("?")
    expect(visit.page.locator("#help")).to_be_visible()
