"""`manage.py gateway`: /v1 in processes of its own, as many as wanted, beside or without `manage.py web`."""

from __future__ import annotations

import argparse
import socket
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from console.base import logs, tuning

MAX_WORKERS = 64


class Command(BaseCommand):
    help = "Serve /v1 and /metrics in processes of their own. They share limits, queues and slots through Valkey."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--workers", type=int, default=1, help="processes on the one socket (default 1)")
        parser.add_argument("--bind", help="address to listen on (default FANLIGHT_BIND)")
        parser.add_argument("--port", type=int, help="port to listen on (default FANLIGHT_GATEWAY_PORT)")
        parser.add_argument("--inherited", type=int, help=argparse.SUPPRESS)  # the socket's descriptor, for a worker

    def handle(self, *_args: Any, **options: Any) -> None:
        logs.configure(settings.ENV["LOG_LEVEL"])
        if options["inherited"] is not None:
            _serve(options["inherited"])
            return
        if not 1 <= options["workers"] <= MAX_WORKERS:
            raise CommandError(f"--workers must be between 1 and {MAX_WORKERS}.")
        from console.gateways import GatewayProcesses

        bind, port = options["bind"] or settings.ENV["BIND"], options["port"] or settings.ENV["GATEWAY_PORT"]
        try:
            parent = GatewayProcesses(bind, port, options["workers"])
        except OSError as error:
            raise CommandError(f"Cannot listen on {bind}:{port}: {error.strerror}.") from error
        parent.run()


def _serve(descriptor: int) -> None:
    """One worker, on the socket of its parent."""
    import uvicorn

    from console import contract
    from console.bounded_http import BoundedHttp
    from console.webserver import DrainingServer

    env = settings.ENV
    config = uvicorn.Config(
        "console.gateway_asgi:application",
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(env["TRUSTED_PROXIES"]),
        forwarded_allow_ips=list(env["TRUSTED_PROXIES"]),
        timeout_graceful_shutdown=1,
    )
    server = DrainingServer(config, contract.drain, shares_socket=True)
    config.load()
    tuning.for_serving()
    server.run(sockets=[socket.socket(fileno=descriptor)])
    if not server.started:
        raise CommandError("The gateway could not start; its lines above say why.")
