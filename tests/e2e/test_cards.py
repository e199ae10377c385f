"""Nodes and cards in a real browser: simulated cards that fill, a refusal drawn, and what would happen if."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

from console.fleet.models import Deployment, Replica
from console.placement import inventory
from console.placement.actions import place
from console.placement.inventory import Inventory, Living
from console.placement.ledger import Need
from console.placement.models import Device, DeviceMinute, Reservation
from engine.devices.simulated import SimulatedProvider
from engine.footprint import Footprint
from tests.e2e.test_console import CHROMIUM, UNNAMED, Visit
from tests.e2e.test_console import browser as browser
from tests.e2e.test_console import site as site
from tests.e2e.test_console import visit as visit
from tests.e2e.world import World
from tests.e2e.world import shared_world as shared_world

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume"),
]
GIB = 1 << 30


def need(model: str, weights: float, kv: float, **more: object) -> Need:
    peak = Footprint(int(weights * GIB), int(kv * GIB), int(1.6 * GIB), int(1.2 * GIB))
    return Need(model, "vllm", peak, **more)  # type: ignore[arg-type]


def simulated_fleet(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of simulated cards: replicas of three models, a lender with its borrower, a vampire refused."""
    monkeypatch.setattr(inventory, "trees", lambda pids: {pid: (pid,) for pid in pids})
    clock = [0.0]
    looks = Inventory(sources=[SimulatedProvider("4xA100-80G,2xL40S-48G", lambda: clock[0])])
    looks.look({})
    workers: dict[uuid.UUID, Living] = {}

    def live(asked: Need, ordinal: int, busy: float) -> uuid.UUID:
        deployment, _made = Deployment.objects.get_or_create(
            name=asked.model, defaults={"model": world.deployment.model, "engine": "vllm"}
        )
        replica = Replica.objects.create(deployment=deployment, ordinal=ordinal, state="ready")
        plan = place(asked, replica_id=replica.id, deployment_id=deployment.id, label=str(replica))
        assert plan.placed, plan.reason
        parts = asked.peak
        pool = plan.shares[0].reserved - parts.total + parts.kv
        workers[replica.id] = Living(1000 + len(workers), True, busy, int(parts.weights * 0.998), pool, busy * 0.6)
        return replica.id

    coder = need("coder-14b", 27.5, 24, priority_class="high", takes_share=0.9)
    for ordinal in (1, 2):
        live(coder, ordinal, (0.88, 0.21)[ordinal - 1])
    live(need("qwen3-8b", 15.3, 30, takes=int(70 * GIB), lends=True), 1, 0.58)
    live(need("qwen3-8b", 15.3, 6, borrows=True), 2, 0.3)
    live(need("embed-0.6b", 1.2, 1, spread=True, kinds=frozenset(("gpu",)), binding=("sim/1/0",)), 1, 0.75)
    looks.look(workers)
    clock[0] += 300
    looks.look(workers)
    vampire = need("extract-7b", 14.2, 4, binding=("sim/0/0", "sim/0/1"))
    place(vampire, replica_id=uuid.UUID(int=1), deployment_id=uuid.UUID(int=9), label="extract-7b r1")
    stray = Device.objects.get(uid="sim/0/3")
    Device.objects.filter(pk=stray.pk).update(
        used_bytes=int(2.9 * GIB), processes=[{"pid": 41877, "bytes": int(2.4 * GIB), "name": "python", "ours": False}]
    )
    Device.objects.filter(uid="sim/1/1").update(cordoned=True)
    now = timezone.now()
    for device in Device.objects.all():
        load = device.utilisation or 0.02
        for minute in range(1, 55):
            wave = load * (0.8 + 0.2 * ((minute * 7) % 10) / 10)
            DeviceMinute.objects.create(device=device, minute=now - timedelta(minutes=minute), utilisation=wave)


def test_a_card_shows_its_ledger_and_is_cordoned(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_fleet(visit.site.world, monkeypatch)
    visit.sign_in("admin")
    page = visit.page
    page.get_by_role("link", name="Cards", exact=True).click()
    page.wait_for_url("**/cards/")
    expect(page.locator(".note").first).to_contain_text("simulated")
    assert page.locator(".crow").count() == 6
    full = page.locator(".crow", has_text="coder-14b r1")
    assert full.locator(".lb").count() == 3
    assert [text.strip() for text in full.locator(".led .v").all_inner_texts()] == ["65.2", "72.0", "72.5"]
    expect(full).to_contain_text("high")
    expect(page.locator(".crow", has_text="2 replicas")).to_contain_text("borrows")
    expect(page.locator(".crow", has_text="41877")).to_contain_text("belong to nobody")
    refused = page.locator(".panel", has_text="Refused: extract-7b r1")
    expect(refused).to_contain_text("One card serves one priority class: this one high, the replica is normal.")
    expect(refused).to_contain_text("buffer is 40 %")
    assert refused.locator("svg.vamp rect").count() > 5
    page.locator(".crow", has_text="coder-14b r2").get_by_role("button", name="Cordon").click()
    expect(page.locator(".note.good")).to_contain_text("takes nobody new")
    device = Reservation.objects.get(label="coder-14b r2").device
    assert device.cordoned


def test_what_if_answers_for_every_card(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_fleet(visit.site.world, monkeypatch)
    visit.sign_in("admin")
    visit.go("/cards/what-if/")
    page = visit.page
    page.fill("[name=planned_concurrency]", "16")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".verdict").first).to_contain_text("GiB with the buffer of")
    assert page.locator("tbody tr").count() == 6
    assert page.locator("tbody tr.sel").count() == 1
    expect(page.locator("tbody tr", has_text="sim-b 1")).to_contain_text("Cordoned")
    before = Reservation.objects.count()
    page.fill("[name=planned_concurrency]", "5000")
    page.fill("[name=planned_tokens]", "8192")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("h2").first).to_contain_text("It would be refused")
    assert Reservation.objects.count() == before


@pytest.mark.parametrize("wide", [1440, 390])
@pytest.mark.parametrize(("theme", "language"), [("light", "en"), ("dark", "zh-hans")])
def test_nothing_sticks_out_and_every_control_is_named(
    visit: Visit, monkeypatch: pytest.MonkeyPatch, wide: int, theme: str, language: str
) -> None:
    simulated_fleet(visit.site.world, monkeypatch)
    visit.site.world.admin.theme, visit.site.world.admin.language = theme, language
    visit.site.world.admin.save()
    visit.sign_in("admin")
    visit.page.set_viewport_size({"width": wide, "height": 900})
    model = visit.site.world.deployment.model.name
    for name, path in (
        ("cards", "/cards/"),
        ("what-if", f"/cards/what-if/?model={model}&engine=vllm&planned_concurrency=16"),
        ("refused", f"/cards/what-if/?model={model}&engine=vllm&planned_concurrency=5000&planned_tokens=8192"),
    ):
        visit.go(path)
        visit.fits()
        assert visit.page.evaluate(UNNAMED) == []
        visit.shot(f"{name}-{wide}-{theme}")
