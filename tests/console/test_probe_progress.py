"""Whether an engine makes progress and how busy it is, judged by its counters alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.fleet.progress import FIXED_TOKENS, HUNG_FLOOR_S, LONGEST_GAP_S, Busy, Progress


def stats(steps: int, running: int, tokens: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": 0, "prefix_hit_tokens": 0, "generation_tokens": tokens, "step_tokens": tokens}
    return {"steps": steps, "running": running, "waiting": 0, **counts, **more}


class Looks:
    """Answers of one engine, half a second apart."""

    def __init__(self, max_step_tokens: int = 512, token_s: float = 0.0) -> None:
        self.progress = Progress(max_step_tokens, token_s)
        self.now = 100.0
        self.reason: str | None = None

    def see(self, steps: int, running: int, tokens: int = 0, after: float = 0.5) -> str | None:
        self.now += after
        self.reason = self.progress.see(self.now, stats(steps, running, tokens))
        return self.reason

    def rest(self, seconds: float, steps: int, running: int, tokens: int = 0) -> str | None:
        for _ in range(round(seconds / 0.5)):
            self.see(steps, running, tokens)
        return self.reason


class TestProgress:
    def test_running_without_a_step_is_hung_after_the_floor_and_says_for_how_long(self) -> None:
        engine = Looks()
        engine.see(7, 0)
        assert engine.rest(HUNG_FLOOR_S, 7, 3) is None
        assert engine.rest(1.5, 7, 3) == "3 running and no step for 11 s (limit 10 s)"
        assert engine.see(8, 3) is None  # it stepped after all

    def test_an_idle_engine_is_not_hung(self) -> None:
        engine = Looks()
        assert engine.rest(600, 7, 0) is None
        assert engine.progress.idle_s > 590

    def test_a_prefill_of_60_s_made_of_chunks_keeps_stepping(self) -> None:
        engine = Looks()
        for chunk in range(20):  # one chunk of 512 tokens every 3 s
            engine.rest(2.5, 10 + chunk, 1, 512 * chunk)
            assert engine.see(11 + chunk, 1, 512 * (chunk + 1)) is None

    def test_a_slow_engine_gets_five_times_what_its_largest_step_should_take(self) -> None:
        engine = Looks(max_step_tokens=2048)
        for step in range(1, 400):  # 10 tokens in half a second: 12 ms a token with what a step costs by itself
            engine.see(step, 2, 10 * step)
        expected = 0.5 / (10 + FIXED_TOKENS) * (2048 + FIXED_TOKENS)
        assert engine.progress.limit_s == pytest.approx(5 * expected, rel=0.01)
        assert engine.rest(engine.progress.limit_s - 1, 399, 2, 3990) is None
        assert engine.rest(3, 399, 2, 3990) is not None

    def test_small_steps_say_nothing_against_what_a_prompt_was_measured_to_take(self) -> None:
        engine = Looks(max_step_tokens=2048, token_s=0.0005)
        for step in range(1, 400):  # one token in 60 ms: by these alone, a large step might take four seconds
            engine.see(8 * step, 1, 8 * step)
        assert engine.progress.limit_s == HUNG_FLOOR_S
        assert engine.rest(HUNG_FLOOR_S, 3192, 1, 3192) is None
        assert engine.rest(1, 3192, 1, 3192) == "1 running and no step for 11 s (limit 10 s)"

    def test_a_large_step_over_several_looks_counts_with_all_its_time(self) -> None:
        engine = Looks(max_step_tokens=2048, token_s=0.001)
        for step in range(1, 200):  # the machine has become slow: 2,048 tokens every 6 s
            engine.rest(5.5, step, 1, 2048 * step)
            assert engine.see(step + 1, 1, 2048 * (step + 1)) is None
        assert engine.progress.limit_s == pytest.approx(5 * 6.0, rel=0.05)

    def test_our_own_absence_is_not_counted_against_it(self) -> None:
        engine = Looks()
        engine.see(7, 1)
        engine.see(7, 1)
        assert engine.see(7, 1, after=3600) is None
        assert engine.progress.without_step_s <= LONGEST_GAP_S + 0.5

    def test_a_new_worker_begins_anew(self) -> None:
        engine = Looks()
        engine.rest(20, 900, 1)
        assert engine.reason
        assert engine.see(1, 1) is None and engine.progress.without_step_s == 0

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=200))
    def test_who_steps_at_least_every_ten_seconds_is_never_hung(self, looks: list[tuple[int, int]]) -> None:
        engine, steps = Looks(), 0
        for number, (more, running) in enumerate(looks):
            steps += more or (1 if number % 20 == 0 else 0)
            assert engine.see(steps, running, steps) is None


class TestBusy:
    def test_full_batches_all_the_time_are_one_and_rest_is_none(self) -> None:
        busy, value = Busy(8), 0.0
        for look in range(100):
            value = busy.see(look * 0.5, stats(look * 10, 8, look * 80))
        assert value == 1.0
        for look in range(100, 200):
            value = busy.see(look * 0.5, stats(990, 0, 7920))
        assert value == 0.0

    def test_a_quarter_full_batch_all_the_time_is_a_quarter(self) -> None:
        busy, value = Busy(8), 0.0
        for look in range(100):
            value = busy.see(look * 0.5, stats(look * 10, 2, look * 20))
        assert value == pytest.approx(0.25)

    def test_short_steps_between_looks_count_for_what_they_took(self) -> None:
        busy, value = Busy(1), 0.0
        for look in range(100):  # 5 steps of 20 ms in every half second
            value = busy.see(look * 0.5, stats(look * 5, 0, look * 5, step_ms_p50=20.0))
        assert value == pytest.approx(0.2)

    def test_prompts_fill_a_step_by_their_tokens(self) -> None:
        busy, value = Busy(64, 512), 0.0
        for look in range(100):
            value = busy.see(look * 0.5, stats(look, 1, 0, prompt_tokens=512 * look))
        assert value == pytest.approx(1.0)

    def test_one_long_step_is_busy_too(self) -> None:
        busy, value = Busy(4), 0.0
        for look in range(100):
            value = busy.see(look * 0.5, stats(7, 2, 70))
        assert value == pytest.approx(0.5)
