"""What a process of `manage.py gateway` serves: /v1, /metrics and the health checks; no page, no socket, no ORM."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

import django

django.setup()  # settings and the snapshot's connection are the console's

from console import contract
from serving.port import Receive, Scope, Send

serving = contract.serve("gateway")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """The gateway, started before the first request and stopped after the last."""
    if scope["type"] == "http":
        await serving.gateway.http(scope, receive, send)
    elif scope["type"] == "lifespan":
        await contract.lifespan(serving, receive, send)
