"""Hostile input of the control plane: models whose files lie, odd text in every field, arguments that open a worker."""

from __future__ import annotations

import json
import os
import struct
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db.models import QuerySet
from django.utils import timezone
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from console.audit.actions import COMMAND_LINE
from console.base import egress
from console.catalog import hub, jobs, pinned
from console.catalog.models import Model
from console.catalog.sources import SourceError
from console.errors import Refused
from console.fleet.deployment_actions import create_deployment
from console.placement.actions import device_named
from console.telemetry import engine_spans, partitions
from console.telemetry.models import EngineSpan
from tests.console.test_api import send
from tests.console.test_catalog import CONFIG, model_folder
from tests.console.test_catalog import root as root
from tests.console.test_pages import signed_in
from tests.e2e.world import World
from tests.e2e.world import world as world

pytestmark = pytest.mark.django_db
TINY: dict[str, Any] = {"name": "tiny", "model": "Tiny", "desired_replicas": 0}


@pytest.fixture
def tiny() -> Model:
    return Model.objects.create(name="Tiny", source="file:tiny", format="gguf", state="ready", context_length=512)


def _config(folder: Path, text: str) -> None:
    (model_folder(folder) / "config.json").write_text(text)


def _header(folder: Path, header: Any) -> None:
    text = header if isinstance(header, bytes) else json.dumps({"a": header}).encode()
    (model_folder(folder) / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))


def _named(folder: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(model_folder(folder)) + b"/" + name)).write_text("x")


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "a number beyond its column": lambda folder: model_folder(folder, max_position_embeddings=10**12),
    "an infinite number": lambda folder: _config(folder, json.dumps(CONFIG)[:-1] + ', "hidden_size": 1e999}'),
    "no object": lambda folder: _config(folder, "[]"),
    "nested deeply": lambda folder: _config(folder, "[" * 100_000),
    "a text beyond its column": lambda folder: model_folder(folder, model_type="x" * 1000),
    "a NUL": lambda folder: model_folder(folder, model_type="a\0b"),
    "half a surrogate": lambda folder: model_folder(folder, model_type="a\ud800b"),
    "a text for an object": lambda folder: model_folder(folder, quantization_config="x"),
    "a text for a number": lambda folder: _header(folder, {"dtype": "BF16", "shape": [1], "data_offsets": [0, "x"]}),
    "a header nested deeply": lambda folder: _header(folder, b"[" * 100_000),
    "a NUL in a type": lambda folder: _header(folder, {"dtype": "B\0", "shape": [1], "data_offsets": [0, 2]}),
    "a shape without end": lambda folder: _header(folder, {"dtype": "BF16", "shape": [10**30], "data_offsets": [0, 2]}),
    "a licence with NUL": lambda folder: (model_folder(folder) / "LICENSE").write_bytes(b"a\0b"),
    "a name that is no text": lambda folder: _named(folder, b"\xff.txt"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_model_that_lies_keeps_nobody_else_waiting(root: Path, world: World, what: str) -> None:
    HOSTILE[what](root / "bad")
    model_folder(root / "good")
    bad = Model.objects.create(name="bad", source=f"file:{root / 'bad'}")
    good = Model.objects.create(name="good", source=f"file:{root / 'good'}")
    jobs.work(lambda _line: None)
    bad.refresh_from_db()
    good.refresh_from_db()
    assert bad.state in {Model.State.REFUSED, Model.State.FAILED} and bad.reason
    assert good.state == Model.State.READY
    assert signed_in(world.admin).get("/models/").status_code == 200


def test_a_config_of_any_size_is_not_read(root: Path) -> None:
    with (model_folder(root / "bad") / "config.json").open("wb") as file:
        file.truncate(40 << 20)
    bad = Model.objects.create(name="bad", source=f"file:{root / 'bad'}")
    jobs.work(lambda _line: None)
    bad.refresh_from_db()
    assert (bad.state, "more than 32 MB" in bad.reason) == (Model.State.REFUSED, True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"binding": ["\0"]}, "binding"),
        ({"binding": ["\ud800"]}, "binding"),
        ({"binding": "\0"}, "binding"),
        ({"environment": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": ["\0"]}}, "environment"),
        ({"environment": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": {"a": 1.5}}}, "environment"),
        ({"schedules": "[" * 100_000}, "schedules"),
        (
            {"schedules": [{"days": ["mon"] * 9, "from": "01:00", "to": "02:00", "zone": "UTC", "min": 0, "max": 1}]},
            "schedules",
        ),
    ],
)
def test_odd_values_of_a_deployment_are_refused(world: World, tiny: Model, change: Any, field: str) -> None:
    status, answer = send(world.admin, "deployments", TINY | change)
    assert (status, answer["error"]["field"]) == (422, field)


@pytest.mark.parametrize("number", ["1e999999999", "1e-999999999", "1e9999", "8.5"])
def test_numbers_of_no_ordinary_size_are_refused(world: World, tiny: Model, number: str) -> None:
    body = f'{{"name": "t", "model": "Tiny", "parameters": {{"max_num_seqs": {number}}}}}'
    assert send(world.admin, "deployments", body)[0] == 422


def test_numbers_of_variables_are_kept_as_text(world: World, tiny: Model) -> None:
    status, made = send(world.admin, "deployments", TINY | {"environment": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 1.5}})
    assert (status, made["environment"]) == (200, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1.5"})


@pytest.mark.parametrize(
    "words",
    [
        ["--tru"],
        ["--trust_remote"],
        ["--hos=0.0.0.0"],
        ["--ud", "/tmp/s"],
        ["--config", "/srv/models/x/README.md"],
        ["--conf=/srv/models/x/README.md"],
        ["--model=/etc"],
        ["--tool-parser-p=/srv/x.py"],
        ["--worker-ext=x"],
        ["--hf-overrides", '{"trust_remote_code":true}'],
        ["--kv-transfer-config", '{"kv_connector_module_path":"x"}'],
        ["--kv-transfer-config.kv_connector_module_path=x"],
    ],
)
def test_the_beginning_of_a_forbidden_argument_is_forbidden(tiny: Model, words: list[str]) -> None:
    with pytest.raises(Refused, match="cannot be passed"):
        create_deployment(COMMAND_LINE, "tiny", {"model": "Tiny", "arguments": words})


def test_other_arguments_pass(tiny: Model) -> None:
    words = ["--seed=1", "--max-logprobs", "20", "--compilation-config={}", "-O3", "--model-impl=vllm"]
    assert create_deployment(COMMAND_LINE, "tiny", {"model": "Tiny", "arguments": words}).arguments == words


@pytest.mark.parametrize("source", ["file:/x\ud800", "file:/x\u202e"])
def test_a_source_is_printable(world: World, source: str) -> None:
    assert send(world.admin, "models", {"name": "x", "source": source})[0] == 422


def test_a_path_of_a_runtime_fits_its_column(world: World, tmp_path: Path) -> None:
    world.admin.user_permissions.add(Permission.objects.get(codename="free_arguments"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for path in (f"{tmp_path}{'/bin/..' * 100}", "/" + "a" * 5000, "/\0", "/\ud800"):
        status, answer = send(world.admin, "runtimes", {"requirement": "vllm==1", "path": path})
        assert (status, answer["error"]["field"]) == (422, "path")


@pytest.mark.parametrize("name", ["\0", "\0/1", "a/" + "9" * 5000, "x" * 100_000])
def test_a_device_by_an_odd_name_is_refused(world: World, name: str) -> None:
    assert signed_in(world.admin).post("/cards/cordon/", {"device": name}).status_code == 302
    with pytest.raises(Refused):
        device_named(name)


def test_a_plan_for_odd_devices_is_refused(world: World, tiny: Model) -> None:
    for binding in (["\0"], ["\ud800"]):
        assert send(world.admin, "placement/plan", {"model": "Tiny", "binding": binding})[0] == 422


@pytest.mark.parametrize("page", ["/deployments/new/", "/deployments/plan/", "/cards/what-if/"])
def test_pages_for_a_model_that_is_not_there(world: World, page: str) -> None:
    for name in ("nobody", "Tiny\0", "<b>"):
        answer = signed_in(world.admin).get(page, {"model": name})
        assert answer.status_code == 200 and "<b>" not in answer.content.decode()


def test_who_is_a_moment_later_is_told_so(world: World, tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body in (("deployments", TINY), ("models", {"name": "other", "source": "file:/x"})):
        assert send(world.admin, path, body)[0] == 200
        with monkeypatch.context() as patched:
            patched.setattr(QuerySet, "exists", lambda _self: False)  # as both saw it
            status, answer = send(world.admin, path, body)
        assert (status, answer["error"]["field"]) == (422, "name")


def test_a_conversion_that_says_much_still_ends(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = tmp_path / "python"
    loud.write_text("#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' x >&2\necho >&2\necho no such model >&2\nexit 2\n")
    loud.chmod(0o755)
    monkeypatch.setattr("console.catalog.jobs.sys.executable", str(loud))
    made = Model.objects.create(name="made", source="convert:Tiny")
    jobs.work(lambda _line: None)
    made.refresh_from_db()
    assert (made.state, made.reason) == (Model.State.FAILED, "Tiny could not be converted: no such model")


def test_a_conversion_without_end_is_ended(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("console.catalog.jobs.sys.executable", str(slow))
    monkeypatch.setattr(jobs, "CONVERT_TIMEOUT_S", 0.2)
    made = Model.objects.create(name="made", source="convert:Tiny")
    jobs.work(lambda _line: None)
    made.refresh_from_db()
    assert made.state == Model.State.FAILED


def test_a_mirror_lists_no_more_files_than_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [{"rfilename": "a.safetensors"}, *({"rfilename": f"{n}.json"} for n in range(6000))]
    monkeypatch.setattr(pinned, "get_json", lambda *_: {"sha": "a" * 40, "siblings": listed})
    mirror = hub.Hub(tmp_path, "https://mirror.example", egress.Allow())
    with pytest.raises(SourceError, match="at most 5,000"):
        hub.fetch(mirror, "a/b", "main", tmp_path / "x", lambda _: None, lambda _: None)


def _request_id(at_ms: int) -> str:
    return str(uuid.UUID(int=(at_ms << 80) | (7 << 76) | (2 << 62) | 1))


@pytest.mark.parametrize(
    ("key", "value", "name", "request_ms"),
    [
        ("a\0", 1.0, "odd", 0),
        ("a", float("nan"), "odd", 0),
        ("a", float("-inf"), "odd", 0),
        ("a", 1.0, "odd\0", 0),
        ("a", 1.0, "odd", (1 << 48) - 1),
        ("a", 1.0, "odd", 253_402_300_800_000),
    ],
)
def test_an_odd_span_costs_no_other_of_its_export(key: str, value: float, name: str, request_ms: int) -> None:
    partitions.ensure_for(timezone.now().date())
    now = time.time_ns()
    export = ExportTraceServiceRequest()
    scope = export.resource_spans.add().scope_spans.add()
    for span_id, at_ms in (("good", now // 10**6), ("odd", request_ms or now // 10**6)):
        span = scope.spans.add(name="good", span_id=span_id.encode(), start_time_unix_nano=now, end_time_unix_nano=now)
        span.attributes.add(key=engine_spans.REQUEST_ID).value.string_value = _request_id(at_ms)
    scope.spans[1].name = name
    scope.spans[1].attributes.add(key=key).value.double_value = value
    engine_spans.keep(list(engine_spans.read(export.SerializeToString())), timezone.now())
    assert EngineSpan.objects.filter(name="good").count() == 1
