"""The one table of settings: every FANLIGHT_* variable, its type, default and meaning.

`load()` reads the environment once and raises `BadSettings` naming everything wrong at once: an unknown FANLIGHT_*
variable is a typing error waiting to cost an evening, so it stops the start. docs/settings.md is generated from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.base.egress import parse_allow
from engine.devices import check as check_devices

PREFIX = "FANLIGHT_"
ROOT = Path(__file__).resolve().parent.parent


class BadSettings(Exception):
    """One or more FANLIGHT_* variables cannot be used; the message lists each with the reason."""


@dataclass(frozen=True)
class Setting:
    """One row of the table. `parse` turns the text into a value or raises ValueError with a reason."""

    name: str
    kind: str
    default: str
    help: str
    parse: Callable[[str], Any]
    secret: bool = False

    @property
    def variable(self) -> str:
        return PREFIX + self.name


def _int(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}")
        return value

    return parse


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("must be between 0 and 1")
    return value


def _choice(*options: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in options:
            raise ValueError("must be one of " + ", ".join(options))
        return text

    return parse


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _path(text: str) -> Path:
    return (Path.cwd() / Path(text).expanduser()).resolve()


def _mirror(text: str) -> str:
    if text and not text.startswith(("https://", "http://")):
        raise ValueError("must start with https://")
    return text.rstrip("/")


def _delays(text: str) -> dict[str, float]:
    """`phase=milliseconds` pairs to seconds."""
    delays = {}
    for part in _list(text):
        phase, equals, ms = part.partition("=")
        if not equals:
            raise ValueError("must look like prefill=50,auth=20 (milliseconds)")
        delays[phase] = float(ms) / 1000
    return delays


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "DATA_DIR",
        "path",
        str(ROOT / ".fanlight"),
        "Everything Fanlight keeps: database, journal, models, logs, secrets.",
        _path,
    ),
    Setting(
        "BIND",
        "address",
        "127.0.0.1",
        "Address the web process listens on. Anything but loopback also needs FANLIGHT_HOSTS.",
        str,
    ),
    Setting("PORT", "1–65535", "8000", "Port of the console and of /v1.", _int(1, 65535)),
    Setting(
        "GATEWAY_PORT",
        "1–65535",
        "8001",
        "Port of `manage.py gateway`: /v1 in processes of its own.",
        _int(1, 65535),
    ),
    Setting(
        "GATEWAYS",
        "0–64",
        "0",
        "Gateway processes that `up` starts beside the web process, on FANLIGHT_GATEWAY_PORT.",
        _int(0, 64),
    ),
    Setting(
        "HOSTS",
        "list",
        "localhost,127.0.0.1,[::1]",
        "Host names under which the console may be reached.",
        _list,
    ),
    Setting(
        "PUBLIC_URL",
        "URL",
        "",
        "Address shown to people when a proxy stands in front; http://HOST:PORT if empty.",
        str,
    ),
    Setting(
        "TRUSTED_PROXIES",
        "list of addresses",
        "",
        "Proxies whose X-Forwarded-* headers are believed.",
        _list,
    ),
    Setting(
        "DATABASE_URL",
        "URL",
        "",
        "An external PostgreSQL. Empty: the embedded one is started.",
        str,
        secret=True,
    ),
    Setting(
        "VALKEY_URL",
        "URL",
        "",
        "An external Valkey or Redis. Empty: the embedded one is started.",
        str,
        secret=True,
    ),
    Setting(
        "METRICS_TOKEN",
        "text",
        "",
        "Bearer token for /metrics from outside loopback. Empty: refused there.",
        str,
        secret=True,
    ),
    Setting(
        "EGRESS_ALLOW",
        "list of hosts and networks",
        "",
        "Where external endpoints may be called by http, on loopback and in private ranges.",
        parse_allow,
    ),
    Setting(
        "THREADS",
        "0–1024",
        "0",
        "Compute threads of an embedded worker. 0: all cores of the machine.",
        _int(0, 1024),
    ),
    Setting(
        "DEVICES",
        "sources joined with +",
        "auto",
        "Where replicas may run: auto (the CPU, and NVIDIA cards where a driver answers), cpu, nvml, or simulated "
        "cards such as sim:8xA100-80G,4xL40S-48G, a node for each group, whose workers run on the CPU.",
        check_devices,
    ),
    Setting(
        "PLACEMENT_BUFFER",
        "need or card",
        "need",
        "What the buffer of 20 % (40 % where models mix) is of: the replica's peak need, or the card that stays free.",
        _choice("need", "card"),
    ),
    Setting(
        "SNAPSHOT_MAX_AGE",
        "seconds",
        "900",
        "How long gateways go on without the database before they answer 503.",
        _int(1, 86400),
    ),
    Setting(
        "DRAIN_SECONDS",
        "seconds",
        "30",
        "How long running streams may finish when stopping.",
        _int(0, 3600),
    ),
    Setting("MAX_BODY_BYTES", "bytes", "4194304", "Largest request body on /v1.", _int(1024, 1 << 30)),
    Setting(
        "MIN_FREE_DISK_BYTES",
        "bytes",
        "1000000000",
        "Below this much free disk new work is refused.",
        _int(0, 1 << 50),
    ),
    Setting(
        "LOG_LEVEL",
        "level",
        "INFO",
        "DEBUG, INFO, WARNING or ERROR.",
        _choice("DEBUG", "INFO", "WARNING", "ERROR"),
    ),
    Setting(
        "LOG_TOTAL_BYTES",
        "bytes",
        "209715200",
        "Bound on all log files together.",
        _int(1 << 20, 1 << 40),
    ),
    Setting("DETAIL_DAYS", "days", "7", "How long request details are kept.", _int(1, 365)),
    Setting(
        "RECORD_DAYS",
        "days",
        "30",
        "How long request records are kept. The ledger is kept for ever.",
        _int(1, 3650),
    ),
    Setting(
        "OTLP_ENDPOINT",
        "URL",
        "",
        "Where traces of requests and of console pages go by OTLP over HTTP. Empty: nowhere.",
        str,
    ),
    Setting(
        "OTLP_SHARE",
        "0–1",
        "0.1",
        "Share of requests exported that came without a sampling decision of their caller; failures always are.",
        _share,
    ),
    Setting(
        "MODEL_ROOTS",
        "list of folders",
        "",
        "Folders that file: models may be taken from. Empty: none.",
        lambda text: tuple(map(_path, _list(text))),
    ),
    Setting(
        "HF_CACHE",
        "path",
        "~/.cache/huggingface/hub",
        "The hub cache that hf: models are taken from where they are there.",
        _path,
    ),
    Setting(
        "HF_MIRROR",
        "URL",
        "",
        "Where hf: models are fetched from, past the egress check. Empty: nowhere.",
        _mirror,
    ),
    Setting(
        "TORCH",
        "auto, cpu or cuda",
        "auto",
        "Which build of torch `make up` installs; auto looks for an NVIDIA card.",
        _choice("auto", "cpu", "cuda"),
    ),
    Setting(
        "FAULT_DELAYS",
        "phase=ms list",
        "",
        "Testing only: sleeps in the named phase of every request.",
        _delays,
    ),
)


def load(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return {name: value} for every setting, or raise BadSettings with all that is wrong."""
    known = {setting.variable for setting in SETTINGS}
    problems = [
        f"{name} is not a setting; see docs/settings.md"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known and not name.startswith(PREFIX + "TEST_")
    ]
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable, "") or setting.default
        try:
            values[setting.name] = setting.parse(text)
        except ValueError as error:
            shown = "(hidden)" if setting.secret else repr(text)
            problems.append(f"{setting.variable}={shown}: {error}")
    if problems:
        raise BadSettings("\n".join(problems))
    return values
