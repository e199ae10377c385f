"""Proof that a change of the scheduler changed no decision: record what it was told and decided, and play it again.

A recording is JSON lines, in order: {"add": …}, {"refresh": …}, {"abort": …}, {"step": …} with its decisions, then
{"sampled": …} or {"failed": …}. It holds prompts, so it is made by tests and benchmarks, never by a serving engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.blocks import BlockPool
from engine.hostcache import HostCache
from engine.scheduler import Listener, Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.types import FinishReason, Sampled, SamplingParams, Step

MAX_LINES = 100_000


class Settled:
    """A grammar as far as the scheduler sees it."""

    ended = False

    def __init__(self, *, ready: bool) -> None:
        self.ready = ready
        self.error: str | None = None

    def fill(self, mask: object) -> None: ...

    def accept(self, token_id: int) -> None: ...


class RecordedScheduler(Scheduler):
    """A scheduler that writes everything down, up to MAX_LINES; `whole` says whether that was all."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, host: HostCache | None = None) -> None:
        super().__init__(pool, limits, host)
        self.lines: list[str] = []
        self.whole = True
        self._quiet = False
        fields = {name: getattr(limits, name) for name in limits.__slots__}
        self._write("pools", [pool.num_blocks, pool.block_size, self.host.num_slots, fields])

    def add(self, sequence: Sequence) -> None:
        grammar = None if sequence.grammar is None else sequence.grammar.ready
        told = {
            "id": sequence.id,
            "prompt": sequence.tokens,
            "max_tokens": sequence.params.max_tokens,
            "stop": sorted(sequence.params.stop_token_ids),
            "min_tokens": sequence.params.min_tokens,
            "root": sequence._root.hex(),
            "priority": sequence.priority,
            "tenant": sequence.tenant,
            "deadline": sequence.deadline,
            "grammar": grammar,
        }
        self._write("add", told)
        super().add(sequence)

    def limit(self, usable: int) -> None:
        self._write("limit", usable)
        super().limit(usable)

    def refresh(self, now: float) -> list[Sequence]:
        compiled = {s.id: s.grammar.error for s in self.compiling if s.grammar is not None and s.grammar.ready}
        self._write("refresh", {"now": now, "compiled": compiled})
        return self._quietly(lambda: super(RecordedScheduler, self).refresh(now))

    def abort(self, ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        ids = list(ids)
        if not self._quiet:
            self._write("abort", {"ids": ids, "reason": reason})
        return super().abort(ids, reason)

    def schedule(self) -> Step:
        step = super().schedule()
        self._write("step", decisions(step))
        return step

    def complete(self, step: Step, sampled: Mapping[int, Sampled], listen: Listener = lambda *_: False) -> None:
        stopped: list[int] = []

        def heard(sequence: Sequence, token: Sampled, reason: FinishReason | None) -> bool:
            stop = listen(sequence, token, reason)
            stopped.extend([sequence.id] if stop else [])
            return stop

        super().complete(step, sampled, heard)
        tokens = {id: token.token_id for id, token in sampled.items()}
        self._write("sampled", {"tokens": tokens, "stopped": stopped})

    def fail(self, step: Step) -> list[Sequence]:
        self._write("failed", True)
        return self._quietly(lambda: super(RecordedScheduler, self).fail(step))

    def _quietly(self, act: Callable[[], list[Sequence]]) -> list[Sequence]:
        self._quiet = True
        try:
            return act()
        finally:
            self._quiet = False

    def _write(self, kind: str, what: Any) -> None:
        self.whole = self.whole and len(self.lines) < MAX_LINES
        if self.whole:
            self.lines.append(json.dumps({kind: what}, separators=(",", ":")))


def decisions(step: Step) -> dict[str, Any]:
    """Everything a step decided, as JSON reads it back."""
    return {
        "chunks": [[chunk.sequence.id, chunk.start, chunk.count] for chunk in step.chunks],
        "tables": [list(chunk.sequence.block_table) for chunk in step.chunks],
        "preempted": [sequence.id for sequence in step.preempted],
        "out": [list(pair) for pair in step.copies_out],
        "in": [list(pair) for pair in step.copies_in],
    }


def replay(lines: Iterable[str]) -> int:
    """Tell a new scheduler the same; AssertionError at the first other decision. Returns the number of steps."""
    scheduler: Scheduler | None = None
    sequences: dict[int, Sequence] = {}
    step, steps = Step(0), 0
    for number, line in enumerate(lines, 1):
        ((kind, what),) = json.loads(line).items()
        if kind == "pools":
            num_blocks, block_size, num_host, limits = what
            scheduler = Scheduler(BlockPool(num_blocks, block_size), SchedulerLimits(**limits), HostCache(num_host))
            continue
        assert scheduler is not None
        if kind == "step":
            step, steps = scheduler.schedule(), steps + 1
            assert decisions(step) == what, f"line {number}: another decision than recorded"
        else:
            _tell(scheduler, sequences, kind, what, step)
    return steps


def _tell(scheduler: Scheduler, sequences: dict[int, Sequence], kind: str, what: Any, step: Step) -> None:
    match kind:
        case "add":
            sequences[what["id"]] = _sequence(what)
            scheduler.add(sequences[what["id"]])
        case "refresh":
            for id, error in what["compiled"].items():
                grammar = sequences[int(id)].grammar
                assert isinstance(grammar, Settled)
                grammar.ready, grammar.error = True, error
            scheduler.refresh(what["now"])
        case "limit":
            scheduler.limit(what)
        case "abort":
            scheduler.abort(what["ids"], FinishReason(what["reason"]))
        case "failed":
            scheduler.fail(step)
        case "sampled":
            tokens = {int(id): Sampled(token) for id, token in what["tokens"].items()}
            scheduler.complete(step, tokens, lambda sequence, *_: sequence.id in what["stopped"])


def _sequence(what: dict[str, Any]) -> Sequence:
    params = SamplingParams(what["max_tokens"], stop_token_ids=frozenset(what["stop"]), min_tokens=what["min_tokens"])
    return Sequence(
        what["id"],
        what["prompt"],
        params,
        root=bytes.fromhex(what["root"]),
        priority=what["priority"],
        tenant=what["tenant"],
        deadline=what["deadline"],
        grammar=None if what["grammar"] is None else Settled(ready=what["grammar"]),
    )
