"""One real vLLM for all tests here. Where its runtime is not installed they are skipped, and `make test` says so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.catalog.convert import convert
from tests.serving.conftest import root as root
from tests.vllm.server import ROOT, RUNTIME, Server

FOLDER = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct-hf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here carries the marker, and has longer than the ordinary test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(500))


@pytest.fixture(scope="session")
def converted_model(bundled_model: Path) -> Path:
    """The bundled model as safetensors, made once by our own conversion."""
    if not (RUNTIME / ".complete").exists():
        pytest.skip("vLLM is not installed: bench/rivals.sh vllm")
    if not (FOLDER / ".complete").exists():
        convert(bundled_model, FOLDER, lambda _percent: None)
        (FOLDER / ".complete").touch()
    return FOLDER


@pytest.fixture(scope="session")
def vllm(converted_model: Path) -> Iterator[Server]:
    """The server that every test may use, and that only the last one may end."""
    with tempfile.TemporaryDirectory(prefix="fl-v-") as folder:
        server = Server(converted_model, Path(folder), "smol")
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()
