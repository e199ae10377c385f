"""The form of a deployment: which fields it shows for an engine, with what they are for, and what a person typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import QueryDict
from django.utils.translation import gettext as _

from console.catalog.models import Model, Runtime
from console.fleet import sweep
from console.fleet.deployment_actions import CHECKS, NOT_STARTED, engine_of
from console.fleet.models import Deployment
from engine.adapters import ADAPTERS
from engine.adapters.base import Adapter, Parameter

PARAMETER, VARIABLE = "p.", "v."  # prefixes of fields that belong to the engine
_SWITCHES = ("lends", "autoscale")


@dataclass(frozen=True)
class ParameterRow:
    """One engine parameter in the form. `value` is what is set, as text; empty: the engine's default."""

    name: str
    known: Parameter
    value: str
    measured: str = ""  # what a sweep found here

    @property
    def field(self) -> str:
        return PARAMETER + self.name

    @property
    def options(self) -> list[tuple[str, str]]:
        """Choices of a list: value and title."""
        words = ("true", "false") if self.known.kind == "bool" else self.known.choices
        return [(word, {"true": _("on"), "false": _("off")}.get(word, word)) for word in words]

    @property
    def default(self) -> str:
        """What holds where nothing is set."""
        if self.known.default is None:
            return _("the engine decides")
        return {"True": _("on"), "False": _("off")}.get(str(self.known.default), str(self.known.default))


@dataclass(frozen=True)
class EngineRow:
    """One engine to choose: what it is, and why it cannot run this model, if so."""

    word: str
    adapter: Adapter
    runtimes: list[Runtime]
    chosen: bool
    objection: str

    @property
    def title(self) -> str:
        return str(Deployment.Engine(self.word).label)


def engines(model: Model | None, chosen: str) -> list[EngineRow]:
    """Every engine that we start, in the order of the adapters."""
    ready: dict[str, list[Runtime]] = {}
    for runtime in Runtime.objects.filter(state=Runtime.State.READY).order_by("-ready_at"):
        ready.setdefault(runtime.engine, []).append(runtime)
    return [
        EngineRow(word, each, ready.get(word, []), word == chosen, _objection(word, each, model, ready))
        for word, each in ADAPTERS.items()
    ]


def _objection(word: str, engine: Adapter, model: Model | None, ready: Mapping[str, list[Runtime]]) -> str:
    if word in NOT_STARTED:
        return _("not started from here yet; run it yourself and add it as an external endpoint")
    if model is not None and model.format and model.format not in engine.capabilities.formats:
        formats = ", ".join(sorted(engine.capabilities.formats))
        return _("reads %(formats)s, not %(format)s") % {"formats": formats, "format": model.format}
    if word != Deployment.Engine.EMBEDDED and not ready.get(word):
        return _("no runtime of it is installed")
    return ""


def parameter_rows(deployment: Deployment, kind: str) -> list[ParameterRow]:
    """Parameters that mean anything on this kind of device."""
    engine = engine_of(deployment)
    measured = {"max_num_seqs": measured_advice(deployment)}
    return [
        ParameterRow(name, known, _typed(deployment.parameters.get(name)), measured.get(name, ""))
        for name, known in engine.parameters.items()
        if kind in known.devices or name in deployment.parameters
    ]


def measured_advice(deployment: Deployment) -> str:
    """What the newest sweep of these weights on this engine found, and where, in words; empty where there was none."""
    same = Deployment.objects.filter(
        model_id=deployment.model_id, engine=deployment.engine, sweep__quantisation=deployment.quantisation
    )
    found = same.order_by("-sweep__at").values_list("sweep", flat=True).first() or {"steps": [], "best": None}
    best = next((step for step in found["steps"] if step["sequences"] == found["best"]), None)
    if best is None:
        return ""
    told = _("Measured on %(device)s on %(day)s: %(best)s brought %(speed)s tokens/s with a P99 of %(p99)s s.") % {
        "device": found["device"],
        "day": found["at"][:10],
        "best": best["sequences"],
        "speed": f"{best['tokens_s']:,.0f}",
        "p99": f"{best['p99_s']:.2f}",
    }
    return f"{told} {sweep.words(found['stopped_by'])}"


def _typed(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def values_of(data: QueryDict, *, free_arguments: bool) -> dict[str, Any]:
    """What a form holds, for the actions. A switch that is not there is off, an empty parameter has its default."""
    values: dict[str, Any] = {name: data[name] for name in CHECKS if name in data and name not in ("binding",)}
    values["parameters"] = {
        name.removeprefix(PARAMETER): data[name] for name in data if name.startswith(PARAMETER) and data[name] != ""
    }
    values["environment"] = {
        name.removeprefix(VARIABLE): data[name] for name in data if name.startswith(VARIABLE) and data[name] != ""
    }
    values["binding"] = data.getlist("binding")
    for name in _SWITCHES:
        values[name] = name in data
    if not free_arguments:
        values.pop("arguments", None)
    return values
