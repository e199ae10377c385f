"""What all endpoints share: the engine, its facts, and the one event loop it delivers to."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Any

from engine import __version__
from engine.boot import Engine
from engine.core import Deliveries, EngineCore, Limit
from engine.errors import Overloaded
from engine.faults import FaultyRunner
from engine.guided import Compiler
from engine.metrics import EngineMetrics
from engine.runner import Runner


class Service:
    """One engine behind HTTP. Must be created on the loop that serves."""

    def __init__(self, engine: Engine, api_key: str | None = None) -> None:
        config = engine.config
        self.config = config
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.vocab_size
        self.hidden_size = engine.path.shape.hidden_size
        self.pooling = engine.pooling
        self.headless = engine.headless
        self.api_key = api_key
        self.created = int(time.time())
        self.draining = False
        self.undelivered_tokens = 0
        self.metrics = EngineMetrics(config.name)
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        runner: Runner = engine.runner
        if config.faults:
            runner = FaultyRunner(runner, config.faults)
        self.core = EngineCore(engine.scheduler, runner, self._deliver, self.metrics, engine.vocab_size)
        self.metrics.watch(self.core)
        self.compiler = Compiler(engine.tokenizer, engine.vocab_size, self.core.wake)
        self.compiler.prepare()

    def next_id(self) -> int:
        """Sequence ids rise with arrival, which is what orders equals in the queue."""
        return next(self._ids)

    async def fault_delay(self, phase: str) -> None:
        """Sleep where a test asked for it."""
        end = time.monotonic() + self.config.faults.get(phase, 0.0) / 1000
        # The loop's timers may fire a millisecond early, which a test would notice.
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def stats(self) -> dict[str, Any]:
        """The body of GET /stats."""
        core, scheduler = self.core, self.core.scheduler
        pool, counts = scheduler.pool, scheduler.counts
        return {
            "steps": counts.steps,
            "running": core.num_running,
            "waiting": core.num_waiting,
            "kv_usage": round(pool.usage, 6),
            "num_blocks": pool.num_blocks,
            "free_blocks": pool.num_free,
            "held_blocks": pool.num_held,
            "usable_blocks": pool.usable,
            "block_size": pool.block_size,
            "evicted_blocks": pool.evictions,
            "prefix_query_tokens": counts.prefix_query_tokens,
            "prefix_hit_tokens": counts.prefix_hit_tokens,
            "prompt_tokens": counts.prompt_tokens,
            "generation_tokens": counts.generation_tokens,
            "undelivered_tokens": self.undelivered_tokens,
            "preemptions": counts.preemptions.total(),
            "preemptions_by_kind": dict(counts.preemptions),
            "host_blocks": scheduler.host.num_slots,
            "host_blocks_used": scheduler.host.num_used,
            "host_hit_tokens": counts.host_hit_tokens,
            "swapped_out_blocks": counts.swapped_out_blocks,
            "swapped_in_blocks": counts.swapped_in_blocks,
            "waiting_tokens": core.num_waiting_tokens,
            "step_ms_by_part": core.steps.mean_ms(),
            "requests_finished": dict(counts.finished),
            "max_num_seqs": self.config.max_num_seqs,
            "max_model_len": self.max_model_len,
            "rss_bytes": rss_bytes(),
            "engine_version": __version__,
            "model": self.config.name,
            "draining": self.draining,
            **core.timing(),
        }

    def limit_pool(self, usable: int) -> dict[str, int]:
        """Have the KV pool keep to its first blocks; what it will keep to, never less than one window needs."""
        pool = self.core.scheduler.pool
        usable = max(min(usable, pool.num_blocks), pool.blocks_for(self.max_model_len))
        self.core.post(Limit(usable))
        return {"num_blocks": pool.num_blocks, "usable_blocks": usable}

    def last_steps(self, count: int) -> dict[str, Any]:
        """The body of GET /debug/steps; the anchor maps monotonic stamps to the wall clock."""
        records = self.core.steps.last(count)
        anchor = {"wall_ns": time.time_ns(), "mono_ns": time.monotonic_ns()}
        return {"anchor": anchor, "steps": [record.as_dict() for record in records]}

    def refuse_overload(self, sequences: int, tokens: int) -> None:
        """Raises Overloaded where so many more sequences, with so many prompt tokens, are too much to queue."""
        core, limit, most = self.core, self.config.max_queued, self.config.max_queued_tokens
        reason = core.unhealthy()
        if self.draining:
            raise Overloaded("The engine is shutting down.", retry_after=5)
        if reason is not None:
            raise Overloaded(f"The engine is not healthy: {reason}.", retry_after=10)
        if core.num_waiting + sequences > limit:
            raise Overloaded(f"{core.num_waiting} requests wait already; the limit is {limit}.", self.retry_after())
        waiting = core.num_waiting_tokens
        if waiting and waiting + tokens > most:
            raise Overloaded(f"Requests with {waiting} tokens wait already; the limit is {most}.", self.retry_after())

    def retry_after(self) -> int:
        """Whole seconds, 1 to 60, until today's pace has drained half the queue."""
        rate = self.metrics.finished_per_second()
        if rate == 0:
            return 1
        return max(1, min(60, round(self.core.num_waiting / 2 / rate)))

    def count_undelivered(self, tokens: int) -> None:
        """Tokens generated for a reader that left before it was told of them."""
        self.undelivered_tokens += tokens

    def _deliver(self, deliveries: Deliveries) -> None:
        """Called on the step thread, once per step."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_hand_out, deliveries)


def _hand_out(deliveries: Deliveries) -> None:
    for choice, delta in deliveries:
        choice.outbox.deliver(choice.index, delta)


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
