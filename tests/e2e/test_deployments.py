"""Deployments in a real browser: from the form with its plan to the page of one, and all that can happen to it."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.utils import timezone

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

from console.audit.actions import COMMAND_LINE
from console.fleet.actions import move_replica
from console.fleet.deployment_actions import set_deployment
from console.fleet.models import Deployment, Replica, Rollout, ScaleDecision, SignalSample, StackCapture, Transition
from console.placement.models import Device, Node
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


def devices() -> None:
    """A CPU, and two simulated cards of which one is full."""
    node = Node.objects.create(name="box", cores=8, memory_bytes=32 * GIB)
    now = timezone.now()
    Device.objects.create(
        node=node, uid="box/cpu", kind="cpu", name="EPYC 9355", total_bytes=32 * GIB, used_bytes=2 * GIB,
        cores=list(range(8)), seen_at=now,
    )  # fmt: skip
    sim = Node.objects.create(name="sim-0", simulated=True)
    for index, used in enumerate((0, 79 * GIB)):
        Device.objects.create(
            node=sim, uid=f"sim/0/{index}", kind="gpu", index=index, name="A100-80G", total_bytes=80 * GIB,
            used_bytes=used, simulated=True, seen_at=now,
        )  # fmt: skip


SWEEP = {
    "at": "2026-03-01T10:00:00+00:00", "revision": 1, "device": "cpu", "engine_version": "0.1.0", "best": 2,
    "asked": {"prompt_tokens": 256, "answer_tokens": 64, "rounds": 3, "p99_limit_s": 1.5, "in_service": False},
    "stopped_by": {"code": "p99", "at": 4, "p99": "1.90", "limit": "1.5"}, "quantisation": "",
    "steps": [
        {
            "sequences": number, "requests": 12, "failed": 0, "p50_s": p99 * 0.8, "p99_s": p99, "tokens_s": speed,
            "prompt_tokens": 255, "kv_peak": 0.1 * number, "preemptions": 0, "waited": False,
        }
        for number, p99, speed in ((1, 0.6, 110.0), (2, 0.9, 190.0), (4, 1.9, 240.0))
    ],
}  # fmt: skip


def eventful(world: World) -> Deployment:
    """The world's deployment in the middle of a rollout, after a hang, with an autoscaler that has done something."""
    deployment = set_deployment(COMMAND_LINE, world.deployment, {"parameters": {"max_num_seqs": 32}})
    Deployment.objects.filter(pk=deployment.pk).update(
        autoscale=True, max_replicas=3, start_s=4.2, desired_replicas=2, sweep=SWEEP
    )
    old = world.replica
    new = Replica.objects.create(deployment=deployment, ordinal=2, revision=2)
    Rollout.objects.create(deployment=deployment, from_revision=1, to_revision=2)
    for state, reason in (
        ("starting", "Its deployment wants it"),
        ("loading", "The worker's process is up; it loads the weights"),
        ("verifying", "The weights are loaded; a test prompt is sent"),
    ):
        move_replica(new, state, reason)
    move_replica(old, "draining", "Revision 2 takes its place")
    StackCapture.objects.create(
        replica=old, epoch=1, reason="running 3, and no step for 12 s", text='Thread 7 "step": forward (runner.py:112)'
    )
    now = timezone.now()
    for minute in range(90):
        busy = 0.2 + 0.6 * (minute > 40) * min(1, (minute - 40) / 20)
        SignalSample.objects.create(
            deployment=deployment, minute=now - timedelta(minutes=90 - minute), replicas=1 + (minute > 66), busy=busy
        )
    for verdict, code, before, after, reason in (
        ("up", "busy", 1, 2, "Busy over 70 % since 10:01, mean 74 %"),
        ("hold", "rolling_out", 2, 2, "Wants 3: no scaling during a rollout"),
    ):
        ScaleDecision.objects.create(
            deployment=deployment, verdict=verdict, code=code, before=before, after=after, reason=reason
        )
    return deployment


def test_a_model_is_deployed_from_the_form(visit: Visit) -> None:
    devices()
    visit.sign_in("admin")
    visit.go("/deployments/")
    visit.page.get_by_role("link", name="Deploy a model").click()
    page = visit.page
    expect(page.locator("#plan")).to_contain_text("Memory plan")
    expect(page.locator("#plan")).to_contain_text("box cpu")
    visit.shot("deploy")
    before = page.locator("#plan .planl").inner_text()
    page.fill("[name='p.max_num_seqs']", "256")
    expect(page.locator("#plan .planl")).not_to_have_text(before, use_inner_text=True)
    page.fill("[name='p.max_num_seqs']", "many")
    expect(page.locator("#plan .note.bad").first).to_contain_text("max_num_seqs must be a whole number")
    page.fill("[name='p.max_num_seqs']", "32")
    expect(page.locator("#plan .note.good")).to_contain_text("GiB with the buffer")
    page.fill("[name=name]", "mine")
    page.fill("[name=route]", "mine-chat")
    page.get_by_role("button", name="Deploy", exact=True).click()
    page.wait_for_url(re.compile(r"/deployments/[0-9a-f-]{36}/$"))
    expect(page.locator("h1")).to_contain_text("mine")
    made = Deployment.objects.get(name="mine")
    assert (made.parameters, [route.name for route in made.routes.all()]) == ({"max_num_seqs": 32}, ["mine-chat"])
    page.get_by_role("link", name="Edit").click()
    page.fill("[name='p.max_num_seqs']", "64")
    page.get_by_role("button", name="Save as a new revision").click()
    expect(page.locator(".note.good").first).to_contain_text("rolled out")
    made.refresh_from_db()
    assert (made.revision, made.parameters) == (2, {"max_num_seqs": 64})
    page.get_by_role("button", name="Go back to it").click()
    expect(page.locator("tr.sel")).to_contain_text("3")


def test_what_cannot_be_is_said_and_nothing_typed_is_lost(visit: Visit) -> None:
    visit.expected = "422"
    visit.sign_in("admin")
    visit.go("/deployments/new/")
    page = visit.page
    page.fill("[name=name]", "smollm2")  # taken
    page.fill("[name='p.max_num_seqs']", "24")
    page.get_by_role("button", name="Deploy", exact=True).click()
    expect(page.locator(".note.bad").first).to_contain_text("already")
    expect(page.locator("[name='p.max_num_seqs']")).to_have_value("24")
    assert Deployment.objects.count() == 1


@pytest.mark.parametrize("wide", [1440, 390])
@pytest.mark.parametrize(("theme", "language"), [("light", "en"), ("dark", "zh-hans")])
def test_the_page_of_one_shows_all_that_happens_to_it(visit: Visit, wide: int, theme: str, language: str) -> None:
    devices()
    deployment = eventful(visit.site.world)
    visit.site.world.admin.theme = theme
    visit.site.world.admin.language = language
    visit.site.world.admin.save()
    visit.sign_in("admin")
    visit.page.set_viewport_size({"width": wide, "height": 900})
    for path in (f"/deployments/{deployment.id}/", f"/deployments/{deployment.id}/edit/", "/deployments/new/"):
        visit.go(path)
        visit.fits()
        assert visit.page.evaluate(UNNAMED) == []
        visit.shot(f"{path.strip('/').rpartition('/')[2][:8] or 'x'}-{wide}-{theme}")
    visit.go(f"/deployments/{deployment.id}/")
    page = visit.page
    assert page.locator(".lanebox rect").count() >= 4
    assert page.locator(".scale-chart path").get_attribute("d").count("L") >= 80
    page.locator("details.more summary").first.click()
    expect(page.locator("pre.code").first).to_contain_text("runner.py:112")
    expect(page.locator(".marks")).to_contain_text("no scaling during a rollout")
    assert page.locator(".steps li").count() == 5
    assert [page.locator(".steps li").nth(n).get_attribute("class") for n in (0, 2)] == ["", "now"]
    expect(page.locator("tr.sel", has_text="190")).to_be_visible()


def test_the_log_is_searched_by_typing(visit: Visit) -> None:
    from django.conf import settings

    folder = settings.LAYOUT.workers / str(visit.site.world.replica.id)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "worker.log").write_text("loading weights\nlistening\nCUDA out of memory <b>now</b>\n")
    visit.sign_in("admin")
    visit.go(f"/deployments/{visit.site.world.deployment.id}/")
    page = visit.page
    expect(page.locator(".log.tail")).to_contain_text("listening")
    page.fill("#log-find", "memory")
    expect(page.locator(".log.tail")).not_to_contain_text("listening")
    expect(page.locator(".log.tail")).to_contain_text("<b>now</b>")
    page.fill("#log-find", "nothing like it")
    expect(page.locator("#log-panel")).to_contain_text("No line holds this")
    assert Transition.objects.exists()
