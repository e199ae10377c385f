"""Whose requests a person may read: the one place where pages, sockets and exports get it from."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from django.contrib.auth.models import AnonymousUser

from console.base.models import User
from console.tenants.queries import visible_tenants


@dataclass(frozen=True)
class Scope:
    """The tenants whose rows may be read; None means all rows, those without a tenant included."""

    tenant_ids: tuple[uuid.UUID, ...] | None


def scope_of(user: User | AnonymousUser) -> Scope:
    """Admins read everything, others their tenants, strangers nothing."""
    if user.is_authenticated and user.is_active and user.is_staff:
        return Scope(None)
    return Scope(tuple(sorted(visible_tenants(user).values_list("id", flat=True))))
