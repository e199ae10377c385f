"""What a deployment's replica needs, from its model's facts and its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from console.catalog.models import Model, Runtime
from console.errors import Refused
from console.placement.ledger import LEND_UNTIL, Need
from console.placement.models import Device
from engine import footprint
from engine.footprint import Footprint, Shape

_FACTS = ("parameters", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")
_SHARE_OF_CARD = frozenset(("vllm", "sglang", "trtllm"))  # take a share of a card at start


@dataclass(frozen=True, slots=True)
class Sizing:
    """What an estimate rests on, as the plan's page shows it."""

    shape: Shape
    kind: str  # of device
    concurrency: int
    tokens: int
    block_size: int
    kv_dtype_bytes: float
    kv_bytes_per_token: int
    max_num_batched_tokens: int
    tensor_parallel: int
    peak: Footprint  # on each device
    window_kv: int  # bytes of KV of one sequence as long as there can be


def shape_of(model: Model) -> Shape:
    """The sizes of a model in the catalog. Raises Refused where its files have not told them."""
    missing = [name for name in _FACTS if not getattr(model, name)]
    if missing:
        raise Refused(f"The catalog does not know {', '.join(missing)} of {model.name}: register its files again.")
    return Shape(
        layers=model.layers or 0,
        hidden=model.hidden_size or 0,
        heads=model.heads or 0,
        kv_heads=model.kv_heads or 0,
        head_dim=model.head_dim or 0,
        intermediate=model.intermediate_size or 0,
        vocab=model.vocab_size or 0,
        parameters=model.parameters or 0,
        weights_bytes=model.weights_bytes or model.disk_bytes or 0,
        context=model.context_length or 0,
        by_type={str(kind): int(size) for kind, size in model.weights_by_type.items()},
    )


def kind_for(engine: str, runtime: Runtime | None = None) -> frozenset[str]:
    """Kinds of device that an engine in that runtime runs on."""
    if engine == "embedded":
        return frozenset(("cpu", "gpu"))
    on_cpu = runtime is not None and "-cpu" in runtime.requirement
    return frozenset(("cpu",) if on_cpu else ("gpu",))


def kind_here(engine: str, runtime: Runtime | None = None, binding: Sequence[str] = ()) -> str:
    """The kind of device that a replica would run on: of those it is bound to, else a card where there is one."""
    kinds = kind_for(engine, runtime)
    if len(kinds) == 1:
        return next(iter(kinds))
    bound = Device.objects.filter(uid__in=binding, simulated=False).values_list("kind", flat=True).first()
    if bound is not None:
        return str(bound)
    cards = Device.objects.filter(kind=Device.Kind.GPU, simulated=False, lost_at=None)
    return "gpu" if cards.exists() else "cpu"


def sizing(
    model: Model,
    config: Mapping[str, Any],
    *,
    engine: str,
    runtime: Runtime | None = None,
    kind: str = "",
    overhead: int | None = None,
) -> Sizing:
    """The peak need of one replica on each of its devices, with what it was reckoned from.

    Args:
        model: in the catalog, ready.
        config: of fleet.revisions.CONFIG; what it lacks has the engine's default.
        engine: "embedded", "vllm", …
        kind: of device; by default the one of `kind_here`.
        overhead: learnt bytes; None: the engine's default.
    """
    shape = shape_of(model)
    parameters = dict(config.get("parameters") or {})
    kind = kind or kind_here(engine, runtime, config.get("binding") or ())
    parallel = int(parameters.get("tensor_parallel") or config.get("tensor_parallel") or 1)
    context = min(int(parameters.get("max_model_len") or shape.context), shape.context or 1 << 30)
    concurrency = int(config.get("planned_concurrency") or parameters.get("max_num_seqs") or _default_seqs(engine))
    tokens = min(int(config.get("planned_tokens") or max(1, shape.context // 8)), context)
    block_size = int(parameters.get("block_size") or _default_block_size(engine, kind))
    batched = int(parameters.get("max_num_batched_tokens") or _default_batched(engine, kind))
    size = _kv_dtype_bytes(engine, parameters)
    quantisation = str(config.get("quantisation") or (parameters.get("dtype", "") if engine == "embedded" else ""))
    peak = footprint.estimate(
        shape, engine=engine, quantisation=quantisation, kv_dtype_bytes=size, block_size=block_size, kind=kind,
        concurrency=concurrency, tokens=tokens, max_num_batched_tokens=batched, overhead=overhead,
        tensor_parallel=parallel,
    )  # fmt: skip
    # The pool has to hold one whole sequence of the longest kind, however few are planned.
    longest = footprint.kv_bytes(shape, 1, context, block_size, size, parallel)
    peak = replace(peak, kv=max(peak.kv, longest))
    per_token = footprint.kv_bytes_per_token(shape, size, parallel)
    return Sizing(shape, kind, concurrency, tokens, block_size, size, per_token, batched, parallel, peak, longest)


def need_of(
    model: Model,
    config: Mapping[str, Any],
    *,
    engine: str,
    runtime: Runtime | None = None,
    deployment: str = "",
    kind: str = "",
    overhead: int | None = None,
    borrows: bool = False,
) -> Need:
    """What the planner is asked for one replica of a deployment. Arguments as `sizing`. Raises Refused."""
    found = sizing(model, config, engine=engine, runtime=runtime, kind=kind, overhead=overhead)
    parameters = dict(config.get("parameters") or {})
    return Need(
        model=model.name,
        engine=engine,
        peak=found.peak,
        deployment=deployment,
        priority_class=str(config.get("priority_class") or "normal"),
        spread=config.get("spread") == "spread",
        takes=_takes(found, engine, parameters),
        takes_share=_share_taken(found, engine, parameters),
        cards=found.tensor_parallel,
        kinds=frozenset((found.kind,)),
        binding=tuple(config.get("binding") or ()),
        threads=int(config.get("threads") or 0),
        lends=bool(config.get("lends")) and engine == "embedded",
        floor=_floor(found),
        borrows=borrows,
    )


def _floor(found: Sizing) -> int:
    """What a lender keeps: one whole window, and so much that it is not pressed before it has done anything."""
    besides = found.peak.total - found.peak.kv
    return max(besides + found.window_kv, int(besides / LEND_UNTIL))


def _takes(found: Sizing, engine: str, parameters: Mapping[str, Any]) -> int:
    """Bytes that the engine takes however little is used: a pool of a size that somebody set."""
    peak = found.peak
    pool = 0
    if engine == "embedded" and parameters.get("num_blocks"):
        pool = int(parameters["num_blocks"]) * found.block_size * found.kv_bytes_per_token
    elif engine == "embedded":
        pool = -(-max(32 * 2048, found.shape.context) // found.block_size) * found.block_size * found.kv_bytes_per_token
    elif found.kind == "cpu" and parameters.get("kv_cache_memory_bytes"):
        pool = int(parameters["kv_cache_memory_bytes"])
    return peak.total - peak.kv + pool if pool else 0


def _share_taken(found: Sizing, engine: str, parameters: Mapping[str, Any]) -> float:
    if found.kind == "cpu" or engine not in _SHARE_OF_CARD:
        return 0.0
    return float(parameters.get("gpu_memory_utilization") or 0.90)


def _default_seqs(engine: str) -> int:
    return 64 if engine == "embedded" else 128


def _default_block_size(engine: str, kind: str) -> int:
    return 128 if engine == "vllm" and kind == "cpu" else 16


def _default_batched(engine: str, kind: str) -> int:
    if engine == "embedded":
        return 512
    return 2048 if kind == "cpu" else 8192


def _kv_dtype_bytes(engine: str, parameters: Mapping[str, Any]) -> float:
    if engine == "embedded":
        return 4 if parameters.get("dtype") == "fp32" else 2
    return 1 if str(parameters.get("kv_cache_dtype", "auto")).startswith("fp8") else 2
