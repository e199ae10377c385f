"""Write external endpoints: OpenAI-compatible APIs that somebody else runs. Their keys are sealed and never shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django.db import transaction

from console.audit.actions import Actor, change, record
from console.base import egress
from console.base.fields import Check, checked, text, whole
from console.base.sealing import seal
from console.catalog.models import Model
from console.errors import NotAllowed, Refused
from console.fleet.actions import move_replica
from console.fleet.models import Deployment, Endpoint, Replica, Route

_KEY = re.compile(r"[\x21-\x7e]{1,4096}")


def _base_url(value: Any) -> str:
    try:
        return egress.base_url(value if isinstance(value, str) else "")
    except egress.EgressRefused as error:
        raise ValueError(f"cannot be used. {error}") from None


def _api_key(value: Any) -> str:
    """Never repeated in the refusal: a key with a blank at its end is still a key."""
    if value == "" or (isinstance(value, str) and _KEY.fullmatch(value)):
        return str(value)
    raise ValueError("must be 1 to 4096 printable characters without blanks")


ENDPOINT_CHECKS: Mapping[str, Check] = {
    "base_url": _base_url,
    "served_name": text(120),
    "api_key": _api_key,
    "max_num_seqs": whole(0, 1_000_000),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@transaction.atomic
def add_endpoint(actor: Actor, name: str, values: Mapping[str, Any]) -> Deployment:
    """Make a deployment of an external endpoint; the controller checks its address and then lets requests go there.

    `base_url` and `served_name` are needed; without `max_num_seqs` any number of requests goes there at once.
    """
    _admins_only(actor)
    found = checked(ENDPOINT_CHECKS, values)
    for needed in ("base_url", "served_name"):
        if needed not in found:
            raise Refused(f"{needed} is missing.", needed)
    if not _NAME.fullmatch(name):
        raise Refused("name must be letters, digits and . _ -, at most 80 of them.", "name")
    if Deployment.objects.filter(name=name).exists():
        raise Refused(f"There is a deployment named {name} already.", "name")
    model, _created = Model.objects.get_or_create(
        name=found["served_name"],
        defaults={"source": f"external:{found['served_name']}", "state": Model.State.READY, "reason": "Runs elsewhere"},
    )
    deployment = Deployment.objects.create(name=name, model=model, engine=Deployment.Engine.EXTERNAL)
    endpoint = Endpoint.objects.create(deployment=deployment, **_columns(found))
    record(actor, "endpoint.add", deployment, None, **_audited(endpoint))
    return deployment


@transaction.atomic
def set_endpoint(actor: Actor, deployment: Deployment, values: Mapping[str, Any]) -> Endpoint:
    """Change where an endpoint is, its key or its slots; what is not named stays. The address is checked again."""
    _admins_only(actor)
    found = checked(ENDPOINT_CHECKS, values)
    endpoint = _endpoint(deployment)
    changed = change(endpoint, _columns(found))
    if changed:
        changed.pop("api_key_sealed", None)
        record(actor, "endpoint.set", deployment, None, **changed)
    return endpoint


@transaction.atomic
def remove_endpoint(actor: Actor, deployment: Deployment) -> None:
    """Forget an endpoint and its key. Raises Refused while a route leads to it."""
    _admins_only(actor)
    _endpoint(deployment)
    used = Route.objects.filter(targets__deployment=deployment) | Route.objects.filter(fallbacks__deployment=deployment)
    names = sorted(set(used.values_list("name", flat=True)))
    if names:
        raise Refused(f"{deployment} is in use by {', '.join(names)}: take it out of the route first.")
    for replica in deployment.replicas.select_related("deployment"):
        move_replica(replica, Replica.State.STOPPED, "Its endpoint was removed")
    record(actor, "endpoint.remove", deployment)
    deployment.delete()


def endpoint_facts(endpoint: Endpoint) -> dict[str, Any]:
    """An endpoint as JSON tells it: of its key only the end, of its replica the state and why."""
    replica = endpoint.deployment.replicas.first()
    return {
        "id": str(endpoint.deployment_id),
        "name": endpoint.deployment.name,
        **_audited(endpoint),
        "state": replica.state if replica else Replica.State.PENDING.value,
        "reason": replica.reason if replica else "",
    }


def _audited(endpoint: Endpoint) -> dict[str, Any]:
    names = ("base_url", "served_name", "max_num_seqs", "api_key_end")
    return {name: getattr(endpoint, name) for name in names}


def _columns(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the given values: the key only sealed, with the end that it is recognised by."""
    columns = {name: value for name, value in found.items() if name != "api_key"}
    if "api_key" in found:
        key = found["api_key"]
        columns["api_key_sealed"] = seal(key) if key else ""
        columns["api_key_end"] = key[-4:] if len(key) >= 12 else ""
    return columns


def _endpoint(deployment: Deployment) -> Endpoint:
    found = Endpoint.objects.select_for_update().filter(deployment=deployment).first()
    if found is None:
        raise Refused(f"{deployment} is no external endpoint.")
    return found


def _admins_only(actor: Actor) -> None:
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can change external endpoints.")
