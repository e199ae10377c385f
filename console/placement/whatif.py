"""What if: a question to the planner that starts nothing, as the page, the API and the command ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from console.base.fields import Check, checked, choice, flag, optional, plain_number, text, whole
from console.catalog.models import Model, Runtime
from console.errors import Refused
from console.placement import queries
from console.placement.actions import told
from console.placement.needs import Sizing, kind_here, need_of, sizing
from console.placement.planner import Plan, plan
from console.placement.words import gib
from engine.adapters import ADAPTERS, adapter
from engine.adapters.base import AdapterError
from engine.adapters.base import checked as checked_parameters

CLASSES = ("high", "normal", "low")


def _names(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise ValueError("must be a list of uids of devices")
    return tuple(name.strip() for name in names if name.strip())


def _parameters(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of engine parameters")
    return {str(name): plain_number(each) for name, each in value.items()}


WHAT_IF_CHECKS: Mapping[str, Check] = {
    "model": text(120),
    "engine": choice(tuple(ADAPTERS)),
    "runtime": optional(text(120)),
    "quantisation": text(16, 0),
    "parameters": _parameters,
    "planned_concurrency": optional(whole(1, 100_000)),
    "planned_tokens": optional(whole(1, 10_000_000)),
    "priority_class": choice(CLASSES),
    "spread": choice(("pack", "spread")),
    "binding": _names,
    "tensor_parallel": optional(whole(1, 64)),
    "borrows": flag,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What was reckoned and what the planner says to it."""

    model: Model
    sizing: Sizing
    plan: Plan

    def facts(self) -> dict[str, Any]:
        """As JSON tells it."""
        found = self.sizing
        reckoned = {
            "concurrency": found.concurrency,
            "tokens": found.tokens,
            "block_size": found.block_size,
            "kv_bytes_per_token": found.kv_bytes_per_token,
            "device_kind": found.kind,
        }
        return {**told(self.plan), "model": self.model.name, "reckoned": reckoned}


def ask(values: Mapping[str, Any]) -> Answer:
    """Where a replica would go. Starts and writes nothing. Raises Refused, naming the field."""
    found = {name: value for name, value in checked(WHAT_IF_CHECKS, values).items() if value is not None}
    if "model" not in found:
        raise Refused("model is missing: name one of the catalog.", "model")
    model = Model.objects.filter(name=found.pop("model")).first()
    if model is None:
        raise Refused("There is no model of that name in the catalog.", "model")
    engine, runtime = found.pop("engine", "vllm"), _runtime(found.pop("runtime", None))
    borrows = found.pop("borrows", False)
    known = adapter(engine)
    if found.get("quantisation", "") not in known.capabilities.quantisations:
        raise Refused(f"{known.title} has no quantisation {found['quantisation']}.", "quantisation")
    try:
        found["parameters"] = checked_parameters(known, found.get("parameters", {}))
    except AdapterError as error:
        raise Refused(str(error), "parameters") from None
    kind = kind_here(engine, runtime, found.get("binding", ()))
    overhead = queries.learnt_overhead(engine, runtime.requirement if runtime else "", kind)
    known_to_both: dict[str, Any] = {"engine": engine, "runtime": runtime, "kind": kind, "overhead": overhead}
    need = need_of(model, found, borrows=borrows, **known_to_both)
    return Answer(model, sizing(model, found, **known_to_both), plan(need, queries.cards(), queries.policy()))


def peak_sentence(answer: Answer) -> str:
    """ "Peak need 19.6 GiB: weights 14.2, …", for commands."""
    parts = ", ".join(f"{name} {gib(size)}" for name, size in answer.sizing.peak.parts().items())
    return f"Peak need {gib(answer.sizing.peak.total)} GiB: {parts}."


def _runtime(requirement: str | None) -> Runtime | None:
    if requirement is None:
        return None
    found = Runtime.objects.filter(requirement=requirement).first()
    if found is None:
        raise Refused(f"There is no runtime {requirement}.", "runtime")
    return found
