"""Create and revoke API keys. The key itself exists only in the return value of `create_key`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from console.audit.actions import Actor, change, record
from console.base.fields import Check, checked, choice, flag, told
from console.errors import NotAllowed, Refused
from console.keys.models import APIKey
from console.tenants.actions import may_manage
from console.tenants.limits import CHECKS, Priority
from console.tenants.models import Tenant
from serving import apikey

KEY_CHECKS: Mapping[str, Check] = {**CHECKS, "priority": choice(("", *Priority.values)), "may_override": flag}


class NewKey(NamedTuple):
    """A key that was just made. `secret` is shown once and kept nowhere."""

    key: APIKey
    secret: str


def server_secret() -> bytes:
    """The secret that roots key digests, cache salts and end-user digests."""
    return settings.SECRET_KEY.encode()


@transaction.atomic
def create_key(
    actor: Actor,
    tenant: Tenant,
    name: str,
    allowed_models: Sequence[str] | None = None,
    expires_at: datetime | None = None,
    limits: Mapping[str, Any] | None = None,
) -> NewKey:
    """Make a key, with `limits` as in `set_key_limits`. Raises NotAllowed, or Refused for what cannot be used."""
    if not may_manage(actor, tenant):
        raise NotAllowed("Only owners of this tenant and platform admins can create keys.")
    name = name.strip()
    if not name or len(name) > 80:
        raise Refused("Give the key a name of 1 to 80 characters.")
    if expires_at is not None and expires_at <= timezone.now():
        raise Refused("The expiry lies in the past.")
    found = _checked_limits(actor, limits or {})
    secret = apikey.generate()
    key = APIKey.objects.create(
        tenant=tenant,
        name=name,
        digest=apikey.digest(secret, server_secret()),
        display=apikey.display(secret),
        allowed_models=list(allowed_models) if allowed_models else None,
        expires_at=expires_at,
        created_by=actor.user,
        **found,
    )
    record(
        actor, "key.create", key, tenant.id, allowed_models=key.allowed_models, **{n: told(v) for n, v in found.items()}
    )
    return NewKey(key, secret)


@transaction.atomic
def set_key_limits(actor: Actor, key: APIKey, values: Mapping[str, Any]) -> APIKey:
    """Set limits and class of a key; what is not named stays. Raises NotAllowed, or Refused with the field."""
    if not may_manage(actor, key.tenant):
        raise NotAllowed("Only owners of this tenant and platform admins can change its keys.")
    found = _checked_limits(actor, values)
    key = APIKey.objects.select_for_update().get(pk=key.pk)
    changed = change(key, found)
    if changed:
        record(actor, "key.limits", key, key.tenant_id, **changed)
    return key


def key_facts(key: APIKey) -> dict[str, Any]:
    """What `set_key_limits` can change, for JSON."""
    return {"id": str(key.id), "name": key.name, "tenant": key.tenant.name, "currency": key.tenant.currency} | {
        name: told(getattr(key, name)) for name in KEY_CHECKS
    }


def _checked_limits(actor: Actor, values: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides reach past a route's own choices, to any replica: only the platform gives them out."""
    if "may_override" in values and not actor.is_admin:
        raise NotAllowed("Only platform admins can let a key choose policy, target and replica.")
    return checked(KEY_CHECKS, values)


@transaction.atomic
def revoke_key(actor: Actor, key: APIKey) -> APIKey:
    """Revoke a key; gateways refuse it within a second. Revoking twice changes nothing."""
    if not may_manage(actor, key.tenant):
        raise NotAllowed("Only owners of this tenant and platform admins can revoke its keys.")
    key = APIKey.objects.select_for_update().get(pk=key.pk)
    if key.kind == APIKey.Kind.PLAYGROUND:
        raise Refused("A tenant's playground key cannot be revoked; remove the person from the tenant instead.")
    if key.revoked_at is None:
        key.revoked_at = timezone.now()
        key.save(update_fields=["revoked_at"])
        record(actor, "key.revoke", key, key.tenant_id)
    return key


def ensure_playground_key(tenant: Tenant) -> APIKey:
    """The key under which a tenant's playground requests are metered; made when first needed."""
    key, created = APIKey.objects.get_or_create(
        tenant=tenant, kind=APIKey.Kind.PLAYGROUND, defaults={"name": "playground"}
    )
    if created:
        record(Actor(), "key.create", key, tenant.id, kind="playground")
    return key
