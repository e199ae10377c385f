"""docs/engine.md against the engine: what it names is there, and what is there it names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine.__main__ import parser
from engine.config import FAULT_PHASES, EngineConfig
from engine.constraints import MAX_CHOICES, MAX_DEPTH, MAX_ENUM_VALUES, MAX_PROPERTIES, MAX_SOURCE_BYTES
from engine.guided import BASE_BYTES, BYTES_PER_SOURCE_BYTE, MASK_SECONDS_PER_TOKEN, CompilerLimits
from engine.server.form import FIELDS, STRUCTURED
from engine.server.schema import CHAT, TEXT
from engine.server.sockets import ServerConfig
from engine.tools.tool import MAX_CALLS, MAX_TOOLS, MAX_TOOLS_BYTES
from tests.engine.served import Served

ROOT = Path(__file__).parents[2]
TEXT_OF_DOCS = (ROOT / "docs" / "engine.md").read_text()
SOURCES = "\n".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))


def options() -> set[str]:
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name for action in commands.choices["serve"]._actions for name in action.option_strings}


def test_every_documented_option_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", TEXT_OF_DOCS)) - {"--json", "--help"}
    assert len(named) > 10
    assert named <= options()


def test_documented_defaults_are_the_real_ones() -> None:
    real = {**vars_of(EngineConfig), **vars_of(ServerConfig)}
    rows = re.findall(r"^\| `--([a-z-]+) [A-Z]+` \| (\d+) \|", TEXT_OF_DOCS, re.MULTILINE)
    assert {name for name, _default in rows} >= {
        "max-num-seqs",
        "max-num-batched-tokens",
        "max-queued",
        "drain-seconds",
    }
    assert {name: float(default) for name, default in rows} == {n: real[n.replace("-", "_")] for n, _ in rows}


def vars_of(config: type) -> dict[str, object]:
    return {name: field.default for name, field in config.__dataclass_fields__.items()}  # type: ignore[attr-defined]


def test_every_fault_phase_and_extra_field_is_documented() -> None:
    assert [phase for phase in FAULT_PHASES if f"`{phase}`" not in TEXT_OF_DOCS] == []
    extra = {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "cache_salt"}
    assert [name for name in extra | {"priority", "request_id", "deadline_ms"} if f"`{name}`" not in TEXT_OF_DOCS] == []
    assert extra <= CHAT.keys() & TEXT.keys()


def test_the_table_of_events_is_complete() -> None:
    told = set(re.findall(r"^\| ([A-Z_]+) \|", TEXT_OF_DOCS, re.MULTILINE))
    calls = r'(?:\.note\(|move_to\(\s*Status\.\w+,\s*)"([A-Z_]+)"(?: if first else "([A-Z_]+)")?'
    noted = {name for names in re.findall(calls, SOURCES) for name in names if name}
    assert len(told) == 13
    assert told == noted


def test_stats_and_metrics_are_documented(served: Served) -> None:
    found = re.search(r"^`/stats`: (.*?)\.$", TEXT_OF_DOCS, re.MULTILINE | re.DOTALL)
    assert found is not None
    told = re.sub(r"\(.*?\)|by reason", "", found[1])
    stats = httpx.get(f"{served.url}/stats").json()
    assert {name.strip() for name in told.split(",")} == stats.keys()
    families = text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text)
    names = {family.name.partition(":")[2].removesuffix("_created") for family in families}
    assert [name for name in names if not re.search(rf"\b{name}\b", TEXT_OF_DOCS)] == []


def test_the_limits_of_grammars_and_tools_are_documented() -> None:
    limits = CompilerLimits()
    told = (
        f"{MAX_SOURCE_BYTES:,} bytes, {MAX_DEPTH} levels of nesting, {MAX_PROPERTIES} properties",
        f"{MAX_ENUM_VALUES:,} enum values; {MAX_CHOICES:,} choices",
        f"{limits.tenant_pending} grammars being compiled, {limits.tenant_bytes >> 20} MiB",
        f"{limits.total_bytes >> 20} MiB for all",
        f"compiled within {limits.compile_seconds:g} s",
        f"{BASE_BYTES >> 10} KiB + {BYTES_PER_SOURCE_BYTE} × source",
        f"{MASK_SECONDS_PER_TOKEN * 1000:g} ms of CPU",
        f"{MAX_TOOLS} functions, {MAX_TOOLS_BYTES:,} bytes",
        f"At most {MAX_CALLS} calls",
    )
    text = " ".join(TEXT_OF_DOCS.split())
    assert [words for words in told if words not in text] == []
    assert [name for name in (*FIELDS, *STRUCTURED) if f"`{name}`" not in TEXT_OF_DOCS] == []
