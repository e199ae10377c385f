"""The audit log: admins see all, owners what concerns their tenants, others what they did themselves."""

from __future__ import annotations

import uuid

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.audit.models import AuditEntry
from console.base.models import User
from console.tenants.models import Membership

PAGE = 50


@require_GET
def audit(request: HttpRequest) -> HttpResponse:
    """Newest first; filtered by who and what."""
    actor = request.GET.get("actor", "").strip()
    action = request.GET.get("action", "").strip()
    entries = visible_entries(request.user)  # type: ignore[arg-type]
    if actor:
        entries = entries.filter(actor_label__icontains=actor)
    if action:
        entries = entries.filter(action__startswith=action)
    before = _uuid(request.GET.get("before", ""))
    if before:
        entries = entries.filter(id__lt=before)
    rows = list(entries.order_by("-id")[: PAGE + 1])
    older = rows[PAGE - 1].id if len(rows) > PAGE else None
    context = {
        "rows": rows[:PAGE],
        "older": older,
        "actor": actor,
        "action": action,
        "is_first": before is None,
    }
    return render(request, "audit/audit.html", context)


def visible_entries(user: User) -> QuerySet[AuditEntry]:
    """What this person may read."""
    if user.is_staff:
        return AuditEntry.objects.all()
    owned = Membership.objects.filter(user=user, role=Membership.Role.OWNER).values_list("tenant_id", flat=True)
    return AuditEntry.objects.filter(Q(tenant_id__in=list(owned)) | Q(actor=user))


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None
