"""HostCache: what is kept, what is given up, what a step may not touch."""

from __future__ import annotations

import pytest

from engine.hostcache import HostCache


def h(number: int) -> bytes:
    return bytes([number]) * 16


def full(*numbers: int, settled: bool = True) -> HostCache:
    host = HostCache(len(numbers))
    for number in numbers:
        assert host.store(h(number)) is not None
    if settled:
        host.settle()
    return host


def test_a_stored_block_is_found_in_its_slot_and_stored_once() -> None:
    host = HostCache(4)
    slot = host.store(h(1))
    assert host.store(h(1)) is None
    assert host.match([h(1), h(2)]) == [slot]
    assert (host.num_used, h(1) in host, h(2) in host) == (1, True, False)
    host.check()


def test_the_least_recently_used_block_goes_first() -> None:
    host = full(1, 2, 3)
    host.pin([h(1)])
    host.settle()
    host.store(h(4))
    assert [n for n in (1, 2, 3, 4) if h(n) in host] == [1, 3, 4]
    assert host.evictions == 1


def test_being_preempted_again_counts_as_a_use() -> None:
    host = full(1, 2)
    host.store(h(1))
    host.store(h(3))
    assert [n for n in (1, 2, 3) if h(n) in host] == [1, 3]


def test_what_a_step_reads_or_writes_stays_until_the_step_is_over() -> None:
    host = full(1, 2)
    host.pin([h(1), h(2)])
    assert host.store(h(3)) is None
    host.settle()
    assert host.store(h(3)) is not None
    assert full(1, settled=False).store(h(2)) is None, "a slot that is being written was given away"


def test_a_failed_step_leaves_nothing_it_should_have_written() -> None:
    host = full(1, 2)
    host.pin([h(2)])
    host.store(h(3))
    host.discard()
    assert [n for n in (1, 2, 3) if h(n) in host] == [2]
    assert host.num_used == 1
    host.check()


def test_without_slots_nothing_is_kept() -> None:
    host = HostCache(0)
    assert host.store(h(1)) is None
    assert host.match([h(1)]) == []
    host.check()


def test_check_notices_a_lost_slot() -> None:
    host = full(1, 2)
    host._free.append(0)
    with pytest.raises(AssertionError, match="used \\+ free"):
        host.check()
