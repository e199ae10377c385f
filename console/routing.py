"""The console's WebSockets. Each checks its Origin itself, whatever it is mounted in."""

from __future__ import annotations

from django.urls import path

from console.base.sockets import SameOrigin
from console.dashboards.consumers import OverviewConsumer
from console.playground.consumers import PlaygroundConsumer

websocket_urlpatterns = [
    path("ws/overview/", SameOrigin(OverviewConsumer.as_asgi())),  # type: ignore[arg-type]
    path("ws/playground/", SameOrigin(PlaygroundConsumer.as_asgi())),  # type: ignore[arg-type]
]
