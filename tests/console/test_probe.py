"""Workers are asked in the way of their engine, over HTTP of a small server that behaves as vLLM does."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from console import coordination
from console.fleet import heartbeat, placing, probe, progress
from console.fleet.heartbeat import Heartbeats
from console.fleet.probe import Answer, NoAnswer, Where

METRICS = (Path(__file__).parents[1] / "engine" / "vllm-0.32.0-metrics.txt").read_text("utf-8")


@dataclass
class FakeVllm:
    """What it says. Its core may be stuck while its server answers."""

    health: int = 200
    running: int = 0
    steps: int = 4
    stepping: bool = False  # one step for every look
    stuck: bool = False  # no prompt gets a token
    prompts: int = 0
    window: int = 4096  # tokens; here a letter is one
    released: threading.Event = field(default_factory=threading.Event)

    def page(self) -> str:
        self.steps += self.stepping
        text = METRICS.replace(
            'vllm:num_requests_running{engine="0",model_name="smol"} 0.0',
            f'vllm:num_requests_running{{engine="0",model_name="smol"}} {self.running}.0',
        )
        finished = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="smol"}'
        text = text.replace(f"{finished} 1.0", f"{finished} {1 + self.prompts}.0")
        return text.replace(
            'vllm:iteration_tokens_total_count{engine="0",model_name="smol"} 4.0',
            f'vllm:iteration_tokens_total_count{{engine="0",model_name="smol"}} {self.steps}.0',
        )

    def answer(self, path: str) -> tuple[int, str]:
        pages = {
            "/health": lambda: (self.health, ""),
            "/metrics": lambda: (200, self.page()),
            "/version": lambda: (200, '{"version": "0.32.0"}'),
            "/v1/models": lambda: (200, json.dumps({"data": [{"id": "smol", "max_model_len": 4096}]})),
        }
        return pages[path]()

    def complete(self, body: bytes) -> tuple[int, str]:
        size = len(json.loads(body)["messages"][0]["content"])
        self.prompts += 1
        if self.stuck:
            self.released.wait(30)
        self.steps += 2
        if size > self.window:
            return 400, json.dumps({"error": {"message": "The prompt is longer than the window."}})
        return 200, json.dumps({"usage": {"completion_tokens": 2, "prompt_tokens": size}})


@dataclass
class Owed:
    """What gateways have in replicas."""

    slots: dict[str, int]


@pytest.fixture
def engine() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def uds(engine: FakeVllm, tmp_path: Path) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*engine.answer(self.path))

        def do_POST(self) -> None:
            self._send(*engine.complete(self.rfile.read(int(self.headers["content-length"]))))

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def address_string(self) -> str:
            return "local"

        def log_message(self, *_args: Any) -> None:
            """Quiet."""

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        block_on_close = False

    path = str(tmp_path / "v.sock")
    with Server(path, Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield path
        engine.released.set()
        server.shutdown()


@pytest.fixture
def hearts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeats]:
    """Heartbeats that beat, judge and publish at fifty times their pace."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    monkeypatch.setattr(heartbeat, "IDLE_CHECK_S", 0.2)
    monkeypatch.setattr(heartbeat, "OWED_CHECK_S", 0.05)
    monkeypatch.setattr(coordination, "read", lambda _scopes: Owed({}))
    monkeypatch.setattr(progress, "HUNG_FLOOR_S", 0.3)
    published: list[dict[str, Any]] = []
    monkeypatch.setattr(heartbeat.live, "publish", lambda _valkey, _replica, stats: published.append(stats))
    beats, stop = Heartbeats(), threading.Event()
    beats.published = published  # type: ignore[attr-defined]
    thread = threading.Thread(target=beats.run, args=(stop,), daemon=True)
    thread.start()
    yield beats
    stop.set()
    thread.join(5)


class Pool:
    """The KV pool of an embedded engine: a hundred blocks, of which it keeps thirty at least."""

    def __init__(self) -> None:
        self.usable, self.failures, self.asked = 100, 0, 0
        self.told: list[tuple[str, int]] = []

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        told = dict.fromkeys(("running", "waiting", "steps", "kv_usage", "prompt_tokens", "generation_tokens"), 0)
        return told | {"num_blocks": 100, "usable_blocks": self.usable, "at": time.time()}

    def limit(self, uds: str, blocks: int) -> int:
        self.told.append((uds, blocks))
        if self.failures:
            self.failures -= 1
            raise OSError("it does not listen")
        self.usable = max(30, blocks)
        return self.usable

    def hear_more(self) -> None:
        before = self.asked
        until(lambda: self.asked > before + 3)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline, "it did not come to this"
        time.sleep(0.005)


def where(uds: str) -> Where:
    return Where(uds, "vllm", served_name="smol", max_num_seqs=8, max_step_tokens=512)


class TestAsking:
    def test_health_and_stats_over_its_socket(self, engine: FakeVllm, uds: str) -> None:
        engine.running = 3
        answer = probe.ask(where(uds))
        assert answer.healthy and (answer.stats["running"], answer.stats["steps"]) == (3, 4)
        assert abs(answer.stats["at"] - time.time()) < 60

    def test_a_dead_core_is_told_with_a_reason(self, engine: FakeVllm, uds: str) -> None:
        engine.health = 503
        answer = probe.ask(where(uds))
        assert not answer.healthy and answer.reason == "its engine is dead"

    def test_who_does_not_listen_gives_no_answer(self, tmp_path: Path) -> None:
        with pytest.raises(NoAnswer):
            probe.ask(where(str(tmp_path / "none.sock")))

    def test_it_is_ready_with_facts_once_its_health_says_so(self, engine: FakeVllm, uds: str, tmp_path: Path) -> None:
        assert probe.ready("vllm", str(tmp_path / "none.sock"), {}) is None
        engine.health = 503
        assert probe.ready("vllm", uds, {}) is None
        engine.health = 200
        facts = probe.ready("vllm", uds, {"max_num_seqs": 8})
        assert facts is not None and (facts["model"], facts["max_num_seqs"], facts["num_blocks"]) == ("smol", 8, 364)


class TestVerification:
    def test_an_engine_that_does_not_judge_itself_is_measured_too(self, engine: FakeVllm, uds: str) -> None:
        check = probe.Verification(uds, "smol", 10, words=100)
        check.join(10)
        assert check.seconds is not None and engine.prompts == 1 + probe.MEASURED_TIMES
        assert 0 < check.token_s < 10 / 100

    def test_a_window_too_small_to_measure_is_no_failure(self, engine: FakeVllm, uds: str) -> None:
        engine.window = 100
        check = probe.Verification(uds, "smol", 10, words=100)
        check.join(10)
        assert check.seconds is not None and check.token_s == 0.0


class Clock:
    """In place of `time` where a proof looks at it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class TestWhenAProofIsDue:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr(heartbeat, "time", clock)
        return clock

    def rest(self, clock: Clock, seconds: float, owed: int) -> tuple[list[float], float | None]:
        """When gateways were asked, and when a proof was due, looking twice a second."""
        proof, asked = heartbeat._Proof(), list[float]()

        def owes() -> int:
            asked.append(clock.now - began)
            return owed

        began = clock.now
        while clock.now - began < seconds:
            clock.now += 0.5
            if proof._is_due(clock.now - began, owes):
                return asked, clock.now - began
        return asked, None

    def test_gateways_are_asked_less_and_less_often_while_nobody_waits(self, clock: Clock) -> None:
        assert self.rest(clock, 29, owed=0) == ([1, 2, 4, 8, 16, 24], None)
        assert self.rest(clock, 60, owed=0)[1] == heartbeat.IDLE_CHECK_S + 0.5

    def test_who_still_waits_a_second_later_is_owed_a_proof(self, clock: Clock) -> None:
        assert self.rest(clock, 29, owed=1) == ([1, 2], 2)


class TestHeartbeats:
    def test_an_engine_that_steps_is_healthy_and_its_numbers_are_published(
        self, engine: FakeVllm, uds: str, hearts: Any
    ) -> None:
        engine.running, engine.stepping = 2, True
        hearts.watch("r", where(uds))
        until(lambda: len(hearts.published) > 60)
        heard = hearts.heard("r")
        assert heard is not None and heard.healthy and heard.reason == ""
        assert {"running", "kv_usage", "free_blocks", "steps", "at", "busy"} <= set(hearts.published[-1])

    def test_running_without_a_step_is_not_healthy_although_it_answers(
        self, engine: FakeVllm, uds: str, hearts: Heartbeats
    ) -> None:
        engine.running = 2
        hearts.watch("r", where(uds))
        until(lambda: (heard := hearts.heard("r")) is not None and not heard.healthy)
        heard = hearts.heard("r")
        assert heard is not None and heard.reason.startswith("2 running and no step for") and heard.silent_s == 0

    def test_an_idle_engine_proves_itself_by_a_token_which_counts_for_nobody(
        self, engine: FakeVllm, uds: str, hearts: Any
    ) -> None:
        hearts.watch("r", where(uds))
        until(lambda: engine.prompts >= 2)
        until(lambda: hearts.published[-1]["requests_finished"]["length"] == 1)
        heard = hearts.heard("r")
        assert heard is not None and heard.healthy

    def test_one_that_gateways_wait_for_proves_itself_at_once(
        self, engine: FakeVllm, uds: str, hearts: Heartbeats, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heartbeat, "IDLE_CHECK_S", 3600)
        engine.stuck = True
        hearts.watch("rested", where(uds))
        hearts.watch("r", where(uds))
        monkeypatch.setattr(coordination, "read", lambda _scopes: Owed({"r": 1}))
        until(lambda: (heard := hearts.heard("r")) is not None and not heard.healthy)
        heard, rested = hearts.heard("r"), hearts.heard("rested")
        assert heard is not None and heard.reason.startswith("idle, but: The test prompt got no answer")
        assert rested is not None and rested.healthy

    def test_one_that_steps_while_its_proof_waits_behind_others_is_not_stuck(
        self, engine: FakeVllm, uds: str, hearts: Heartbeats, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.stuck = True  # for the proof only: others take its seats
        hearts.watch("r", where(uds))
        until(lambda: engine.prompts >= 1)
        engine.steps += 1
        pulse = hearts._pulses["r"]
        until(lambda: pulse.proof.check is None)
        until(lambda: engine.prompts >= 2)
        heard = hearts.heard("r")
        assert heard is not None and heard.healthy

    def test_slots_that_cannot_be_read_make_nobody_suspicious(
        self, engine: FakeVllm, uds: str, hearts: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(_scopes: Any) -> Any:
            asked.append(1)
            raise coordination.Away("stopped")

        asked: list[int] = []
        monkeypatch.setattr(heartbeat, "IDLE_CHECK_S", 3600)
        monkeypatch.setattr(coordination, "read", away)
        hearts.watch("r", where(uds))
        until(lambda: len(asked) > 2)
        heard = hearts.heard("r")
        assert heard is not None and heard.healthy and not engine.prompts

    def test_an_idle_engine_that_gives_none_is_not_healthy(
        self, engine: FakeVllm, uds: str, hearts: Heartbeats
    ) -> None:
        engine.stuck = True  # its counters say that nothing runs, whatever waits before it
        hearts.watch("r", where(uds))
        until(lambda: (heard := hearts.heard("r")) is not None and not heard.healthy)
        heard = hearts.heard("r")
        assert heard is not None and heard.reason.startswith("idle, but: The test prompt got no answer")
        engine.stuck = False
        engine.released.set()
        engine.stepping = True
        until(lambda: (heard := hearts.heard("r")) is not None and heard.healthy)

    def test_silence_counts_from_the_first_question_without_an_answer(self, tmp_path: Path, hearts: Heartbeats) -> None:
        hearts.watch("r", where(str(tmp_path / "none.sock")))
        until(lambda: (heard := hearts.heard("r")) is not None and heard.silent_s > 0.05)
        hearts.forget("r")
        assert hearts.heard("r") is None


class TestLoans:
    """A lender is told what it may use of its pool, once, and again where it does something else."""

    @pytest.fixture
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> Pool:
        pool = Pool()
        monkeypatch.setattr(probe, "ask", lambda _where: Answer(True, "", pool.stats()))
        monkeypatch.setattr(probe, "limit_pool", pool.limit)
        return pool

    def test_it_is_told_once(self, hearts: Heartbeats, pool: Pool) -> None:
        hearts.watch("r", "http://127.0.0.1:1")
        hearts.lend("r", "/s", 1.0)
        pool.hear_more()
        assert pool.told == []
        for share, told in ((0.5, 50), (0.1, 10), (1.0, 100)):
            hearts.lend("r", "/s", share)
            until(lambda told=told: ("/s", told) in pool.told)  # type: ignore[misc]
            pool.hear_more()
        assert [blocks for _uds, blocks in pool.told] == [50, 10, 100], "30 is what the engine makes of 10"

    def test_it_is_told_again_after_a_restart_and_after_a_failure(self, hearts: Heartbeats, pool: Pool) -> None:
        pool.failures = 2
        hearts.watch("r", "http://127.0.0.1:1")
        hearts.lend("r", "/s", 0.5)
        until(lambda: pool.usable == 50)
        pool.usable = 100
        until(lambda: pool.usable == 50)
        hearts.watch("r", "http://127.0.0.1:2")  # another worker, of which nobody said yet that it lends
        pool.usable = 100
        pool.hear_more()
        assert pool.usable == 100
        hearts.lend("r", "/s2", 0.5)
        until(lambda: pool.usable == 50)
        assert pool.told[-1] == ("/s2", 50)

    def test_a_controller_that_does_not_lead_tells_nobody(self, hearts: Heartbeats, pool: Pool) -> None:
        hearts.watch("r", "http://127.0.0.1:1")
        hearts.lend("r", "/s", 0.5)
        until(lambda: pool.usable == 50)
        hearts.lend_nothing()
        pool.hear_more()
        pool.usable = 70  # as another controller wants it
        pool.hear_more()
        assert (pool.usable, pool.told) == (70, [("/s", 50)])

    @pytest.mark.parametrize(
        ("said", "usage", "wanted"),
        [
            ({"kv_usage": 0.5}, 0.5, 0.5),  # an engine that does not lend
            ({"held_blocks": 10, "kv_usage": 0.5}, 0.1, 0.1),
            ({"held_blocks": 10, "waiting_tokens": 320}, 0.1, 0.3),
            ({"held_blocks": 10, "waiting_tokens": 320, "running": 8}, 0.1, 0.1),  # they wait for a slot
            ({"held_blocks": 90, "waiting_tokens": 99_999}, 0.9, 1.0),
            ({"num_blocks": 0, "held_blocks": 0}, None, None),
        ],
    )
    def test_what_is_wanted_of_a_pool(self, said: dict[str, Any], usage: float | None, wanted: float | None) -> None:
        stats = {"num_blocks": 100, "block_size": 16, "running": 3, "max_num_seqs": 8, "waiting_tokens": 0} | said
        assert (placing.pool_usage(stats), placing.pool_wanted(stats)) == (usage, pytest.approx(wanted))
