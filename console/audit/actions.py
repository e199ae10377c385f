"""Write audit entries. Every action calls `record` in the transaction of its own change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import Model

from console.audit.models import AuditEntry
from console.base.fields import told
from console.base.models import User


@dataclass(frozen=True)
class Actor:
    """Who acts: a signed-in person, or Fanlight itself (user None) under a name such as "command line"."""

    user: User | None = None
    name: str = "fanlight"
    address: str | None = None

    @property
    def label(self) -> str:
        return self.user.get_username() if self.user else self.name

    @property
    def is_admin(self) -> bool:
        return self.user is None or (self.user.is_active and self.user.is_staff)


SYSTEM = Actor()
COMMAND_LINE = Actor(name="command line")


def record(actor: Actor, action: str, target: Model, tenant_id: UUID | None = None, **details: Any) -> AuditEntry:
    """Add one entry. `details` must hold no secret: keys go in as their display form."""
    return AuditEntry.objects.create(
        actor=actor.user,
        actor_label=actor.label,
        action=action,
        target_type=target._meta.label_lower.partition(".")[2],
        target_id=str(target.pk),
        target_label=str(target)[:200],
        tenant_id=tenant_id,
        details=details,
        address=actor.address,
    )


def change(row: Model, values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Write the columns that differ, and return {name: [old, new]} of them for the audit log."""
    differing = {name: [getattr(row, name), value] for name, value in values.items() if getattr(row, name) != value}
    for name, (_old, new) in differing.items():
        setattr(row, name, new)
    if differing:
        row.save(update_fields=list(differing))
    return {name: list(map(told, pair)) for name, pair in differing.items()}
