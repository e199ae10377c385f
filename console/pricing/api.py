"""The price book over JSON, for platform admins."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from console.base.api import Reply, body_of
from console.base.views import actor_of
from console.errors import Refused
from console.pricing.actions import set_price
from console.pricing.facts import price_facts
from console.pricing.queries import history


def prices(request: HttpRequest) -> Reply:
    """Every version, the newest of each model and currency first; ?model= keeps one model's."""
    if not request.user.is_staff:
        raise PermissionDenied
    model = request.GET.get("model", "")
    if not model.isprintable():
        raise Refused("model holds characters that no name has.", "model")
    return {"data": [price_facts(version) for version in history([model] if model else None)]}


def create(request: HttpRequest) -> Reply:
    """The next version of a price."""
    price = set_price(actor_of(request), body_of(request))
    return next(price_facts(version) for version in history([price.model]) if version.price == price)
