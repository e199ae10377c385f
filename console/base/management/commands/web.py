"""`manage.py web`: the console and, in the same process, the gateway."""

from __future__ import annotations

from typing import Any

import uvicorn
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from console import contract
from console.base import logs, tuning
from console.bounded_http import BoundedHttp
from console.webserver import DrainingServer

PAGES_DRAIN_S = 3  # for pages; requests on /v1 have been drained before, for FANLIGHT_DRAIN_SECONDS
SOCKET_EXTRA_BYTES = 64 * 1024  # what stands around the body in a message of the playground


class Command(BaseCommand):
    help = "Serve the console and /v1 (ASGI). Needs the database and Valkey; `up` starts all of it."
    requires_system_checks: list[str] = []

    def handle(self, *_args: Any, **_options: Any) -> None:
        env = settings.ENV
        logs.configure(env["LOG_LEVEL"])
        config = uvicorn.Config(
            "console.asgi:application",
            host=env["BIND"],
            port=env["PORT"],
            loop="uvloop",
            http=BoundedHttp,
            ws="websockets-sansio",
            ws_max_size=env["MAX_BODY_BYTES"] + SOCKET_EXTRA_BYTES,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(env["TRUSTED_PROXIES"]),
            forwarded_allow_ips=list(env["TRUSTED_PROXIES"]),
            timeout_graceful_shutdown=PAGES_DRAIN_S,
            backlog=2048,
        )
        server = DrainingServer(config, contract.drain)
        config.load()
        tuning.for_serving()
        server.run()
        if not server.started:
            raise CommandError("The web process could not start; its lines above say why.")
