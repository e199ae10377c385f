"""Tenants and who belongs to them, for admins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q, Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from console.base.models import User
from console.base.views import actor_of
from console.billing.models import UsageRecord
from console.errors import ConsoleError
from console.keys.models import APIKey
from console.keys.queries import limit_fields, limit_rows
from console.tenants import actions
from console.tenants.limits import Priority
from console.tenants.models import Membership, Tenant
from console.tenants.queries import visible_tenants


@require_GET
def tenants(request: HttpRequest) -> HttpResponse:
    """Every tenant with its people and its keys."""
    _admins_only(request)
    rows = Tenant.objects.annotate(
        people=Count("membership", distinct=True),
        active_keys=Count("keys", filter=Q(keys__revoked_at=None, keys__kind=APIKey.Kind.API), distinct=True),
    )
    since = datetime.now(UTC) - timedelta(days=7)
    used = dict(UsageRecord.objects.filter(started_at__gte=since).values_list("tenant_id").annotate(n=Sum("requests")))
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
    return _page(request, get_object_or_404(Tenant, name=name))


def _page(request: HttpRequest, found: Tenant, made: actions.NewPerson | None = None) -> HttpResponse:
    members = Membership.objects.filter(tenant=found).select_related("user").order_by("user__username")
    context = {
        "tenant": found,
        "members": members,
        "roles": Membership.Role.choices,
        "made": made,
        "rows": limit_rows(found),
        "fields": limit_fields(found),
        "priorities": Priority.choices,
    }
    return render(request, "tenants/tenant.html", context)


@require_POST
def limits(request: HttpRequest, name: str) -> HttpResponse:
    """Change a tenant's limits, queue share and class; an empty field means no limit."""
    _admins_only(request)
    found = get_object_or_404(Tenant, name=name)
    values = {name: request.POST[name] for name in actions.TENANT_CHECKS if name in request.POST}
    try:
        actions.set_limits(actor_of(request), found, values)
    except ConsoleError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, _("The limits are saved. Gateways know them within a second."))
    return redirect("tenant", name=found.name)


@require_POST
def capture(request: HttpRequest, name: str) -> HttpResponse:
    """Decide whether a tenant's prompts and answers are kept, and for how long: its owners do."""
    found = get_object_or_404(visible_tenants(request.user), name=name)
    values = {name: request.POST[name] for name in actions.CAPTURE_CHECKS if name in request.POST}
    try:
        actions.set_limits(actor_of(request), found, values)
    except ConsoleError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, _("Saved. Gateways know it within a second."))
    return redirect(f"{reverse('keys')}?{urlencode({'tenant': found.name})}")


@require_POST
def add_member(request: HttpRequest, name: str) -> HttpResponse:
    """Put a person into a tenant, or change their role; an account that is missing is made when that was asked for."""
    _admins_only(request)
    found = get_object_or_404(Tenant, name=name)
    username, role = request.POST.get("username", "").strip(), request.POST.get("role", "")
    person = User.objects.filter(username=username).first()
    if person is None and request.POST.get("create") and role in Membership.Role.values:
        return _create_person(request, found, username, role)
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


def _create_person(request: HttpRequest, found: Tenant, username: str, role: str) -> HttpResponse:
    """The one-time password is in this one answer and nowhere else."""
    try:
        made = actions.create_person(actor_of(request), found, username, role)
    except ConsoleError as error:
        messages.error(request, str(error))
        return redirect(reverse("tenant", args=[found.name]))
    return _page(request, found, made)


@require_POST
def remove_member(request: HttpRequest, name: str, username: str) -> HttpResponse:
    """Take a person out of a tenant; asked for with a confirmation on the page."""
    _admins_only(request)
    membership = get_object_or_404(
        Membership.objects.select_related("tenant", "user"), tenant__name=name, user__username=username
    )
    actions.remove_member(actor_of(request), membership)
    messages.success(request, _("%(name)s no longer belongs to this tenant.") % {"name": username})
    return redirect(reverse("tenant", args=[name]))


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
