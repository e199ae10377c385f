"""A tenant's limits over JSON: who belongs to it reads them, platform admins write them."""

from __future__ import annotations

import uuid

from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from console.base.api import Reply, body_of
from console.base.views import actor_of
from console.tenants.actions import set_limits, tenant_facts
from console.tenants.models import Tenant
from console.tenants.queries import visible_tenants


def limits(request: HttpRequest, tenant_id: uuid.UUID) -> Reply:
    """What the tenant may use."""
    return tenant_facts(_tenant(request, tenant_id))


def change(request: HttpRequest, tenant_id: uuid.UUID) -> Reply:
    """Change what is named, leave the rest; null takes a limit away."""
    return tenant_facts(set_limits(actor_of(request), _tenant(request, tenant_id), body_of(request)))


def _tenant(request: HttpRequest, tenant_id: uuid.UUID) -> Tenant:
    return get_object_or_404(visible_tenants(request.user), pk=tenant_id)
