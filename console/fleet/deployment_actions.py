"""Write deployments: what runs on which engine with which parameters, how many of it, and when that changes.

A change of what workers are started with makes a new revision, which the controller rolls out; everything else holds at
once. The same checks serve the form, the API and `manage.py deployment`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction

from console.audit.actions import Actor, change, record
from console.base.fields import Check, checked, choice, flag, number, optional, plain_number, text, told, whole
from console.catalog.models import Model, Runtime
from console.errors import NotAllowed, Refused
from console.fleet.models import Deployment, Replica, Revision, Route, RouteTarget
from console.fleet.revisions import CONFIG, back_to, first_revision, revise
from console.fleet.route_actions import check_shares, create_route, set_target
from console.fleet.schedules import schedules_of
from console.placement.models import Device
from console.placement.needs import kind_for
from engine.adapters import adapter
from engine.adapters.base import Adapter, AdapterError, Parameter, checked_variables
from serving.port import PRIORITIES

MAX_REPLICAS = 1000
NOT_STARTED = frozenset((Deployment.Engine.SGLANG, Deployment.Engine.TRTLLM))
"""Engines whose command lines are known and whose workers nobody keeps from strangers yet."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_ARGUMENT = re.compile(r"--?[A-Za-z0-9][A-Za-z0-9._-]*(=\S+)?")
# However it is spelt: it would let code that comes with a model run, or let anybody else at the worker.
_NEVER = re.compile(
    r"trust[-_]remote|host|port|uds|api[-_]key|allow|ssl|root[-_]path|middleware|plugin|otlp|load[-_]format"
    r"|module[-_]path|module[-_]dirs|[-_]cls"
)
_NEVER_INSIDE = re.compile(r"trust[-_]remote|module[-_]path")  # of a value, such as JSON in a word of its own
# Engines take the beginning of an option for the whole of it: --tru is --trust-remote-code. --config reads others from
# a file, and --model names other weights than those that were looked at.
_NEVER_BEGUN = (
    "trust-remote-code", "host", "port", "uds", "api-key", "allow-", "ssl-", "root-path", "middleware", "load-format",
    "otlp-traces-endpoint", "config", "model", "model-path", "custom-module-dirs", "tool-parser-plugin",
    "reasoning-parser-plugin", "worker-cls", "worker-extension-cls", "scheduler-cls",
)  # fmt: skip


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be an object of names and values")
    return dict(value)


def _words(value: Any) -> list[str]:
    """A list of words; a form gives one text with blanks or commas between them."""
    words = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(each, str) and each.isprintable() for each in words):
        raise ValueError("must be a list of words of printable characters")
    return [each for each in words if each]


def _schedules(value: Any) -> list[dict[str, Any]]:
    """A list of schedules as JSON has them; a form gives it as text."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.strip() else value or []
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON list") from None
    schedules_of(found)
    return list(found)


CONFIG_CHECKS: Mapping[str, Check] = {
    "runtime": lambda value: value,  # looked up with the engine at hand
    "quantisation": text(16, 0),
    "parameters": _mapping,
    "arguments": _words,
    "environment": _mapping,
    "binding": _words,
    "priority_class": choice(PRIORITIES),
    "spread": choice(Deployment.Spread.values),
    "planned_concurrency": whole(0, 100_000),
    "planned_tokens": whole(0, 100_000_000),
    "lends": flag,
}
SCALE_CHECKS: Mapping[str, Check] = {
    "min_replicas": whole(0, MAX_REPLICAS),
    "max_replicas": whole(1, MAX_REPLICAS),
    "desired_replicas": whole(0, MAX_REPLICAS),
    "autoscale": flag,
    "signal": choice(Deployment.Signal.values),
    "scale_up_at": number(0.001, 1_000_000),
    "scale_up_after_s": whole(10, 86_400),
    "scale_down_at": number(0, 1_000_000),
    "scale_down_after_s": whole(10, 604_800),
    "cool_down_s": whole(0, 86_400),
    "schedules": _schedules,
    "max_requests": optional(whole(1, 1_000_000_000)),
    "max_age_s": optional(whole(60, 31_536_000)),
    "max_rss_bytes": optional(whole(1 << 20, 1 << 50)),
}
CHECKS: Mapping[str, Check] = {**CONFIG_CHECKS, **SCALE_CHECKS}


@transaction.atomic
def create_deployment(actor: Actor, name: str, values: Mapping[str, Any]) -> Deployment:
    """Make a deployment; the controller places and starts its replicas.

    `values`: `model` (its name), `engine`, anything of CHECKS, and `route`, a public name that then leads there (made
    where there is none). Raises Refused, naming the field.
    """
    _admins_only(actor)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Refused("name must be letters, digits and . _ -, at most 80 of them.", "name")
    if Deployment.objects.filter(name=name).exists():
        raise Refused(f"There is a deployment named {name} already.", "name")
    given = dict(values)
    model, engine = _model(given.pop("model", None)), given.pop("engine", Deployment.Engine.EMBEDDED.value)
    route = given.pop("route", "")
    deployment = Deployment(name=name, model=model, engine=_engine(engine))
    _assign(actor, deployment, checked(CHECKS, given))
    if "max_replicas" not in given:
        deployment.max_replicas = max(1, deployment.desired_replicas)
    if "min_replicas" not in given and deployment.autoscale:
        deployment.min_replicas = min(1, deployment.desired_replicas)
    _check_whole(deployment)
    try:
        deployment.save()
    except IntegrityError:  # somebody else was a moment earlier
        raise Refused(f"There is a deployment named {name} already.", "name") from None
    first_revision(deployment, actor.label)
    kept = {name: _json(getattr(deployment, name)) for name in given}  # as checked: JSON can hold it
    record(actor, "deployment.create", deployment, model=model.name, engine=deployment.engine, **kept)
    if route:
        _lead(actor, deployment, route)
    return deployment


def assembled(actor: Actor, deployment: Deployment, values: Mapping[str, Any]) -> Deployment:
    """The deployment as it would be with these values, not saved. Raises Refused like the writes."""
    _admins_only(actor)
    _assign(actor, deployment, checked(CHECKS, values))
    _check_whole(deployment)
    return deployment


def drafted(model: Any, engine: Any) -> Deployment:
    """An unsaved deployment with every default. Raises Refused."""
    return Deployment(name="", model=_model(model), engine=_engine(engine))


@transaction.atomic
def set_deployment(actor: Actor, deployment: Deployment, values: Mapping[str, Any]) -> Deployment:
    """Change what is named, leave the rest. What workers are started with becomes a new revision, and is rolled out."""
    _admins_only(actor)
    found = checked(CHECKS, values)
    deployment = Deployment.objects.select_for_update().select_related("model").get(pk=deployment.pk)
    _owned(deployment)
    before = {name: getattr(deployment, name) for name in _columns(found)}
    _assign(actor, deployment, found)
    _check_whole(deployment)
    changed = {name: [old, getattr(deployment, name)] for name, old in before.items()}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    if not changed:
        return deployment
    if "quantisation" in changed:
        deployment.evaluated = False
    scale = [name for name in changed if name not in CONFIG]
    deployment.save(update_fields=[*scale, "evaluated"])
    if len(scale) < len(changed):
        revise(deployment, actor.label)
        for target in RouteTarget.objects.filter(deployment=deployment).select_related("route"):
            check_shares(target.route)
    told_changes = {name: [_json(each) for each in pair] for name, pair in changed.items()}
    record(actor, "deployment.set", deployment, None, revision=deployment.revision, **told_changes)
    return deployment


@transaction.atomic
def scale(actor: Actor, deployment: Deployment, replicas: Any) -> Deployment:
    """Have so many replicas from now on, within the bounds; the bounds of one without autoscaling follow."""
    _admins_only(actor)
    wanted = checked({"desired_replicas": SCALE_CHECKS["desired_replicas"]}, {"desired_replicas": replicas})
    deployment = Deployment.objects.select_for_update().get(pk=deployment.pk)
    _owned(deployment)
    count = wanted["desired_replicas"]
    if deployment.autoscale and not deployment.min_replicas <= count <= deployment.max_replicas:
        raise Refused(
            f"{deployment} scales between {deployment.min_replicas} and {deployment.max_replicas}: change these first.",
            "desired_replicas",
        )
    bounds = {} if deployment.autoscale else {"max_replicas": max(count, deployment.max_replicas, 1)}
    if not deployment.autoscale and count < deployment.min_replicas:
        bounds["min_replicas"] = count
    changed = change(deployment, {"desired_replicas": count, **bounds})
    if changed:
        record(actor, "deployment.scale", deployment, None, **changed)
    return deployment


@transaction.atomic
def roll_back(actor: Actor, deployment: Deployment, number: Any) -> Deployment:
    """Make an earlier revision the newest, to be rolled out like any other."""
    _admins_only(actor)
    _owned(deployment)
    wanted = checked({"revision": whole(1, 1_000_000)}, {"revision": number})["revision"]
    earlier = Revision.objects.filter(deployment=deployment, number=wanted).first()
    if earlier is None:
        raise Refused(f"{deployment} has no revision {wanted}.", "revision")
    _arguments(actor, deployment, list(earlier.config.get("arguments") or []))  # by today's rules, and permission
    revision = back_to(deployment, wanted, actor.label)
    record(actor, "deployment.roll_back", deployment, None, to=wanted, revision=revision.number)
    return deployment


@transaction.atomic
def remove_deployment(actor: Actor, deployment: Deployment) -> None:
    """Forget a deployment whose workers are gone and that no route leads to."""
    _admins_only(actor)
    _owned(deployment)
    deployment = Deployment.objects.select_for_update().get(pk=deployment.pk)
    routes = Route.objects.filter(targets__deployment=deployment) | Route.objects.filter(
        fallbacks__deployment=deployment
    )
    names = sorted(routes.values_list("name", flat=True).distinct())
    if names:
        raise Refused(f"{deployment} is a target or fallback of {', '.join(names)}: take it out there first.")
    alive = deployment.replicas.exclude(state__in=(Replica.State.STOPPED, Replica.State.PENDING)).count()
    if deployment.desired_replicas or alive:
        raise Refused(f"{deployment} still has workers: scale it to 0, and remove it once they have ended.")
    record(actor, "deployment.remove", deployment, None)
    deployment.delete()


# -- checks ------------------------------------------------------------------------------------------------------------


def engine_of(deployment: Deployment) -> Adapter:
    """What is known of its engine. Raises Refused for one that is none of ours to start."""
    try:
        return adapter(deployment.engine)
    except AdapterError as error:
        raise Refused(str(error), "engine") from None


def _assign(actor: Actor, deployment: Deployment, found: Mapping[str, Any]) -> None:
    """Put checked values into the columns; those that only the engine can judge are checked here."""
    engine = engine_of(deployment)
    for name, value in found.items():
        match name:
            case "runtime":
                deployment.runtime = _runtime(deployment.engine, value)
            case "parameters":
                deployment.parameters = parameters_of(engine, value)
            case "environment":
                deployment.environment = _environment(engine, value)
            case "arguments":
                deployment.arguments = _arguments(actor, deployment, value)
            case "binding":
                deployment.binding = _binding(value)
            case _:
                setattr(deployment, name, value)


def _check_startable(deployment: Deployment, engine: Adapter) -> None:
    """Whether this engine can be started for it at all."""
    if deployment.engine in NOT_STARTED:
        raise Refused(
            f"{engine.title} is not started from here yet: its worker would listen on a port without a key. Run it "
            "yourself behind one, and add it as an external endpoint.",
            "engine",
        )
    if deployment.engine != Deployment.Engine.EMBEDDED and deployment.runtime is None:
        raise Refused(f"{engine.title} needs a runtime: install one with `manage.py runtime add`.", "runtime")


def _check_whole(deployment: Deployment) -> None:
    """What only holds or fails together."""
    engine = engine_of(deployment)
    able = engine.capabilities
    _check_startable(deployment, engine)
    if deployment.model.state != Model.State.READY:
        raise Refused(f"{deployment.model} is not ready: {deployment.model.reason or deployment.model.state}.", "model")
    if deployment.model.format not in able.formats:
        reads = " or ".join(sorted(able.formats))
        raise Refused(
            f"{engine.title} reads {reads}, and {deployment.model} is {deployment.model.format or 'not here'}.", "model"
        )
    if deployment.quantisation not in ("", *able.quantisations):
        known = ", ".join(each for each in able.quantisations if each) or "none"
        raise Refused(f"{engine.title} cannot quantise to {deployment.quantisation}. It can: {known}.", "quantisation")
    _check_cards(deployment)
    if deployment.lends and not able.lends:
        raise Refused(f"{engine.title} takes its memory at start and cannot lend it while it runs.", "lends")
    if deployment.min_replicas > deployment.max_replicas:
        raise Refused("min_replicas must be at most max_replicas.", "min_replicas")
    if not (deployment.autoscale or deployment.desired_replicas <= MAX_REPLICAS):
        raise Refused(f"desired_replicas must be at most {MAX_REPLICAS}.", "desired_replicas")
    if deployment.autoscale and not deployment.scale_down_at < deployment.scale_up_at:
        raise Refused("scale_down_at must be below scale_up_at.", "scale_down_at")
    if deployment.autoscale:
        deployment.desired_replicas = min(
            max(deployment.desired_replicas, deployment.min_replicas), deployment.max_replicas
        )


def _check_cards(deployment: Deployment) -> None:
    """Whether so many cards can share a replica."""
    ranks, heads = deployment.parameters.get("tensor_parallel", 1), deployment.model.heads
    if ranks > 1 and kind_for(deployment.engine, deployment.runtime) == frozenset(("cpu",)):
        raise Refused("This runtime runs on CPUs, of which a replica has one.", "parameters.tensor_parallel")
    if heads and heads % ranks:
        raise Refused(
            f"{ranks} cards cannot share the {heads} heads of {deployment.model} evenly.", "parameters.tensor_parallel"
        )


def parameters_of(engine: Adapter, given: Mapping[str, Any]) -> dict[str, Any]:
    """Engine parameters, typed and within their bounds; texts of forms and commands are read. Empty: the default."""
    found = {}
    for name, value in given.items():
        known: Parameter | None = engine.parameters.get(name)
        if known is None:
            names = ", ".join(engine.parameters)
            raise Refused(f"{name} is not a parameter of {engine.title}. Known: {names}.", f"parameters.{name}")
        if value is None or value == "":
            continue
        try:
            found[name] = known.read(name, value) if isinstance(value, str) else known.parse(name, plain_number(value))
        except AdapterError as error:
            raise Refused(str(error), f"parameters.{name}") from None
    return found


def _environment(engine: Adapter, given: Mapping[str, Any]) -> dict[str, str]:
    try:
        return checked_variables(engine, given)
    except AdapterError as error:
        raise Refused(str(error), "environment") from None


def _arguments(actor: Actor, deployment: Deployment, words: list[str]) -> list[str]:
    """Free-form arguments: by a permission of their own, and never what opens the worker or runs foreign code."""
    if words == deployment.arguments:
        return words
    if actor.user is not None and not actor.user.has_perm("fleet.free_arguments"):
        raise NotAllowed("Free-form arguments need the permission fleet.free_arguments.")
    for word in words:
        option = word.startswith("-")
        if (option and (not _ARGUMENT.fullmatch(word) or _forbidden(word))) or _NEVER_INSIDE.search(word.lower()):
            raise Refused(f"{word[:80]} cannot be passed to an engine.", "arguments")
        if len(word) > 400 or not word.isprintable():
            raise Refused("Each of arguments must be at most 400 printable characters.", "arguments")
    return words


def _forbidden(word: str) -> bool:
    """Whether an option is one of those that never pass, in full or as the beginning that engines take for it."""
    option = word.lower().partition("=")[0].lstrip("-").replace("_", "-")
    begins = word.startswith("--") and any(known.startswith(option) for known in _NEVER_BEGUN)
    return begins or _NEVER.search(word.lower()) is not None


def _binding(uids: list[str]) -> list[str]:
    known = set(Device.objects.filter(uid__in=uids).values_list("uid", flat=True))
    for uid in uids:
        if uid not in known:
            every = ", ".join(Device.objects.values_list("uid", flat=True)[:20]) or "none"
            raise Refused(f"There is no device {uid[:80]}. Known: {every}.", "binding")
    return uids


def _runtime(engine: str, wanted: Any) -> Runtime | None:
    """By requirement or version; the newest ready one where "latest" is asked for."""
    if wanted in (None, ""):
        return None
    ready = Runtime.objects.filter(engine=engine, state=Runtime.State.READY).order_by("-ready_at")
    for runtime in ready:
        if str(wanted) in ("latest", runtime.requirement, runtime.version, str(runtime.pk)):
            return runtime
    known = ", ".join(runtime.requirement for runtime in ready) or "none"
    raise Refused(f"No runtime {str(wanted)[:80]} of this engine is ready. Ready: {known}.", "runtime")


def _model(name: Any) -> Model:
    found = Model.objects.filter(name=name).first() if isinstance(name, str) and name.isprintable() else None
    if found is None:
        known = ", ".join(Model.objects.values_list("name", flat=True)[:20]) or "none"
        raise Refused(f"There is no model named {str(name)[:80]}. Known: {known}.", "model")
    return found


def _engine(name: Any) -> str:
    if name not in Deployment.Engine.values or name == Deployment.Engine.EXTERNAL:
        ours = [each for each in Deployment.Engine.values if each != Deployment.Engine.EXTERNAL]
        raise Refused(f"engine must be one of {', '.join(ours)}; external ones are added as endpoints.", "engine")
    return str(name)


def _lead(actor: Actor, deployment: Deployment, name: Any) -> None:
    route = Route.objects.filter(name=name).first() if isinstance(name, str) and name.isprintable() else None
    if route is None:
        longest = deployment.parameters.get("max_model_len") or deployment.model.context_length or 0
        route = create_route(actor, name if isinstance(name, str) else "", {"max_model_len": longest})
    set_target(actor, route, deployment, {})


def _owned(deployment: Deployment) -> None:
    if deployment.engine == Deployment.Engine.EXTERNAL:
        raise Refused(f"{deployment} is an external endpoint: it is changed as one.")


def _columns(found: Mapping[str, Any]) -> list[str]:
    return ["runtime_id" if name == "runtime" else name for name in found]


def _json(value: Any) -> Any:
    """For the audit log."""
    return value if isinstance(value, dict | list | int | float | bool | None) else str(told(value))


def _admins_only(actor: Actor) -> None:
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can change deployments.")
