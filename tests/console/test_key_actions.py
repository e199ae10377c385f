"""Keys, tenants and audit: who may do what, and what is written down."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from console.audit.actions import COMMAND_LINE, Actor
from console.audit.models import AuditEntry
from console.base.models import SnapshotVersion, User
from console.errors import NotAllowed, Refused
from console.keys.actions import create_key, ensure_playground_key, revoke_key, server_secret
from console.tenants.actions import add_member, create_tenant
from console.tenants.models import Membership, Tenant
from console.tenants.queries import usable_tenants, visible_tenants
from serving import apikey

pytestmark = pytest.mark.django_db


@pytest.fixture
def tenant() -> Tenant:
    return create_tenant(COMMAND_LINE, "aurora")


def person(name: str, tenant: Tenant | None = None, role: str = Membership.Role.MEMBER) -> Actor:
    user = User.objects.create_user(name, password="x")
    if tenant is not None:
        add_member(COMMAND_LINE, tenant, user, role)
    return Actor(user=user, address="127.0.0.1")


def version() -> int:
    return SnapshotVersion.objects.get().version


def test_a_key_is_stored_as_a_digest_only(tenant: Tenant) -> None:
    made = create_key(COMMAND_LINE, tenant, "bot")
    assert apikey.is_well_formed(made.secret)
    assert made.key.digest == apikey.digest(made.secret, server_secret())
    assert made.secret not in str(vars(made.key))
    assert made.key.display.endswith(made.secret[-4:])


def test_making_and_revoking_a_key_bumps_the_snapshot_and_is_audited(tenant: Tenant) -> None:
    before = version()
    key = create_key(COMMAND_LINE, tenant, "bot").key
    assert version() > before
    between = version()
    revoke_key(COMMAND_LINE, key)
    revoke_key(COMMAND_LINE, key)
    assert version() > between
    actions = list(AuditEntry.objects.filter(target_id=str(key.id)).values_list("action", flat=True))
    assert sorted(actions) == ["key.create", "key.revoke"]


def test_no_audit_entry_holds_a_key(tenant: Tenant) -> None:
    secret = create_key(COMMAND_LINE, tenant, "bot").secret
    assert not any(secret in str(vars(entry)) for entry in AuditEntry.objects.all())


@pytest.mark.parametrize("role", [Membership.Role.MEMBER, Membership.Role.VIEWER, None])
def test_only_owners_and_admins_manage_keys(tenant: Tenant, role: str | None) -> None:
    actor = person("pat", tenant if role else None, role or Membership.Role.MEMBER)
    key = create_key(COMMAND_LINE, tenant, "bot").key
    with pytest.raises(NotAllowed):
        create_key(actor, tenant, "mine")
    with pytest.raises(NotAllowed):
        revoke_key(actor, key)


def test_an_owner_manages_their_own_tenant_and_no_other(tenant: Tenant) -> None:
    owner = person("olga", tenant, Membership.Role.OWNER)
    other = create_tenant(COMMAND_LINE, "borealis")
    assert create_key(owner, tenant, "bot").key.created_by == owner.user
    with pytest.raises(NotAllowed):
        create_key(owner, other, "bot")
    with pytest.raises(NotAllowed):
        create_tenant(owner, "mine")


def test_a_bad_key_request_is_refused_with_a_sentence(tenant: Tenant) -> None:
    with pytest.raises(Refused, match="name"):
        create_key(COMMAND_LINE, tenant, "  ")
    with pytest.raises(Refused, match="past"):
        create_key(COMMAND_LINE, tenant, "bot", expires_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(Refused):
        create_tenant(COMMAND_LINE, "Not A Name")


def test_a_stranger_sees_no_tenant_and_a_viewer_may_not_send(tenant: Tenant) -> None:
    stranger, viewer = person("sam").user, person("vera", tenant, Membership.Role.VIEWER).user
    assert stranger is not None
    assert viewer is not None
    assert not visible_tenants(stranger).exists()
    assert list(visible_tenants(viewer)) == [tenant]
    assert not usable_tenants(viewer).exists()


def test_the_playground_key_cannot_be_presented_or_revoked(tenant: Tenant) -> None:
    key = ensure_playground_key(tenant)
    assert ensure_playground_key(tenant) == key
    assert key.digest is None
    with pytest.raises(Refused):
        revoke_key(COMMAND_LINE, key)


@pytest.mark.parametrize("statement", ["UPDATE audit_auditentry SET action = 'x'", "DELETE FROM audit_auditentry"])
def test_audit_entries_refuse_update_and_delete(tenant: Tenant, statement: str) -> None:
    with (
        pytest.raises(IntegrityError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)


def test_raw_sql_cannot_go_round_the_snapshot_version(tenant: Tenant) -> None:
    before = version()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE tenants_tenant SET is_active = false")
    assert version() == before + 1
