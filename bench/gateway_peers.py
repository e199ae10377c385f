"""Whom bench/gateway.py compares Fanlight with: the upstreams alone, LiteLLM's proxy, vllm-router."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any, Protocol

from bench.gateway_native import built
from bench.gateway_processes import GATEWAY_CORE, LOAD_CORE, Started
from bench.stack import ROOT, free_port

PEERS = ROOT / ".cache" / "runtimes" / "gateway-peers-1.106.12-0.1.17" / "bin"
MODELS = ("whole", "paced", "instant")  # by the upstream that they lead to
ANSWER = {
    "id": "chatcmpl-bench", "object": "chat.completion", "created": 1700000000, "model": "bench",
    "choices": [{
        "index": 0, "finish_reason": "stop",
        "message": {"role": "assistant", "content": "The tide leaves light upon the sand, and takes it back at dawn."},
    }],
    "usage": {"prompt_tokens": 20, "completion_tokens": 16, "total_tokens": 36},
}  # fmt: skip
INSTANT_TOKENS = 64
INTERVAL_US = 33_333
LITELLM_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOG": "ERROR",
}


class Contender(Protocol):
    """Something that answers /v1/chat/completions."""

    name: str
    key: str

    def port(self, model: str) -> int: ...

    def groups(self, model: str) -> dict[str, list[int]]:
        """Its processes by what they do; the first group is the gateway's own."""

    def configuration(self) -> dict[str, Any]: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop(self) -> None: ...


class Upstreams:
    """nginx with one fixed answer, and two sources of streams. As a contender: no gateway between."""

    name, key = "direct", "none"

    def __init__(self, folder: Path, paced_tokens: int) -> None:
        self._ports = {model: free_port() for model in MODELS}
        self.paced_tokens = paced_tokens
        self._nginx_conf = folder / "nginx.conf"
        self._nginx_conf.write_text(_nginx(self._ports["whole"], folder))
        nginx = shutil.which("nginx") or "/usr/sbin/nginx"
        source = str(built("source"))
        commands = {
            "whole": [nginx, "-e", "stderr", "-c", str(self._nginx_conf)],
            "paced": [source, str(self._ports["paced"]), str(paced_tokens), str(INTERVAL_US)],
            "instant": [source, str(self._ports["instant"]), str(INSTANT_TOKENS), "0"],
        }
        self._started = {
            model: Started(f"upstream {model}", command, LOAD_CORE, folder / f"upstream-{model}.log")
            for model, command in commands.items()
        }
        for model, started in self._started.items():
            wait_for(f"http://127.0.0.1:{self._ports[model]}/health", started)

    def port(self, model: str) -> int:
        return self._ports[model]

    def groups(self, model: str) -> dict[str, list[int]]:
        return {"upstream": self._started[model].pids()}

    def configuration(self) -> dict[str, Any]:
        return {"nginx.conf": self._nginx_conf.read_text(), "answer": ANSWER, "interval_us": INTERVAL_US}

    def pause(self) -> None:
        """The others need it."""

    def resume(self) -> None:
        """It was never paused."""

    def stop(self) -> None:
        for started in self._started.values():
            started.stop()


def _nginx(port: int, folder: Path) -> str:
    body = json.dumps(ANSWER).replace("'", "\\'")
    return f"""
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000000; tcp_nodelay on; default_type application/json;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location /v1/chat/completions {{ return 200 '{body}'; }}
    location / {{ return 200 '{{"object":"list","data":[]}}'; }}
  }}
}}
"""


class LiteLLM:
    """Its proxy with one worker, no database, no keys."""

    name, key = "LiteLLM", "sk-any"

    def __init__(self, folder: Path, upstreams: Upstreams) -> None:
        self._port = free_port()
        self._models = {
            "model_list": [
                {
                    "model_name": model,
                    "litellm_params": {
                        "model": f"openai/{model}",
                        "api_base": f"http://127.0.0.1:{upstreams.port(model)}/v1",
                        "api_key": "none",
                    },
                }
                for model in MODELS
            ]
        }
        config = folder / "litellm.yaml"
        config.write_text(json.dumps(self._models))  # JSON is YAML
        command = [str(PEERS / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(self._port)]
        self._command = [*command, "--num_workers", "1"]
        self._started = Started(self.name, self._command, GATEWAY_CORE, folder / "litellm.log", LITELLM_ENV)
        wait_for(f"http://127.0.0.1:{self._port}/health/liveliness", self._started, 180)

    def port(self, _model: str) -> int:
        return self._port

    def groups(self, _model: str) -> dict[str, list[int]]:
        return {"gateway": self._started.pids()}

    def configuration(self) -> dict[str, Any]:
        return {"command": " ".join(self._command), "env": LITELLM_ENV, "config": self._models}

    def pause(self) -> None:
        self._started.pause()

    def resume(self) -> None:
        self._started.resume()

    def stop(self) -> None:
        self._started.stop()


class Router:
    """vllm-router, one process for each upstream since it knows no model names."""

    name, key = "vllm-router", "none"

    def __init__(self, folder: Path, upstreams: Upstreams) -> None:
        self._ports = {model: free_port() for model in MODELS}
        self._commands, self._started = {}, {}
        for model, port in self._ports.items():
            command = [
                str(PEERS / "vllm-router"),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--policy",
                "round_robin",
            ]
            command += ["--worker-urls", f"http://127.0.0.1:{upstreams.port(model)}", "--log-level", "error"]
            command += ["--prometheus-port", str(free_port())]
            self._commands[model] = command
            self._started[model] = Started(self.name, command, GATEWAY_CORE, folder / f"router-{model}.log")
        for model, port in self._ports.items():
            wait_for(f"http://127.0.0.1:{port}/health", self._started[model])

    def port(self, model: str) -> int:
        return self._ports[model]

    def groups(self, model: str) -> dict[str, list[int]]:
        return {"gateway": self._started[model].pids()}

    def configuration(self) -> dict[str, Any]:
        return {"command": " ".join(self._commands["whole"])}

    def pause(self) -> None:
        for each in self._started.values():
            each.pause()

    def resume(self) -> None:
        for each in self._started.values():
            each.resume()

    def stop(self) -> None:
        for each in self._started.values():
            each.stop()


def wait_for(url: str, started: Started, timeout_s: float = 60) -> None:
    """Until it answers; RuntimeError with its log if it ends before, TimeoutError with the end of it if it never does."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        started.check_alive()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{started.name} does not answer at {url}: {started.log.read_text()[-2000:]}")
        time.sleep(0.1)
