"""Prompts and answers that tenants chose to keep: who may open them, for how long they stay, how they are erased.

Only owners and members of the tenant read them; each opening is an entry of the audit log. Platform admins see that
there is something and how large it is, as everybody does who may see the request.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction
from django.db.models import F, Func, IntegerField

from console.audit.actions import Actor, record
from console.errors import NotAllowed, Refused
from console.telemetry.models import RequestContent, RequestRecord
from console.tenants.models import Membership, Tenant

MAX_DAYS = 30  # whatever a tenant's own number is

_EXPIRE = """
DELETE FROM telemetry_requestcontent c WHERE c.started_at < now() - make_interval(days => %s)
    OR EXISTS (SELECT FROM tenants_tenant t WHERE t.id = c.tenant_id
        AND c.started_at < now() - make_interval(days => t.capture_days))
"""


@dataclass(frozen=True)
class Held:
    """What is known of a request's words without reading them."""

    size: int  # bytes, as they are stored
    may_open: bool


def held(actor: Actor, row: RequestRecord) -> Held | None:
    """Whether the words of a request are kept; None where not."""
    size = Func(F("body"), function="pg_column_size", output_field=IntegerField())
    found = RequestContent.objects.filter(id=row.id).annotate(size=size).values_list("size", flat=True).first()
    return None if found is None else Held(found, may_open(actor, row.tenant_id))


def may_open(actor: Actor, tenant_id: uuid.UUID | None) -> bool:
    """Owners and members of the tenant; being a platform admin is not enough."""
    if tenant_id is None or actor.user is None:
        return False
    roles = (Membership.Role.OWNER, Membership.Role.MEMBER)
    return Membership.objects.filter(tenant_id=tenant_id, user=actor.user, role__in=roles).exists()


@transaction.atomic
def opened(actor: Actor, row: RequestRecord) -> dict[str, Any]:
    """The words of a request: {prompt, answer: [{role, text, cut}], left_out}. Leaves an entry in the audit log.

    Raises NotAllowed for who may not read them, Refused where none are kept.
    """
    if not may_open(actor, row.tenant_id):
        raise NotAllowed("Only owners and members of a tenant can open its prompts and answers.")
    found = RequestContent.objects.filter(id=row.id).first()
    if found is None:
        raise Refused("The prompt and the answer of this request are not kept, or no longer.")
    record(actor, "content.open", row, row.tenant_id)
    body: dict[str, Any] = found.body
    return body


@transaction.atomic
def erase(actor: Actor, *, tenant: Tenant | None = None, request_id: uuid.UUID | None = None) -> int:
    """Erase the words of a tenant's requests, or of one request; returns of how many. Raises Refused without either."""
    if tenant is None and request_id is None:
        raise Refused("Name a tenant or a request.")
    chosen = RequestContent.objects.all()
    if tenant is not None:
        chosen = chosen.filter(tenant_id=tenant.id)
    if request_id is not None:
        chosen = chosen.filter(id=request_id)
    by_tenant: dict[uuid.UUID, int] = {}
    for tenant_id in chosen.values_list("tenant_id", flat=True):
        by_tenant[tenant_id] = by_tenant.get(tenant_id, 0) + 1
    chosen.delete()
    for owner in Tenant.objects.filter(id__in=by_tenant):
        facts = {} if request_id is None else {"request": str(request_id)}
        record(actor, "content.erase", owner, owner.id, requests=by_tenant[owner.id], **facts)
    return sum(by_tenant.values())


def expire() -> int:
    """Delete what is older than its tenant keeps it; returns of how many requests."""
    with connection.cursor() as cursor:
        cursor.execute(_EXPIRE, [MAX_DAYS])
        deleted: int = cursor.rowcount
    return deleted
