"""A tenant's keys: create, show once, revoke, and what each used."""

from __future__ import annotations

import uuid
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from console.base.views import actor_of
from console.billing.queries import KeyUsage, usage_by_key, usage_by_model
from console.errors import ConsoleError
from console.fleet.models import Route
from console.keys import actions
from console.keys.actions import KEY_CHECKS
from console.keys.forms import KeyForm
from console.keys.models import APIKey
from console.keys.queries import limit_fields, limit_rows
from console.tenants.actions import is_owner, may_manage
from console.tenants.limits import Priority
from console.tenants.models import Tenant
from console.tenants.queries import visible_tenants


@require_GET
def keys(request: HttpRequest) -> HttpResponse:
    """All keys of one tenant; ?tenant=name chooses it."""
    tenants = list(visible_tenants(request.user))
    if not tenants:
        return render(request, "keys/none.html")
    wanted = request.GET.get("tenant")
    tenant = next((t for t in tenants if t.name == wanted), None) if wanted else tenants[0]
    if tenant is None:
        raise Http404
    return render(request, "keys/keys.html", _context(request, tenant, tenants, KeyForm()))


@require_GET
def key(request: HttpRequest, key_id: uuid.UUID) -> HttpResponse:
    """One key: its limits, and how much of each is used."""
    found = _key(request, key_id)
    may = may_manage(actor_of(request), found.tenant)
    context = {
        "key": found,
        "tenant": found.tenant,
        "rows": limit_rows(found),
        "tenant_rows": limit_rows(found.tenant),
        "fields": limit_fields(found),
        "priorities": Priority.choices,
        "may_manage": may,
    }
    return render(request, "keys/key.html", context)


@require_POST
def limits(request: HttpRequest, key_id: uuid.UUID) -> HttpResponse:
    """Change a key's limits; an empty field means no limit."""
    found = _key(request, key_id)
    values = {name: request.POST[name] for name in KEY_CHECKS if name in request.POST}
    try:
        actions.set_key_limits(actor_of(request), found, values)
    except ConsoleError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, _("The limits are saved. Gateways know them within a second."))
    return redirect("key", key_id=found.id)


@never_cache
@require_POST
def create(request: HttpRequest, tenant: str) -> HttpResponse:
    """Make a key. Its secret is in this one answer and nowhere else."""
    owner = _tenant(request, tenant)
    form = KeyForm(request.POST)
    tenants = list(visible_tenants(request.user))
    if not form.is_valid():
        return render(request, "keys/keys.html", _context(request, owner, tenants, form), status=422)
    try:
        made = actions.create_key(
            actor_of(request),
            owner,
            form.cleaned_data["name"],
            form.cleaned_data["allowed_models"] or None,
            form.cleaned_data["expires_at"],
        )
    except ConsoleError as error:
        form.add_error(None, str(error))
        return render(request, "keys/keys.html", _context(request, owner, tenants, form), status=403)
    context = _context(request, owner, tenants, KeyForm()) | {"made": made}
    return render(request, "keys/keys.html", context)


@require_POST
def revoke(request: HttpRequest, key_id: uuid.UUID) -> HttpResponse:
    """Revoke a key; asked for with a confirmation on the page."""
    key = _key(request, key_id)
    try:
        actions.revoke_key(actor_of(request), key)
    except ConsoleError as error:
        messages.error(request, str(error))
    else:
        messages.success(
            request,
            _("%(name)s is revoked. It stops working everywhere within a second.") % {"name": key.name},
        )
    return redirect(f"{reverse('keys')}?{urlencode({'tenant': key.tenant.name})}")


def _key(request: HttpRequest, key_id: uuid.UUID) -> APIKey:
    visible = visible_tenants(request.user)
    return get_object_or_404(APIKey.objects.select_related("tenant"), pk=key_id, tenant__in=visible)


def _tenant(request: HttpRequest, name: str) -> Tenant:
    return get_object_or_404(visible_tenants(request.user), name=name)


def _context(request: HttpRequest, tenant: Tenant, tenants: list[Tenant], form: KeyForm) -> dict[str, Any]:
    usage = usage_by_key(tenant.id)
    rows = [(key, usage.get(key.id, KeyUsage())) for key in APIKey.objects.filter(tenant=tenant)]
    rows.sort(key=lambda pair: (pair[0].status != "active", pair[0].kind == "playground"))
    routes = list(Route.objects.all())
    return {
        "tenant": tenant,
        "tenants_here": tenants,
        "rows": rows,
        "active": sum(1 for key, _usage in rows if key.status == "active"),
        "revoked": sum(1 for key, _usage in rows if key.status != "active"),
        "by_model": list(usage_by_model(tenant.id)),
        "limit_rows": limit_rows(tenant),
        "may_manage": may_manage(actor_of(request), tenant),
        "owns": is_owner(actor_of(request), tenant),
        "form": form,
        "routes": routes,
        "example_model": routes[0].name if routes else "MODEL",
        "base_url": f"{settings.PUBLIC_URL}/v1",
    }
