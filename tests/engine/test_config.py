"""Settings are checked once, before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main, parse_faults
from engine.config import EngineConfig, usable_cores
from engine.errors import ConfigError
from engine.server.sockets import ServerConfig, open_listener

MODEL = Path("m.gguf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "decodes would starve"),
        ({"faults": {"lunch": 5.0}}, "Unknown fault phase 'lunch'"),
        ({"num_blocks": 10, "max_model_len": 8192}, "hold fewer tokens"),
        ({"max_queued_tokens": 0}, "max_queued_tokens must be at least 1"),
        ({"num_host_blocks": -1}, "num_host_blocks must be at least 0"),
        ({"num_host_blocks": 5, "prefix_cache": False}, "needs the prefix cache"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(MODEL, **settings)


def test_the_default_pool_holds_32_sequences_of_2048_tokens() -> None:
    config = EngineConfig(MODEL)
    assert config.resolved_blocks(8192) * config.block_size >= 32 * 2048
    assert config.resolved_window(8192) == 8192
    assert config.resolved_blocks(131072) * config.block_size >= 131072


def test_a_small_pool_shortens_the_window_and_a_larger_window_is_refused() -> None:
    assert EngineConfig(MODEL, num_blocks=8).resolved_window(8192) == 128
    with pytest.raises(ConfigError, match="exceeds the model's window"):
        EngineConfig(MODEL, max_model_len=9000).resolved_window(8192)


def test_the_host_cache_is_for_cards_unless_asked_for() -> None:
    config = EngineConfig(MODEL)
    assert config.resolved_host_blocks(4096, 1 << 20, "cpu") == 0
    assert config.resolved_host_blocks(1000, 1 << 20, "cuda") == 1000
    assert config.resolved_host_blocks(9000, 1 << 20, "cuda") == 4096
    assert EngineConfig(MODEL, prefix_cache=False).resolved_host_blocks(4096, 1 << 20, "cuda") == 0
    assert EngineConfig(MODEL, num_host_blocks=7).resolved_host_blocks(4096, 1 << 20, "cpu") == 7


def test_the_name_defaults_to_the_files() -> None:
    assert EngineConfig(Path("/x/Smol.Q4.gguf")).name == "Smol.Q4"
    assert EngineConfig(MODEL, served_model_name="smol").revision == "smol"


def test_faults_are_parsed_or_refused() -> None:
    assert parse_faults(["prefill=50", "hang=1.5"]) == {"prefill": 50.0, "hang": 1.5}
    with pytest.raises(ConfigError, match="not PHASE=MS"):
        parse_faults(["prefill"])


def test_the_command_line_reports_an_error_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--model", "nowhere.gguf", "--block-size", "0"]) == 2
    assert capsys.readouterr().err == "engine: block_size must be at least 1, not 0.\n"


def test_a_missing_or_empty_key_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig(api_key_file=tmp_path / "none").api_key()
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        ServerConfig(api_key_file=tmp_path / "key").api_key()


def test_a_stale_socket_is_replaced_and_a_live_one_respected(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = open_listener(ServerConfig(uds=path))
    assert path.stat().st_mode & 0o777 == 0o600
    first.listen()
    with pytest.raises(ConfigError, match="Another process listens"):
        open_listener(ServerConfig(uds=path))
    first.close()
    open_listener(ServerConfig(uds=path)).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        open_listener(ServerConfig(uds=path))


def test_a_taken_port_stops_the_start() -> None:
    first = open_listener(ServerConfig(port=0))
    first.listen()
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match="Cannot bind"):
        open_listener(ServerConfig(port=port))
    first.close()


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000\n", None), ("50000 100000\n", 1), ("100000 100000\n", 1), ("junk", None)]
)
def test_threads_fit_the_cores_and_the_quota(tmp_path: Path, content: str, cores: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    assert usable_cores(quota) == (cores or len(os.sched_getaffinity(0)))
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))
