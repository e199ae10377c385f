"""What the engine's suites share: the loaded bundled model, once per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from engine.model.loader import LoadedModel, load_model
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.served import Served, serve


@pytest.fixture(scope="session")
def loaded(bundled_model: Path) -> LoadedModel:
    """The bundled model in float32."""
    return load_model(bundled_model, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer(loaded: LoadedModel) -> Tokenizer:
    """The bundled model's tokenizer."""
    return load_tokenizer(loaded.metadata, loaded.path)


@pytest.fixture(scope="session")
def served(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real engine process with the bundled model, shared by tests that leave it idle."""
    with serve(bundled_model, tmp_path_factory.mktemp("engine")) as engine:
        yield engine
