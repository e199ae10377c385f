"""A sweep over a real worker: asks it directly over its socket, with more and more requests at once."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from django.db import transaction
from django.utils import timezone

from console.audit.actions import Actor, record
from console.errors import ConsoleError
from console.fleet import probe, sweep
from console.fleet.models import Deployment, Replica
from console.fleet.probe import Where
from console.fleet.sweep import Step, Verdict
from console.fleet.verifying import address_of

LEAST_REQUESTS = 12  # of a step, or its P99 would be that of one request
REQUEST_TIMEOUT_S = 600.0
LOOK_S = 0.1
TOKENS_OF_WORD = 5  # of a number of four digits, about; usage tells how many they were


@dataclass(frozen=True)
class Asked:
    """What a sweep asks for. Sizes are tokens of a request, `rounds` how often each of a step's slots is filled."""

    prompt_tokens: int = 256
    answer_tokens: int = 64
    rounds: int = 3
    p99_limit_s: float | None = None
    in_service: bool = False


def run(actor: Actor, deployment: Deployment, asked: Asked, say: Callable[[Step], None]) -> Verdict:
    """Sweep one of its ready replicas and keep the result as advice. Takes minutes; `say` hears each step."""
    replica = _replica_of(deployment, asked)
    where = address_of(replica, replica.facts)
    _step(replica.uds, where, 1, asked)  # what it loads and compiles for sizes like these is not counted
    steps: list[Step] = []
    for number in sweep.numbers(where.max_num_seqs):
        steps.append(_step(replica.uds, where, number, asked))
        say(steps[-1])
        if sweep.objection(steps[-1], asked.p99_limit_s):
            break
    verdict = sweep.judge(steps, asked.p99_limit_s)
    _keep(actor, deployment, replica, asked, steps, verdict)
    return verdict


def _replica_of(deployment: Deployment, asked: Asked) -> Replica:
    routes = sorted(route.name for route in deployment.routes.all())
    if routes and not asked.in_service:
        raise ConsoleError(
            f"{deployment.name} serves {', '.join(routes)}: a sweep would delay its requests, and they would falsify "
            "it. Sweep a deployment without a route, or say --in-service."
        )
    ready = deployment.replicas.filter(state=Replica.State.READY).select_related("deployment").order_by("ordinal")
    for replica in ready:
        if replica.uds and replica.facts.get("max_num_seqs"):
            return replica
    raise ConsoleError(f"{deployment.name} has no replica that is ready and runs here; see `deployment show`.")


def _step(uds: str, where: Where, sequences: int, asked: Asked) -> Step:
    """So many requests at once, `rounds` times."""
    before = probe.ask(where).stats
    watch = _Watch(where)
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=sequences) as pool:
        count = max(LEAST_REQUESTS, sequences * asked.rounds)
        answers = [pool.submit(_request, uds, where.served_name, asked) for _ in range(count)]
    seconds = time.monotonic() - began
    watch.stop()
    done = [each.result() for each in answers]
    took = sorted(second for second, _tokens in done if _tokens)
    after = probe.ask(where).stats
    return Step(
        sequences=sequences,
        requests=count,
        failed=count - len(took),
        p50_s=round(_percentile(took, 0.5), 4),
        p99_s=round(_percentile(took, 0.99), 4),
        tokens_s=round(sum(tokens for _second, tokens in done) / seconds, 1),
        kv_peak=watch.kv_peak,
        preemptions=after.get("preemptions", 0) - before.get("preemptions", 0),
        waited=watch.waited,
    )


def _request(uds: str, served_name: str, asked: Asked) -> tuple[float, int]:
    """Seconds of one request, and the tokens that it got; none where it failed."""
    # Every prompt is new: what a prefix cache saves depends on what people ask, not on the number of sequences.
    words = max(1, asked.prompt_tokens // TOKENS_OF_WORD)
    prompt = " ".join(str(random.randint(1000, 9999)) for _ in range(words))  # noqa: S311 - no secret
    more = {"max_tokens": asked.answer_tokens, "ignore_eos": True}
    began = time.monotonic()
    try:
        usage = probe.generate(uds, served_name, prompt, REQUEST_TIMEOUT_S, **more)
    except probe.VerificationError:
        return time.monotonic() - began, 0
    return time.monotonic() - began, int(usage["completion_tokens"])


class _Watch(threading.Thread):
    """Looks at a worker while a step runs: how full its KV blocks become, and whether somebody waits for them."""

    def __init__(self, where: Where) -> None:
        super().__init__(name="sweep-watch", daemon=True)
        self.kv_peak = 0.0
        self.waited = False
        self._where = where
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                stats = probe.ask(self._where).stats
            except probe.NoAnswer:  # busy; whether its requests fail is seen by them
                continue
            self.kv_peak = max(self.kv_peak, float(stats.get("kv_usage", 0.0)))
            room = stats.get("running", 0) < self._where.max_num_seqs
            self.waited |= bool(stats.get("waiting")) and room and stats.get("kv_usage", 0.0) >= sweep.FULL

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered), math.ceil(len(ordered) * share)) - 1] if ordered else 0.0


@transaction.atomic
def _keep(
    actor: Actor, deployment: Deployment, replica: Replica, asked: Asked, steps: list[Step], verdict: Verdict
) -> None:
    best = verdict.best.sequences if verdict.best else None
    told: dict[str, Any] = {
        "at": timezone.now().isoformat(),
        "revision": replica.revision,
        "device": replica.device,
        "engine_version": replica.engine_version,
        "asked": asdict(asked),
        "steps": [asdict(step) for step in steps],
        "best": best,
        "stopped_by": verdict.stopped_by,
    }
    Deployment.objects.filter(pk=deployment.pk).update(sweep=told)
    record(actor, "deployment.swept", deployment, best=best, stopped_by=verdict.stopped_by)
