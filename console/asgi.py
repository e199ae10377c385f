"""What `manage.py web` serves: the gateway's plain ASGI beside Django's pages and the console's sockets.

/v1 never enters Django or a Channels consumer: both would put a shared thread and a database in its way.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

import django
from django.conf import settings
from django.core.asgi import get_asgi_application

django.setup()  # what follows needs its models

from console import otlp

otlp.instrument(settings.ENV["OTLP_ENDPOINT"])  # before the application below reads its list of middleware
pages: Callable[[Any, Any, Any], Awaitable[None]] = get_asgi_application()

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator

from console import contract
from console.routing import websocket_urlpatterns
from serving.port import Receive, Scope, Send

_GATEWAY_PATHS = ("/v1/", "/metrics", "/healthz", "/readyz")

serving = contract.serve("web")


async def http(scope: Scope, receive: Receive, send: Send) -> None:
    """/v1, /metrics and the health checks go to the gateway, everything else is a page."""
    path: str = scope["path"]
    if path == "/v1" or path.startswith(_GATEWAY_PATHS):
        await serving.gateway.http(scope, receive, send)
    else:
        await pages(scope, receive, send)


async def lifespan(_scope: Scope, receive: Receive, send: Send) -> None:
    """The gateway's; pages need none."""
    await contract.lifespan(serving, receive, send)


application = ProtocolTypeRouter(
    {
        "http": http,
        "lifespan": lifespan,
        "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))),
    }
)
