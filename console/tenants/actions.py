"""Make tenants and put people into them."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db import transaction

from console.audit.actions import Actor, change, record
from console.base.fields import Check, checked, choice, flag, told, whole
from console.base.models import User
from console.base.passwords import one_time_password
from console.errors import NotAllowed, Refused
from console.tenants.limits import CHECKS, Priority
from console.tenants.models import Membership, Tenant

CAPTURE_CHECKS: Mapping[str, Check] = {"capture_content": flag, "capture_days": whole(1, 30)}
TENANT_CHECKS: Mapping[str, Check] = {
    **CHECKS,
    **CAPTURE_CHECKS,
    "weight": whole(1, 10_000),
    "priority": choice(Priority.values),
}


@transaction.atomic
def create_tenant(
    actor: Actor, name: str, display_name: str = "", currency: str = "USD", billing_zone: str = "UTC"
) -> Tenant:
    """Make a tenant. Raises NotAllowed for anyone but an admin, Refused for a bad or taken name.

    Currency and billing zone stay: amounts that were spent have no other.
    """
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can create tenants.")
    if not re.fullmatch("[A-Z]{3}", currency):
        raise Refused("A currency is three capital letters, such as USD.", "currency")
    if billing_zone not in zoneinfo.available_timezones():
        raise Refused("A billing zone is an IANA name, such as Europe/Stockholm.", "billing_zone")
    tenant = Tenant(name=name, display_name=display_name, currency=currency, billing_zone=billing_zone)
    try:
        tenant.full_clean()
    except ValidationError as error:
        raise Refused(" ".join(error.messages)) from error
    tenant.save()
    record(actor, "tenant.create", tenant, tenant.id)
    return tenant


@transaction.atomic
def set_limits(actor: Actor, tenant: Tenant, values: Mapping[str, Any]) -> Tenant:
    """Set limits, queue share and class of a tenant, and whether its contents are kept; what is not named stays.

    Contents are the tenant's own: its owners decide about them and no platform admin does, but for whoever runs
    commands on the machine. Raises NotAllowed, or Refused with the field.
    """
    if not actor.is_admin and set(values) - set(CAPTURE_CHECKS):
        raise NotAllowed("Only platform admins can change a tenant's limits.")
    found = checked(TENANT_CHECKS, values)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    if any(getattr(tenant, name) != found.get(name, getattr(tenant, name)) for name in CAPTURE_CHECKS):
        _owners_only(actor, tenant)
    changed = change(tenant, found)
    if changed:
        record(actor, "tenant.limits", tenant, tenant.id, **changed)
    return tenant


def _owners_only(actor: Actor, tenant: Tenant) -> None:
    if actor.user is not None and not is_owner(actor, tenant):
        raise NotAllowed("Only a tenant's owners can decide whether its prompts and answers are kept.")


def tenant_facts(tenant: Tenant) -> dict[str, Any]:
    """What `set_limits` can change, for JSON."""
    return {"id": str(tenant.id), "name": tenant.name, "currency": tenant.currency} | {
        name: told(getattr(tenant, name)) for name in TENANT_CHECKS
    }


@transaction.atomic
def add_member(actor: Actor, tenant: Tenant, user: User, role: str = Membership.Role.MEMBER) -> Membership:
    """Put a person into a tenant, or change their role there."""
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can change who belongs to a tenant.")
    membership, _created = Membership.objects.update_or_create(tenant=tenant, user=user, defaults={"role": role})
    record(actor, "tenant.member", tenant, tenant.id, user=user.get_username(), role=role)
    return membership


class NewPerson(NamedTuple):
    """An account that was just made. `password` is shown once and must be changed at the first sign-in."""

    user: User
    password: str


@transaction.atomic
def create_person(actor: Actor, tenant: Tenant, username: str, role: str) -> NewPerson:
    """Make an account in a tenant. Raises NotAllowed for anyone but an admin, Refused for a bad or taken name."""
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can create accounts.")
    if User.objects.filter(username__iexact=username).exists():
        raise Refused("There is an account of this name already.")
    password = one_time_password()
    user = User(username=username, must_change_password=True)
    user.set_password(password)
    try:
        user.full_clean()
    except ValidationError as error:
        raise Refused(" ".join(error.messages)) from error
    user.save()
    record(actor, "user.create", user, tenant.id)
    add_member(actor, tenant, user, role)
    return NewPerson(user, password)


@transaction.atomic
def remove_member(actor: Actor, membership: Membership) -> None:
    """Take a person out of a tenant; the account stays. Their open pages show nothing of it from the next load on."""
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can change who belongs to a tenant.")
    tenant, user = membership.tenant, membership.user
    membership.delete()
    record(actor, "tenant.remove_member", tenant, tenant.id, user=user.get_username())


def may_manage(actor: Actor, tenant: Tenant) -> bool:
    """Whether the actor may create and revoke this tenant's keys: admins and the tenant's owners."""
    return actor.is_admin or is_owner(actor, tenant)


def is_owner(actor: Actor, tenant: Tenant) -> bool:
    """Whether the actor is an owner of this tenant."""
    return Membership.objects.filter(tenant=tenant, user=actor.user, role=Membership.Role.OWNER).exists()
