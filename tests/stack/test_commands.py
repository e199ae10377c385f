"""The installation as a script sees it: start, status, refusals, recovery, backup, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from datetime import datetime
from pathlib import Path

import openai
import psutil
import pytest

from bench.stack import MODEL, Stack, StackError, eventually, get, now

KEY_PATTERN = re.compile(rb"fl-[A-Za-z0-9_-]{43}[0-9a-f]{6}")


def ask(stack: Stack, key: str) -> str:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key)
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=3, temperature=0
    )
    return answer.choices[0].message.content or ""


def test_status_names_every_process_and_replica(stack: Stack) -> None:
    status = stack.status()
    assert status["url"] == stack.url
    names = {each["name"] for each in status["processes"]}
    assert {"postgres", "valkey", "web", "shipper", "controller", "jobs", "beat"} <= names
    assert all(each["pid"] and each["state"] == "running" for each in status["processes"])
    replica = status["replicas"][0]
    assert set(replica) >= {"id", "model", "state", "reason", "pid", "metrics_url"}
    assert "vllm:num_requests_running" in get(replica["metrics_url"])


def test_a_second_up_changes_nothing(stack: Stack) -> None:
    before = stack.status()["processes"]
    assert "already up" in stack.up()
    assert stack.status()["processes"] == before


def test_the_first_secrets_are_in_a_private_file(stack: Stack) -> None:
    path = stack.data / "first-credentials.json"
    assert path.stat().st_mode & 0o777 == 0o600
    credentials = json.loads(path.read_text())
    assert ask(stack, credentials["api_key"])
    assert credentials["tenant"] == "default"


def test_workers_get_no_secret_and_their_socket_is_private(stack: Stack) -> None:
    environ = Path(f"/proc/{stack.pid('worker')}/environ").read_bytes()
    ours = [entry for entry in environ.split(b"\0") if b"FANLIGHT" in entry]
    assert ours == [f"FANLIGHT_NATIVE_CACHE={stack.data / 'native'}".encode()]
    sockets = list((stack.data / "run" / "w").glob("*.sock"))
    assert sockets
    assert all(path.parent.stat().st_mode & 0o077 == 0 for path in sockets)
    with pytest.raises(OSError, match="404"):
        get(stack.status()["replicas"][0]["metrics_url"].replace("/metrics", "/v1/models"))


def test_no_key_is_in_any_log_or_journal(stack: Stack, key: str) -> None:
    ask(stack, key)
    for folder in ("logs", "journal", "workers", "run"):
        for path in (stack.data / folder).rglob("*"):
            if path.is_file():
                assert not KEY_PATTERN.search(path.read_bytes()), path


def test_the_gateways_metrics_are_prometheus_text(stack: Stack, key: str) -> None:
    ask(stack, key)
    text = get(f"{stack.url}/metrics")
    assert "fanlight_build_info" in text
    assert "fanlight_requests_total" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"PROT": "1"}, "FANLIGHT_PROT is not a setting"), ({"PORT": "nine"}, "FANLIGHT_PORT")],
)
def test_a_bad_setting_stops_the_start_with_its_name(settings: dict[str, str], message: str) -> None:
    other = Stack(**settings)
    try:
        with pytest.raises(StackError, match=message):
            other.up()
    finally:
        other.close()


def test_a_taken_port_is_named_and_leaves_nothing_running() -> None:
    other = Stack()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", other.port))
        taken.listen()
        try:
            with pytest.raises(StackError, match=f"Port {other.port} on 127.0.0.1 is taken"):
                other.up()
            eventually(lambda: not other.processes(), 10)
        finally:
            other.close()


def test_a_nearly_full_disk_refuses_the_start() -> None:
    other = Stack(MIN_FREE_DISK_BYTES=str(1 << 49))
    try:
        with pytest.raises(StackError, match="are free on the disk"):
            other.up()
    finally:
        other.close()


def test_a_second_installation_survives_a_power_cut_and_keeps_its_ledger(stack: Stack, key: str) -> None:
    """Side by side with the first: kill -9 of everything, up again, same keys, same ledger, backup, restore, down."""
    other = Stack()
    restored = Stack()
    try:
        other.up()
        since = now()
        other_key = other.key()
        eventually(lambda: ask(other, other_key), 10, openai.AuthenticationError)
        assert ask(stack, key)
        other.settled(since, 1)
        other.kill_everything()
        eventually(lambda: not other.processes(), 10)
        assert other.manage("down").strip().endswith("not running.")
        other.up()
        other.wait_ready()
        assert ask(other, other_key)
        before = other.settled(since, 2)

        folder = other.manage("backup").strip()
        restored.manage("restore", folder)
        restored.up()
        assert restored.usage(since)[: len(before)] == before
        eventually(lambda: ask(restored, other_key), 10, openai.AuthenticationError)
        restored.down()
        other.down()
        assert other.processes() == restored.processes() == []
    finally:
        restored.close()
        other.close()


def command_of(pid: int) -> str:
    """For a person who reads why a test failed."""
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())[:160]
    return "gone"


def test_a_supervisor_killed_alone_takes_all_but_the_worker_along_and_down_ends_that() -> None:
    other = Stack()
    try:
        other.up()
        other.wait_ready()
        worker = other.pid("worker")
        os.kill(other.pid("supervisor"), signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # what is left then tells more than that something is
            eventually(lambda: len(other.processes()) == 2, 30)
        left = {pid: command_of(pid) for pid in other.processes()}
        assert worker in left and len(left) == 2, left  # the worker and its shim
        assert "not running" in other.manage("down")
        assert other.processes() == []
    finally:
        other.close()


def test_a_killed_controller_adopts_the_worker_that_runs(stack: Stack, key: str) -> None:
    worker, controller = stack.pid("worker"), stack.pid("controller")
    epochs = (stack.data / "logs" / "controller.log").read_text().count("leading under epoch")
    os.kill(controller, signal.SIGKILL)
    log = stack.data / "logs" / "controller.log"
    eventually(lambda: log.read_text().count("leading under epoch") > epochs, 30)
    assert stack.pid("controller") != controller
    assert stack.pid("worker") == worker
    assert ask(stack, key)


def test_jobs_are_silent_about_root_and_outlive_valkey(stack: Stack) -> None:
    """kill -9 of the broker: worker and beat go on, and a job that is sent afterwards is done."""
    before = {name: stack.pid(name) for name in ("jobs", "beat", "valkey")}
    assert "superuser" not in (stack.data / "logs" / "jobs.log").read_text()
    os.kill(before["valkey"], signal.SIGKILL)
    eventually(lambda: stack.pid("valkey") not in {0, before["valkey"]}, 20, TypeError)
    call = (
        "from console.celery import app; from console.telemetry.tasks import drop_old_partitions as job;"
        "print(job.apply_async(ignore_result=True).id); "
    )
    wait = (
        "import time, redis; from django.conf import settings;"
        "broker = redis.Redis(unix_socket_path=str(settings.LAYOUT.valkey_socket), db=1)\n"
        "while broker.llen('celery') or broker.hlen('unacked'): time.sleep(0.05)"
    )
    eventually(lambda: stack.manage("shell", "-c", call + wait, timeout=30), 40, StackError)
    assert {name: stack.pid(name) for name in ("jobs", "beat")} == {name: before[name] for name in ("jobs", "beat")}


def test_a_killed_web_process_loses_no_request(stack: Stack, key: str) -> None:
    since = now()
    pid = stack.pid("web")
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)
    stream = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell a long story."}], stream=True, max_tokens=500,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    received = 0
    with pytest.raises(Exception, match=r".*"):
        for chunk in stream.parse():
            received += bool(chunk.choices and chunk.choices[0].delta.content)
            if received == 10:
                os.kill(pid, signal.SIGKILL)
    request_id = stream.headers["x-request-id"]
    records = eventually(
        lambda: [each for each in stack.usage(since) if each["request_id"] == request_id],
        30,
        StackError,
    )
    assert len(records) == 1
    assert records[0]["outcome"] == "gateway_lost"
    assert records[0]["completion_tokens"] >= received
    eventually(lambda: ask(stack, key), 30, openai.APIError)


def test_a_hanging_database_stops_no_request_and_loses_none(stack: Stack, key: str) -> None:
    since = now()
    postgres = stack.pid("postgres")
    children = Path(f"/proc/{postgres}/task/{postgres}/children").read_text().split()
    family = [postgres, *map(int, children)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            assert ask(stack, key)
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)
    assert len(stack.settled(since, 3)) == 3


def test_usage_lines_hold_what_scripts_rely_on(stack: Stack, key: str) -> None:
    since = now()
    ask(stack, key)
    record = stack.settled(since, 1)[0]
    assert set(record) == {
        "request_id", "key_id", "tenant", "model", "outcome", "prompt_tokens", "cached_tokens", "completion_tokens",
        "price_version", "currency", "cost", "requests", "started_at",
    }  # fmt: skip
    assert datetime.fromisoformat(record["started_at"]).tzinfo is not None
