"""Engine adapters: `adapter("vllm")` is all that Fanlight knows of vLLM, and so on."""

from __future__ import annotations

from engine.adapters.base import Adapter, AdapterError
from engine.adapters.embedded import EMBEDDED
from engine.adapters.sglang import SGLANG
from engine.adapters.trtllm import TRTLLM
from engine.adapters.vllm import VLLM

ADAPTERS: dict[str, Adapter] = {each.engine: each for each in (EMBEDDED, VLLM, SGLANG, TRTLLM)}
"""By the engine's word in deployments. External endpoints have none: nothing is started."""


def adapter(engine: str) -> Adapter:
    """The adapter of an engine. Raises AdapterError for one that is not known."""
    found = ADAPTERS.get(engine)
    if found is None:
        raise AdapterError(f"There is no engine called {engine}; there are {', '.join(ADAPTERS)}.")
    return found
