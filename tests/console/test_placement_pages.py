"""Cards over pages, JSON and the command: the same figures, the same reasons, for admins only."""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone, translation

from console.catalog.models import Model
from console.placement import words
from console.placement.actions import place
from console.placement.drawing import bars, errors, hour, squeeze
from console.placement.ledger import Need
from console.placement.models import Decision, Device, DeviceMinute, Node, Reservation
from console.placement.planner import Reason
from console.placement.queries import cards, live_lines
from engine.footprint import Footprint
from tests.e2e.world import World
from tests.e2e.world import world as world

pytestmark = pytest.mark.django_db
GIB = 1 << 30


@pytest.fixture(autouse=True)
def cards_of_a_box() -> None:
    """Two cards and a CPU; the second card is nearly full of what nobody knows."""
    node = Node.objects.create(name="box", cores=2)
    now = timezone.now()
    for index, used in ((0, GIB), (1, 79 * GIB)):
        Device.objects.create(
            node=node, uid=f"GPU-{index}", kind="gpu", index=index, name="A100-80G", total_bytes=80 * GIB,
            used_bytes=used, utilisation=0.9, temperature=60, power_w=300, power_limit_w=400, seen_at=now,
        )  # fmt: skip
    Device.objects.create(
        node=node, uid="box/cpu", kind="cpu", name="EPYC", total_bytes=32 * GIB, used_bytes=GIB, cores=[0, 1]
    )


def settled(model: str = "qwen-7b", **more: Any) -> Reservation:
    asked = Need(model, "vllm", Footprint(14 * GIB, 4 * GIB, GIB, GIB), **{"takes_share": 0.9, **more})
    replica = uuid.uuid4()
    assert place(asked, replica_id=replica, deployment_id=uuid.uuid4(), label=f"{model} r1").placed
    return Reservation.objects.get(replica_id=replica)


def signed_in(world: World) -> Client:
    client = Client()
    client.force_login(world.admin, backend="django.contrib.auth.backends.ModelBackend")
    return client


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("cards", *arguments, stdout=out)
    return out.getvalue()


# -- drawings ------------------------------------------------------------------------------------------------------


def test_three_bars_stand_on_one_scale() -> None:
    line = settled(binding=("GPU-0",))
    line.measured_bytes = 60 * GIB
    line.measured_parts = {"weights": 13 * GIB, "kv": 50 * GIB, "kv_used": 10 * GIB}
    line.save()
    card = next(card for card in cards() if card.uid == "GPU-0")
    planned, reserved, measured = bars(card, {str(line.replica_id): line})
    assert (planned.bytes, reserved.bytes, measured.bytes) == (24 * GIB, 72 * GIB, 60 * GIB)
    assert [part.css for part in planned.segments] == ["m-weights", "m-act", "m-kv", "m-buffer"]
    assert [part.css for part in measured.segments] == ["m-weights", "m-act", "m-kv", "m-kvfree"]
    assert measured.tick == pytest.approx(100 * 20 / 80)
    for bar in (planned, reserved, measured):
        ends = [part.x + part.width for part in bar.segments]
        assert all(end <= later.x for end, later in zip(ends, bar.segments[1:], strict=False)) and ends[-1] <= 100
    shares = {error.name: round(100 * error.share, 1) for error in errors(line)}
    assert shares == {"weights": 7.7, "KV pool": 12.0}
    line.measured_peak_bytes, line.measured_parts = 80 * GIB, {"overhead": 2 * GIB}
    assert [(error.name, error.share) for error in errors(line)] == [("runtime", -0.5), ("highest in all", -0.1)]
    line.engine, line.measured_peak_bytes = "embedded", 60 * GIB  # its pool fills as it is used
    assert [error.name for error in errors(line)] == ["runtime"]


def test_a_worker_that_loads_shows_its_weights_first_and_others_bytes_as_nobodys() -> None:
    line = settled(binding=("GPU-0",))
    Reservation.objects.filter(pk=line.pk).update(measured_bytes=5 * GIB)
    Device.objects.filter(uid="GPU-0").update(used_bytes=8 * GIB)
    line.refresh_from_db()
    card = next(card for card in cards() if card.uid == "GPU-0")
    measured = bars(card, {str(line.replica_id): line})[2]
    assert [part.css for part in measured.segments] == ["m-weights", "m-none"]
    assert "3.00 GiB" in measured.segments[1].title


def test_the_last_hour_ends_at_now_and_a_gap_is_a_gap() -> None:
    device, now = Device.objects.get(uid="GPU-0"), timezone.now()
    minutes = [
        DeviceMinute(device=device, minute=now - timezone.timedelta(minutes=ago), utilisation=0.5)
        for ago in (70, 40, 39, 20)
    ]
    found = hour(minutes, device, now)
    assert found.path.count("M") == 3 and found.path.count("L") == 1
    assert found.dot is not None and found.dot[0] == pytest.approx(200, abs=0.2)


def test_a_refusal_is_drawn_only_where_something_sticks_out() -> None:
    need = {"parts": {"weights": 14 * GIB, "kv": 4 * GIB}, "peak_bytes": 18 * GIB}
    drawn = squeeze({"needed_bytes": 25 * GIB, "free_bytes": 8 * GIB, "label": "box 0"}, need, 80 * GIB)
    assert drawn is not None and drawn.held == 72 * GIB
    assert drawn.edge == pytest.approx(100 * 80 / 97, abs=0.01) and drawn.guest_x == pytest.approx(
        100 * 72 / 97, abs=0.01
    )
    assert squeeze({"needed_bytes": 5, "free_bytes": 8}, need, 80) is None
    assert squeeze({}, need, 80) is None


# -- pages ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_who_lives_where_and_what_was_refused(world: World) -> None:
    settled(binding=("GPU-0",), priority_class="high")
    vampire = Need("extract-7b", "vllm", Footprint(14 * GIB, 4 * GIB, GIB, GIB), binding=("GPU-0",))
    place(vampire, replica_id=uuid.uuid4(), deployment_id=uuid.uuid4(), label="extract-7b r1")
    text = signed_in(world).get("/cards/").content.decode()
    assert "qwen-7b r1" in text and "7.00" in text
    assert "Refused: extract-7b r1" in text and "One card serves one priority class" in text
    assert "79.0 GiB here belong to nobody" in text and "simulated" not in text
    part = signed_in(world).get("/cards/", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in part and "qwen-7b r1" in part


def test_without_a_device_the_page_says_what_to_wait_for(world: World) -> None:
    Device.objects.all().delete()
    assert b"No device is known yet" in signed_in(world).get("/cards/").content


def test_a_card_is_cordoned_from_the_page(world: World) -> None:
    client = signed_in(world)
    assert client.post("/cards/cordon/", {"device": "GPU-0", "on": "1"}).status_code == 302
    assert Device.objects.get(uid="GPU-0").cordoned
    client.post("/cards/cordon/", {"device": "GPU-0"})
    assert not Device.objects.get(uid="GPU-0").cordoned
    answer = client.post("/cards/cordon/", {"device": "GPU-9"}, follow=True)
    assert "There is no device GPU-9" in answer.content.decode()


def test_what_if_starts_and_keeps_nothing(world: World) -> None:
    name = world.deployment.model.name
    client = signed_in(world)
    assert b"It would" not in client.get("/cards/what-if/").content
    text = client.get(f"/cards/what-if/?model={name}&engine=vllm&planned_concurrency=16").content.decode()
    assert "It would go there" in text and "GPU-0" in text and "Too little is free" in text
    text = client.get(f"/cards/what-if/?model={name}&planned_concurrency=many").content.decode()
    assert "planned_concurrency must be a number" in text
    assert not Decision.objects.exists() and not live_lines()


def test_reasons_are_said_in_the_readers_language(world: World) -> None:
    world.admin.language = "zh-hans"
    world.admin.save()
    text = signed_in(world).get(f"/cards/what-if/?model={world.deployment.model.name}").content.decode()
    assert "空闲不足" in text and "Too little" not in text
    with translation.override("en"):
        assert words.say(Reason("class", {"theirs": "high", "ours": "low"})).startswith("One card serves")
        takes = {"takes": 3 << 30, "free": 2 << 30, "share": 0.5}
        assert "gpu_memory_utilization 0.5" in words.say(Reason("takes", takes))
        assert words.say(Reason("takes", takes | {"share": 0.0})).endswith("free: a smaller KV pool would fit.")
    with translation.override("zh-hans"):
        assert words.say(Reason("class", {"theirs": "high", "ours": "low"})).startswith("一张卡")


# -- JSON and the command ------------------------------------------------------------------------------------------


def test_devices_over_json(world: World) -> None:
    line = settled(binding=("GPU-0",))
    found = {one["uid"]: one for one in signed_in(world).get("/api/v1/devices").json()["data"]}
    assert set(found) == {"GPU-0", "GPU-1", "box/cpu"}
    card = found["GPU-0"]
    assert card["free_bytes"] == 80 * GIB - 72 * GIB - GIB and card["priority_class"] == "normal"
    assert card["residents"][0]["replica"] == str(line.replica_id)
    assert card["residents"][0]["held_bytes"] == 72 * GIB
    assert not card["simulated"]


def test_a_plan_over_json_has_a_verdict_for_every_card(world: World) -> None:
    body = {"model": world.deployment.model.name, "engine": "vllm", "planned_concurrency": 16, "tensor_parallel": 1}
    client = signed_in(world)
    answer = client.post("/api/v1/placement/plan", body, content_type="application/json").json()
    assert answer["placed"] and answer["devices"] == ["GPU-0"]
    codes = {one["device"]: [reason["code"] for reason in one["reasons"]] for one in answer["candidates"]}
    assert codes == {"GPU-0": [], "GPU-1": ["space"], "box/cpu": ["kind"]}
    assert answer["need"]["peak_bytes"] == sum(answer["need"]["parts"].values())
    assert not Decision.objects.exists()


def test_a_plan_over_json_takes_parameters_with_decimals(world: World) -> None:
    body = {
        "model": world.deployment.model.name, "engine": "vllm", "planned_concurrency": 16,
        "parameters": {"gpu_memory_utilization": 0.85, "tensor_parallel": 1},
    }  # fmt: skip
    answer = signed_in(world).post("/api/v1/placement/plan", body, content_type="application/json")
    assert answer.status_code == 200 and "placed" in answer.json()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "model"),
        ({"model": "nothing"}, "model"),
        ({"model": "MODEL", "engine": "mine"}, "engine"),
        ({"model": "MODEL", "tensor_parallel": 65}, "tensor_parallel"),
        ({"model": "MODEL", "runtime": "vllm==0"}, "runtime"),
        ({"model": "MODEL", "quantisation": "q4"}, "quantisation"),
        ({"model": "MODEL", "parameters": {"trust_remote_code": True}}, "parameters"),
        ({"model": "MODEL", "binding": 5}, "binding"),
        ({"model": "MODEL", "colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_asked_names_its_field(world: World, body: dict[str, Any], field: str) -> None:
    sent = {k: world.deployment.model.name if v == "MODEL" else v for k, v in body.items()}
    answer = signed_in(world).post("/api/v1/placement/plan", sent, content_type="application/json")
    assert answer.status_code == 422 and answer.json()["error"]["field"] == field


def test_the_command_lists_asks_and_cordons(world: World) -> None:
    settled(binding=("GPU-0",))
    assert "GPU-0  A100-80G  7.00 of 80.0 GiB free  qwen-7b r1" in run("list")
    assert [json.loads(row)["uid"] for row in run("list", "--json").splitlines()] == ["box/cpu", "GPU-0", "GPU-1"]
    assert "takes nobody new" in run("cordon", "box/0") and "(cordoned)" in run("list")
    assert "takes replicas again" in run("uncordon", "GPU-0")
    name = Model.objects.get().name
    text = run("plan", name, "--engine", "embedded", "--concurrency", "4", "--tokens", "256", "--on", "box/cpu")
    assert text.startswith("Peak need") and "→ box cpu (EPYC)" in text and "✗" in text
    assert json.loads(run("plan", name, "--json"))["placed"] is False
    for wrong in (["plan", "nothing"], ["cordon", "nowhere"], ["plan", name, "--set", "x"]):
        with pytest.raises(CommandError):
            run(*wrong)
