"""Which engine to take, with the reason. Pure: the rules of the requirements, over what a deployment is for."""

from __future__ import annotations

from dataclasses import dataclass

USES = {
    "chat": "General chat",
    "rag": "Retrieval with long prompts",
    "tools": "Function calling",
    "agents": "Agents, or many prompts that begin the same",
    "latency": "Strict latency on cards that are all alike",
    "learn": "To start, or to learn how it works",
}
"""What a deployment is for: word → as people say it."""


@dataclass(frozen=True)
class Recommendation:
    """An engine and why, in one sentence; `instead` says what else was thought of, and why not."""

    engine: str
    reason: str
    instead: str = ""


_BY_USE = {
    "chat": Recommendation("vllm", "vLLM is the production default for general chat."),
    "rag": Recommendation("vllm", "vLLM takes long prompts in chunks; tune max_num_batched_tokens and max_model_len."),
    "tools": Recommendation("vllm", "vLLM has a parser of tool calls for most families of models; name it."),
    "agents": Recommendation("sglang", "SGLang keeps prefixes in a radix tree: agents and shared prompts gain."),
    "latency": Recommendation(
        "trtllm", "TensorRT-LLM is fastest on uniform cards; it compiles long at its start and is rigid after that."
    ),
    "learn": Recommendation("embedded", "The embedded engine starts in seconds and shows everything that it does."),
}


def recommend(
    use: str = "chat", *, gpus: int = 1, uniform: bool = True, format: str = "safetensors", tried_only: bool = False
) -> Recommendation:
    """The engine for a use (of USES).

    Args:
        gpus: cards that it may run on; 0: the CPU only.
        uniform: whether the cards are all alike.
        format: of the weights, "gguf" or "safetensors".
        tried_only: leave out engines that were not yet run here.
    """
    wanted = _BY_USE.get(use, _BY_USE["chat"])
    if format == "gguf":
        return _embedded("It reads GGUF; for another engine convert the model to safetensors first.", wanted)
    if gpus == 0 and wanted.engine != "embedded":
        return _embedded("On a CPU the embedded engine is the fastest measured here; vLLM runs there too.", wanted)
    if wanted.engine == "trtllm" and not uniform:
        return Recommendation(
            "vllm", "Its cards are not all alike, and TensorRT-LLM compiles for one kind.", wanted.reason
        )
    if wanted.engine in {"sglang", "trtllm"} and tried_only:
        return Recommendation("vllm", "vLLM was run here; what would fit better was not yet.", wanted.reason)
    return wanted


def _embedded(reason: str, wanted: Recommendation) -> Recommendation:
    return Recommendation("embedded", reason, "" if wanted.engine == "embedded" else wanted.reason)
