"""Which tenants a person may see. Every page and socket starts from here."""

from __future__ import annotations

from django.contrib.auth.models import AnonymousUser
from django.db.models import QuerySet

from console.base.models import User
from console.tenants.models import Membership, Tenant


def visible_tenants(user: User | AnonymousUser) -> QuerySet[Tenant]:
    """Admins see every tenant, others the ones they belong to, strangers none."""
    if not isinstance(user, User) or not user.is_active:
        return Tenant.objects.none()
    if user.is_staff:
        return Tenant.objects.all()
    return Tenant.objects.filter(membership__user=user)


def usable_tenants(user: User | AnonymousUser) -> QuerySet[Tenant]:
    """Tenants in whose name a person may send requests from the playground."""
    visible = visible_tenants(user).filter(is_active=True)
    if not isinstance(user, User) or user.is_staff:
        return visible
    # Not exclude(membership__user=…, membership__role=…): over a relation to many, its two conditions may hold for
    # different rows, and one viewer in a tenant would lock everybody out.
    may_send = Membership.objects.filter(user=user).exclude(role=Membership.Role.VIEWER)
    return visible.filter(pk__in=may_send.values("tenant_id"))
