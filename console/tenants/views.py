"""Tenants and who belongs to them, for admins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from console.base.models import User
from console.base.views import actor_of
from console.billing.models import UsageRecord
from console.errors import ConsoleError
from console.keys.models import APIKey
from console.tenants import actions
from console.tenants.models import Membership, Tenant


@require_GET
def tenants(request: HttpRequest) -> HttpResponse:
    """Every tenant with its people and its keys."""
    _admins_only(request)
    rows = Tenant.objects.annotate(
        people=Count("membership", distinct=True),
        active_keys=Count("keys", filter=Q(keys__revoked_at=None, keys__kind=APIKey.Kind.API), distinct=True),
    )
    since = datetime.now(UTC) - timedelta(days=7)
    used = dict(UsageRecord.objects.filter(started_at__gte=since).values_list("tenant_id").annotate(n=Count("id")))
    return render(request, "tenants/tenants.html", {"rows": [(t, used.get(t.id, 0)) for t in rows]})


@require_POST
def create(request: HttpRequest) -> HttpResponse:
    _admins_only(request)
    name = request.POST.get("name", "").strip()
    try:
        made = actions.create_tenant(actor_of(request), name, request.POST.get("display_name", "").strip()[:120])
    except ConsoleError as error:
        messages.error(request, str(error))
        return redirect("tenants")
    messages.success(request, _("The tenant %(name)s is made.") % {"name": made.name})
    return redirect("tenant", name=made.name)


@require_GET
def tenant(request: HttpRequest, name: str) -> HttpResponse:
    """One tenant's people."""
    _admins_only(request)
    found = get_object_or_404(Tenant, name=name)
    members = Membership.objects.filter(tenant=found).select_related("user").order_by("user__username")
    return render(
        request,
        "tenants/tenant.html",
        {"tenant": found, "members": members, "roles": Membership.Role.choices},
    )


@require_POST
def add_member(request: HttpRequest, name: str) -> HttpResponse:
    """Put a person into a tenant, or change their role."""
    _admins_only(request)
    found = get_object_or_404(Tenant, name=name)
    username, role = request.POST.get("username", "").strip(), request.POST.get("role", "")
    person = User.objects.filter(username=username).first()
    if person is None:
        messages.error(request, _("There is no account called “%(name)s”.") % {"name": username})
    elif role not in Membership.Role.values:
        messages.error(request, _("Choose one of the roles."))
    else:
        try:
            actions.add_member(actor_of(request), found, person, role)
        except ConsoleError as error:
            messages.error(request, str(error))
        else:
            messages.success(request, _("%(name)s is in this tenant now.") % {"name": username})
    return redirect(reverse("tenant", args=[found.name]))


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
