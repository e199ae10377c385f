"""A price as JSON tells it, for commands and the API."""

from __future__ import annotations

from typing import Any

from console.base.fields import told
from console.pricing.queries import Version

_FIELDS = ("model", "currency", "version", "input", "cached_input", "output", "effective_at")


def price_facts(version: Version) -> dict[str, Any]:
    """Amounts as text, per million tokens; `state` is "in force", "planned" or "past"."""
    return {name: told(getattr(version.price, name)) for name in _FIELDS} | {"state": version.state}
