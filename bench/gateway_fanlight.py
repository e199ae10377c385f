"""Fanlight as bench/gateway.py measures it: an installation of its own, with everything on."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gateway_peers import MODELS, Upstreams, wait_for
from bench.gateway_processes import GATEWAY_CORE, LOAD_CORE, Started, pin, tree
from bench.stack import ROOT, Stack, eventually, free_port


class Fanlight:
    """An installation of its own with everything on: key and tenant with every kind of limit, prices, metering, records,
    metrics. Its gateway is on one core, its Valkey, shipper, PostgreSQL and all else on the other."""

    name = "Fanlight"
    LIMITS = ("--rpm=100000000", "--tpm=2000000000", "--concurrency=100000", "--budget=month=1000000")

    def __init__(self, upstreams: Upstreams) -> None:
        self._port = free_port()
        self.stack = Stack(EGRESS_ALLOW="127.0.0.1", GATEWAYS="1", GATEWAY_PORT=str(self._port))
        try:
            self._set_up(upstreams)
        except BaseException:
            self.stack.close()
            raise

    def _set_up(self, upstreams: Upstreams) -> None:
        stack = self.stack
        stack.up()
        for model in MODELS:
            url = f"http://127.0.0.1:{upstreams.port(model)}"
            stack.manage("endpoint", "add", model, "--url", url, "--model", model, "--slots", "0", "--route", model)
            stack.manage("price", "set", model, "--input", "0.5", "--output", "1.5")
        stack.manage("limits", "set", "--tenant", "default", *self.LIMITS)
        made = json.loads(stack.manage("key", "create", "--tenant", "default", *self.LIMITS, "--json"))
        self.key = str(made["key"])
        for model in MODELS:
            eventually(lambda model=model: answers(self._port, model, self.key), 60, OSError, pause_s=0.5)
        self.settle()

    def port(self, _model: str) -> int:
        return self._port

    @contextlib.contextmanager
    def two_processes(self, folder: Path) -> Iterator[tuple[int, list[int]]]:
        """Two more gateway processes on one socket and one core, beside the one: (port, their pids)."""
        port = free_port()
        command = [sys.executable, str(ROOT / "manage.py"), "gateway", "--workers", "2", "--port", str(port)]
        started = Started("gateway --workers 2", command, GATEWAY_CORE, folder / "gateway-two.log", self.stack.env)
        try:
            wait_for(f"http://127.0.0.1:{port}/readyz", started)
            yield port, started.pids()
        finally:
            started.stop()

    def settle(self) -> None:
        """Pin what runs now: a process that was started since is on all cores."""
        groups = self.groups("")
        for name, pids in groups.items():
            pin(pids, GATEWAY_CORE if name == "gateway" else LOAD_CORE)

    def groups(self, _model: str) -> dict[str, list[int]]:
        status = self.stack.status()
        named = {str(each["name"]): int(each["pid"]) for each in status["processes"] if each["pid"]}
        groups = {"gateway": tree(named.pop("gateway"))}
        known = set(groups["gateway"])
        for name, root in sorted(named.items(), key=lambda each: each[0] == "supervisor"):  # it is above the others
            groups[name] = [pid for pid in tree(root) if pid not in known]
            known |= set(groups[name])
        groups["other"] = [pid for pid in self.stack.processes() if pid not in known]
        return groups

    def configuration(self) -> dict[str, Any]:
        return {
            "processes": sorted(self.groups("")),
            "limits of key and tenant": list(self.LIMITS),
            "settings": {name: value for name, value in self.stack.env.items() if name.startswith("FANLIGHT_")},
            "price": "input 0.5, output 1.5 USD per million tokens",
        }

    def pause(self) -> None:
        """Its leases would run out: it idles instead."""

    def resume(self) -> None:
        """It was never paused."""

    def stop(self) -> None:
        self.stack.close()


def answers(port: int, model: str, key: str) -> bool:
    """Whether one small request is answered, streamed as the model's upstream does."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    body |= {"stream": True} if model != "whole" else {}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.status == 200
