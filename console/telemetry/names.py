"""Names of the tenants, keys and replicas that telemetry rows point to, and the way back from a filter's names."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from django.db.models import Q
from django.utils.translation import gettext as _

from console.fleet.models import Replica
from console.keys.models import APIKey
from console.telemetry.filters import BadFilter, Condition
from console.telemetry.models import RequestRecord
from console.telemetry.queries import resolved
from console.telemetry.scope import Scope
from console.tenants.models import Tenant


@dataclass(frozen=True)
class Names:
    """By id. Whatever is gone or not the reader's is missing."""

    tenants: dict[uuid.UUID | None, Tenant] = field(default_factory=dict)
    keys: dict[uuid.UUID | None, APIKey] = field(default_factory=dict)
    replicas: dict[uuid.UUID | None, Replica] = field(default_factory=dict)


def of(records: Iterable[RequestRecord], scope: Scope) -> Names:
    """Names for a page of rows, in three queries."""
    rows = list(records)
    return by_ids(
        scope,
        {r.tenant_id for r in rows},
        {r.key_id for r in rows},
        {r.replica_id for r in rows},
    )


def by_ids(
    scope: Scope,
    tenant_ids: Iterable[uuid.UUID | None] = (),
    key_ids: Iterable[uuid.UUID | None] = (),
    replica_ids: Iterable[uuid.UUID | None] = (),
) -> Names:
    """Names of these ids; a kind that is not asked for costs no query."""
    tenants, keys, replicas = ({i for i in ids if i} for ids in (tenant_ids, key_ids, replica_ids))
    visible_tenants = Tenant.objects.filter(_in_scope(scope, "id"), id__in=tenants) if tenants else ()
    visible_keys = APIKey.objects.filter(_in_scope(scope, "tenant_id"), id__in=keys) if keys else ()
    known = Replica.objects.select_related("deployment").filter(id__in=replicas) if replicas else ()
    return Names(
        {t.id: t for t in visible_tenants},
        {k.id: k for k in visible_keys},
        {r.id: r for r in known},
    )


def resolve(conditions: Sequence[Condition], scope: Scope) -> tuple[Condition, ...]:
    """Replace names of tenants, keys and replicas by ids. Raises BadFilter for a name nobody in scope bears."""
    finders = {"tenant": _tenant_ids, "key": _key_ids, "replica": _replica_ids}
    found = []
    for condition in conditions:
        finder = finders.get(condition.field)
        if finder is None:
            found.append(condition)
            continue
        ids = [i for value in condition.values for i in _known(finder, condition, value, scope)]
        found.append(resolved(condition, ids))
    return tuple(found)


def _known(finder, condition: Condition, value: str, scope: Scope) -> list[uuid.UUID]:  # type: ignore[no-untyped-def]
    ids: list[uuid.UUID] = finder(value, scope)
    if not ids:
        raise BadFilter(condition.text, _("Nothing here is called “%(value)s”.") % {"value": value})
    return ids


def _tenant_ids(value: str, scope: Scope) -> list[uuid.UUID]:
    match = Q(name__iexact=value) | Q(display_name__iexact=value) | _id(value)
    return list(Tenant.objects.filter(_in_scope(scope, "id")).filter(match).values_list("id", flat=True))


def _key_ids(value: str, scope: Scope) -> list[uuid.UUID]:
    match = Q(name__iexact=value) | _id(value)
    if len(value) >= 4:
        match |= Q(display__endswith=value)
    return list(APIKey.objects.filter(_in_scope(scope, "tenant_id")).filter(match).values_list("id", flat=True))


def _replica_ids(value: str, scope: Scope) -> list[uuid.UUID]:
    name, _space, ordinal = value.rpartition(" r")
    match = _id(value)
    if name and ordinal.isdecimal() and len(ordinal) < 6:
        match |= Q(deployment__name__iexact=name, ordinal=int(ordinal))
    elif value[:1] == "r" and value[1:].isdecimal() and len(value) < 7:
        match |= Q(ordinal=int(value[1:]))
    else:
        match |= Q(deployment__name__iexact=value)
    return list(Replica.objects.filter(match).values_list("id", flat=True))


def _id(value: str) -> Q:
    try:
        return Q(id=uuid.UUID(value))
    except ValueError:
        return Q(pk__in=[])


def _in_scope(scope: Scope, column: str) -> Q:
    return Q() if scope.tenant_ids is None else Q(**{f"{column}__in": scope.tenant_ids})
