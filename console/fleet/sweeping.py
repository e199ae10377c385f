"""A sweep over a real worker: asks it directly over its socket, with more and more requests at once."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
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
TRIES = 5  # to hear a worker that has just been loaded
TOKENS_OF_WORD = 5.0  # of a number of four digits and a space, until an answer has told how many they are


@dataclass(frozen=True)
class Asked:
    """What a sweep asks for. Sizes are tokens of a request, `rounds` how often each of a step's slots is filled."""

    prompt_tokens: int = 256
    answer_tokens: int = 64
    rounds: int = 3
    p99_limit_s: float | None = None
    in_service: bool = False


def run(actor: Actor, deployment: Deployment, asked: Asked, say: Callable[[Step], None]) -> Verdict:
    """Sweep one of its ready replicas and keep the result as advice. Takes minutes; `say` hears each step.

    Raises ConsoleError where not even the first step could be made.
    """
    replica = _replica_of(deployment, asked)
    load = _Load(replica.uds, address_of(replica, replica.facts), asked)
    load.step(1)  # what it loads and compiles for sizes like these is not counted
    steps: list[Step] = []
    silent: dict[str, Any] = {}
    for number in sweep.numbers(load.where.max_num_seqs):
        try:
            steps.append(load.step(number))
        except ConsoleError as error:
            if not steps:
                raise
            silent = {"code": "silent", "at": number, "error": str(error)}
            break
        say(steps[-1])
        if sweep.objection(steps[-1], asked.p99_limit_s):
            break
    verdict = sweep.judge(steps, asked.p99_limit_s)
    verdict = replace(verdict, stopped_by=silent) if silent else verdict
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


class _Load:
    """Requests to one worker, so many at once."""

    def __init__(self, uds: str, where: Where, asked: Asked) -> None:
        self.where = where
        self._uds = uds
        self._asked = asked
        self._token_of_word = TOKENS_OF_WORD

    def step(self, sequences: int) -> Step:
        """So many at once, in whole waves. Raises ConsoleError where the worker no longer tells its state."""
        before = self._stats()
        count = sequences * max(self._asked.rounds, math.ceil(LEAST_REQUESTS / sequences))
        began = time.monotonic()
        with _Watch(self.where) as watch:
            answers = self._ask(count, sequences)
        seconds = time.monotonic() - began
        done = [each for each in answers if not each.error]
        took = sorted(each.seconds for each in done)
        prompt_tokens = round(sum(each.prompt_tokens for each in done) / len(done)) if done else 0
        if prompt_tokens:
            self._token_of_word = prompt_tokens / self._words
        return Step(
            sequences=sequences,
            requests=count,
            failed=count - len(done),
            p50_s=round(_percentile(took, 0.5), 4),
            p99_s=round(_percentile(took, 0.99), 4),
            tokens_s=round(sum(each.tokens for each in done) / seconds, 1),
            prompt_tokens=prompt_tokens,
            kv_peak=watch.kv_peak,
            preemptions=self._stats().get("preemptions", 0) - before.get("preemptions", 0),
            waited=watch.waited,
            error=next((each.error for each in answers if each.error), ""),
        )

    @property
    def _words(self) -> int:
        return max(1, round(self._asked.prompt_tokens / self._token_of_word))

    def _ask(self, count: int, sequences: int) -> list[_Answer]:
        pool = ThreadPoolExecutor(max_workers=sequences)
        try:
            return [each.result() for each in [pool.submit(self._one) for _ in range(count)]]
        finally:  # who interrupts it waits for those that run, not for those that do not
            pool.shutdown(cancel_futures=True)

    def _one(self) -> _Answer:
        # Every prompt is new: what a prefix cache saves depends on what people ask, not on the number of sequences.
        prompt = " ".join(str(random.randint(1000, 9999)) for _ in range(self._words))  # noqa: S311 - no secret
        more = {"max_tokens": self._asked.answer_tokens, "ignore_eos": True}
        began = time.monotonic()
        try:
            usage = probe.generate(self._uds, self.where.served_name, prompt, REQUEST_TIMEOUT_S, **more)
        except probe.VerificationError as error:
            return _Answer(time.monotonic() - began, error=str(error))
        return _Answer(time.monotonic() - began, usage["completion_tokens"], int(usage.get("prompt_tokens") or 0))

    def _stats(self) -> dict[str, Any]:
        for _ in range(TRIES):
            try:
                return probe.ask(self.where).stats
            except probe.NoAnswer as error:  # each question has its own time limit
                failure = error
        raise ConsoleError(f"The worker does not tell its state: {failure}")


@dataclass(frozen=True)
class _Answer:
    seconds: float
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


class _Watch(threading.Thread):
    """Looks at a worker while a step runs: how full its KV blocks become, and whether somebody waits for them."""

    def __init__(self, where: Where) -> None:
        super().__init__(name="sweep-watch", daemon=True)
        self.kv_peak = 0.0
        self.waited = False
        self._where = where
        self._ended = threading.Event()

    def __enter__(self) -> _Watch:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                stats = probe.ask(self._where).stats
            except probe.NoAnswer:  # busy; whether its requests fail is seen by them
                continue
            self.kv_peak = max(self.kv_peak, float(stats.get("kv_usage", 0.0)))
            room = stats.get("running", 0) < self._where.max_num_seqs
            self.waited |= bool(stats.get("waiting")) and room and stats.get("kv_usage", 0.0) >= sweep.FULL


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
        "stopped_by": dict(verdict.stopped_by),
        "quantisation": deployment.quantisation,
    }
    Deployment.objects.filter(pk=deployment.pk).update(sweep=told)
    record(actor, "deployment.swept", deployment, best=best, stopped_by=sweep.words(verdict.stopped_by))
