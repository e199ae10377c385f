"""The pure core under random load: every request gets exactly its oracle's tokens, no block is lost, nobody starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.hostcache import HostCache
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence, hash_root
from engine.types import SamplingParams
from engine.waiting import WaitingQueue
from tests.engine.fakes import HashRunner, oracle
from tests.engine.schedules import World, scenario, seeded, tally


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False))
def test_every_request_gets_its_oracle_tokens_and_every_block_comes_back(draw: Random) -> None:
    """Whatever arrives, leaves, expires, fails or is preempted: the output depends on the request only."""
    World(scenario(draw)).play()


def test_seeded_schedules_exercise_everything() -> None:
    """The same as above from fixed numbers, as bench/engine_schedules.py plays thousands; and all of it happens."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        world = World(seeded(seed))
        world.play()
        seen += tally(world)
    wanted = ["preempted_swap", "preempted_recompute", "swapped_in_blocks", "host_evictions", "with_grammar", "loans"]
    wanted += [f"ended_{reason}" for reason in ("stop", "length", "abort", "deadline", "error")]
    assert [name for name in wanted if seen[name] < 50] == []


def _first_come(self: WaitingQueue) -> Sequence | None:
    return min(self, key=lambda s: s.order, default=None)


def _never_pin(self: HostCache, digests: object) -> None:
    return None


def _believe(self: HostCache) -> None:
    self.settle()


def _keep_all(self: BlockPool, block: int, spill: object) -> None:
    self.evictions += 1


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "message"),
    [
        (WaitingQueue, "head", _first_come, "better served went first"),
        (HostCache, "pin", _never_pin, "oracle's tokens"),
        (HostCache, "discard", _believe, "before it was written|holds something else"),
        (BlockPool, "_forget", _keep_all, "oracle's tokens"),
    ],
)
def test_the_schedules_notice_a_wrong_core(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., object], message: str
) -> None:
    """Each invariant is there to fail: four ways to break the core, each found within 300 schedules."""
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError), match=message):
        for seed in range(300):
            World(seeded(seed)).play()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.booleans(),
)
def test_a_prefix_is_shared_under_one_salt_only(prefix: list[int], tail: list[int], same: bool) -> None:
    """The second request hits the first one's full blocks, capped at num_tokens − 1, or nothing."""
    pool = BlockPool(64, 4)
    scheduler = Scheduler(pool, SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16))
    runner = HashRunner(64, 4)
    first = Sequence(0, prefix, SamplingParams(1), root=hash_root("r", "a"))
    second = Sequence(1, prefix + tail, SamplingParams(1), root=hash_root("r", "a" if same else "b"))
    for sequence in (first, second):
        scheduler.add(sequence)
        while scheduler.has_work:
            step = scheduler.schedule()
            scheduler.complete(step, runner.sample(step, runner.forward(step)))
    full = len(prefix) // 4 * 4
    cap = (len(prefix + tail) - 1) // 4 * 4
    assert second.num_cached == (min(full, cap) if same else 0)
    assert second.tokens[second.num_prompt :] == oracle(prefix + tail, 1)
