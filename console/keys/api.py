"""A key's limits over JSON: who belongs to its tenant reads them, owners and platform admins write them."""

from __future__ import annotations

import uuid

from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from console.base.api import Reply, body_of
from console.base.views import actor_of
from console.keys.actions import key_facts, set_key_limits
from console.keys.models import APIKey
from console.tenants.queries import visible_tenants


def limits(request: HttpRequest, key_id: uuid.UUID) -> Reply:
    """What the key may use."""
    return key_facts(_key(request, key_id))


def change(request: HttpRequest, key_id: uuid.UUID) -> Reply:
    """Change what is named, leave the rest; null takes a limit away."""
    return key_facts(set_key_limits(actor_of(request), _key(request, key_id), body_of(request)))


def _key(request: HttpRequest, key_id: uuid.UUID) -> APIKey:
    visible = visible_tenants(request.user)
    return get_object_or_404(APIKey.objects.select_related("tenant"), pk=key_id, tenant__in=visible)
