"""BlockPool: LRU order of the free list, hashes, references."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool


def h(number: int) -> bytes:
    return bytes([number]) * 16


def test_a_freed_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(2, 4)
    table = pool.take(1)
    pool.publish(table[0], h(1))
    pool.release(table)
    assert pool.match([h(1)]) == table
    pool.take(2)
    assert pool.match([h(1)]) == []
    assert pool.evictions == 1


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 4)
    table = pool.take(3)
    for index, block in enumerate(table):
        pool.publish(block, h(index))
    pool.release(table)
    pool.take(1)
    assert pool.match([h(0), h(1), h(2)]) == table[:2]


def test_unhashed_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(2, 4)
    cached, plain = pool.take(1), pool.take(1)
    pool.publish(cached[0], h(1))
    pool.release(cached)
    pool.release(plain)
    assert pool.take(1) == plain


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(2, 4)
    old, new = pool.take(1), pool.take(1)
    pool.publish(old[0], h(1))
    pool.publish(new[0], h(2))
    pool.release(old)
    pool.release(new)
    pool.hold(old)
    pool.release(old)
    assert pool.take(1) == new


def test_of_two_equal_blocks_the_first_published_keeps_the_hash() -> None:
    pool = BlockPool(2, 4)
    first, second = pool.take(1), pool.take(1)
    pool.publish(first[0], h(1))
    pool.publish(second[0], h(1))
    assert pool.match([h(1)]) == first
    pool.release(second)
    pool.check([first])


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(1, 4)
    table = pool.take(1)
    pool.publish(table[0], h(1))
    pool.hold(table)
    pool.release(table)
    assert pool.num_free == 0
    pool.release(table)
    assert pool.num_free == 1


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(2, 4)
    table = pool.take(1)
    pool.check([table])
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check([])


def test_usage_counts_held_blocks_only() -> None:
    pool = BlockPool(4, 4)
    assert pool.usage == 0.0
    pool.take(1)
    assert pool.usage == 0.25
    assert pool.blocks_for(0) == 0
    assert pool.blocks_for(5) == 2


def test_a_limit_withholds_free_blocks_at_once_and_held_ones_once_released() -> None:
    pool = BlockPool(4, 4)
    low, high = pool.take(1), pool.take(3)[1:]
    pool.limit(2)
    assert (pool.usable, pool.num_free, pool.num_held, pool.usage) == (2, 0, 4, 1.0)
    assert pool.newly_withheld() == []
    pool.release([1, *high])
    assert (pool.num_free, pool.newly_withheld(), pool.newly_withheld()) == (1, [(2, 2)], [])
    pool.check([low])
    assert pool.picture() == "1.--"
    pool.limit(4)
    assert (pool.num_free, pool.usage) == (3, 0.25)
    pool.check([low])


def test_prefixes_beyond_a_limit_are_found_no_more_nor_kept() -> None:
    pool = BlockPool(4, 4)
    table = pool.take(4)
    for index in (0, 2):
        pool.publish(table[index], h(index))
    pool.limit(2)
    pool.publish(table[3], h(3))
    assert [pool.match([h(index)]) for index in (0, 2, 3)] == [[0], [], []]
    pool.release(table)
    pool.limit(4)
    assert pool.match([h(0)]) == [0]
    assert sorted(pool.take(4)) == table


def test_a_block_is_named_with_its_neighbours_only() -> None:
    """They may share a page of memory; naming all that is withheld would cost every sequence that ends."""
    pool = BlockPool(200, 4)
    held = pool.take(200)
    pool.limit(50)
    pool.release([block for block in held if block % 50])
    assert pool.newly_withheld() == [(51, 49), (101, 49), (151, 49)]
    pool.release([100])
    assert pool.newly_withheld() == [(92, 17)]
    pool.limit(1 << 40)
    assert pool.usable == 200
    pool.limit(0)
    assert pool.usable == 1


def test_only_what_changed_is_withheld() -> None:
    pool = BlockPool(8, 4)
    pool.limit(6)
    assert pool.newly_withheld() == [(6, 2)]
    held = pool.take(6)
    pool.limit(3)
    assert pool.newly_withheld() == []
    pool.release([4])
    assert pool.newly_withheld() == [(4, 1), (6, 2)]
    pool.limit(5)
    pool.check([[block for block in held if block != 4]])
    assert pool.num_free == 1
