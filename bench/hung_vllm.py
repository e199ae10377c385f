"""A vLLM that hangs: `python bench/hung_vllm.py [--json]`. About six minutes: it starts three times.

Beside the embedded engine behind one route, under load all the time. First its engine core is stopped (SIGSTOP): its
server goes on answering /health with 200, runs something and makes no step. Then its server is stopped: it answers
nothing. The bars: out of rotation within R24's N and a heartbeat, and within 10 s; stacks captured before it is killed;
no request that had no byte fails; ready again within a cold start and 30 s. A cold start is what its first one took under
that load. N is what the controller held it to, which must be max(10 s, 5 × the time of its largest step) as measured here
by prompts that fill its window, up to NOISE: the cores are not equally busy in both measurements.
Needs vLLM in .cache/runtimes (bench/rivals.sh vllm). Exit code 1: a rule does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import psutil

from bench.fleet import Load, ask
from bench.rules import tell
from bench.stack import MODEL, Stack, StackError, eventually
from bench.two_engines import ENVIRONMENT, RUNTIME, START_S

NAME = "on-vllm"
MODEL_FOLDER = "SmolLM2-135M-Instruct-hf"
STEPLESS_S = 10.0  # R24's N at the least
STEP_FACTOR = 5
NOISE = 2.0
WINDOW = 2048  # tokens, which are one step of this vLLM too
SILENT_S = 10.0
HEARTBEAT_S = 2.0
REPLACED_S = 30.0  # beyond a cold start
OUT = ("hung", "failed", "starting", "loading", "verifying")


def replica(stack: Stack) -> dict[str, Any]:
    facts = json.loads(stack.manage("deployment", "show", NAME, "--json"))
    return dict(facts["replicas"][0])


def in_state(stack: Stack, *states: str, timeout_s: float) -> float:
    """Seconds until its only replica is in one of the states."""
    began = time.monotonic()
    eventually(lambda: replica(stack)["state"] in states, timeout_s, StackError, pause_s=0.2)
    return time.monotonic() - began


def largest_step_s(pid: int, rounds: int = 3) -> float:
    """Seconds of a step as large as its window: the middle of what new prompts of that size took."""
    times = []
    arguments = psutil.Process(pid).cmdline()
    uds = arguments[arguments.index("--uds") + 1]
    with httpx.Client(transport=httpx.HTTPTransport(uds=uds), base_url="http://vllm", timeout=120) as client:
        for _ in range(rounds):
            prompt = [random.randint(1000, 9999) for _ in range(WINDOW - 1)]
            began = time.monotonic()
            answer = client.post("/v1/completions", json={"model": MODEL_FOLDER, "prompt": prompt, "max_tokens": 1})
            times.append(time.monotonic() - began)
            answer.raise_for_status()
    return statistics.median(times)


def deploy(stack: Stack, key: str) -> tuple[float, float]:
    """vLLM behind the route that there is. Seconds of its first start and of its largest step, under load."""
    stack.manage("runtime", "add", RUNTIME, "--path", str(ENVIRONMENT), timeout=600)
    stack.manage("model", "convert", "SmolLM2-135M-Instruct", timeout=600)
    small = (
        "--parameter",
        "max_num_seqs=4",
        "--parameter",
        f"max_model_len={WINDOW}",
        "--parameter",
        "enforce_eager=true",
    )
    model = ("--model", MODEL_FOLDER, "--engine", "vllm", "--runtime", "latest")
    stack.manage("deployment", "create", NAME, *model, *small)
    stack.manage("route", "set", MODEL, "--sticky", "no")
    load = Load(stack.port, key)
    load.start()
    cold_s = in_state(stack, "ready", timeout_s=START_S)
    step_s = largest_step_s(replica(stack)["pid"])  # as when it was verified: all of the load is with the other engine
    stack.manage("route", "target", MODEL, NAME)
    load.stop()
    return cold_s, step_s


def since(before: str, at: str) -> float:
    return (datetime.fromisoformat(at) - datetime.fromisoformat(before)).total_seconds()


def hang(stack: Stack, key: str, core: bool, cold_s: float) -> dict[str, Any]:
    """Stop one of its processes under load, and see what becomes of it."""
    worker = psutil.Process(replica(stack)["pid"])
    victims = [each for each in worker.children(recursive=True) if core] if core else [worker]
    load = Load(stack.port, key)
    load.start()
    eventually(lambda: len(load.asked) > 20, 120)
    stopped_at = datetime.now(UTC).isoformat()
    for victim in victims:
        os.kill(victim.pid, signal.SIGSTOP)
    out_s = in_state(stack, *OUT, timeout_s=60)
    back_s = in_state(stack, "ready", timeout_s=START_S)
    asked = load.stop()
    moves = [json.loads(line) for line in stack.manage("transitions", "--json", "--limit", "60").splitlines()]
    moves = [move for move in reversed(moves) if NAME in move["subject"] and move["at"] >= stopped_at]
    hung: dict[str, Any] = next((move for move in moves if move["new"] == "hung"), {})
    reason = str(hung.get("reason", ""))
    told = re.search(r"limit (\d+) s", reason)
    limit_s = int(told.group(1)) if told else STEPLESS_S  # a core that got stuck between two requests says none
    return {
        "limit_s": limit_s if core else SILENT_S,
        "out_of_rotation_s": round(out_s, 1),
        "ready_again_s": round(out_s + back_s, 1),
        "reason": reason,
        "states": {move["new"]: round(since(stopped_at, move["at"]), 1) for move in moves},
        "requests": len(asked),
        "lost_without_a_byte": sum(each.lost_without_a_byte for each in asked),
        "cut": sum(not each.ok and each.bytes > 0 for each in asked),
        "in_time": out_s <= (limit_s + HEARTBEAT_S if core else SILENT_S),
        "replaced_in_time": out_s + back_s <= cold_s + REPLACED_S,
    }


def stacks(stack: Stack) -> list[str]:
    """What was captured, newest first."""
    script = (
        "from console.fleet.models import StackCapture as S; import json;"
        "print(json.dumps([s.text for s in S.objects.all()]))"
    )
    return list(json.loads(stack.manage("shell", "--no-imports", "-c", script).splitlines()[-1]))


def run() -> dict[str, Any]:
    stack = Stack()
    try:
        stack.up()
        stack.wait_ready(120)
        key = stack.key()
        cold_s, step_s = deploy(stack, key)
        for number in range(4):
            assert ask(stack.port, key, f"warm up {number}").ok
        stepless_s = max(STEPLESS_S, STEP_FACTOR * step_s)
        core, server = (hang(stack, key, core, cold_s) for core in (True, False))
        captured = stacks(stack)
    finally:
        stack.close()
    cases = {"core_stopped": core, "server_stopped": server}
    rules = {f"{name}: {rule}": case[rule] for name, case in cases.items() for rule in ("in_time", "replaced_in_time")}
    rules |= {f"{name}: nothing lost without a byte": case["lost_without_a_byte"] == 0 for name, case in cases.items()}
    rules["N is what R24 says"] = core["limit_s"] <= stepless_s * NOISE
    rules["stacks of both were captured"] = len(captured) >= 2 and all(captured[:2])
    facts = {"cold_start_s": round(cold_s, 1), "largest_step_s": round(step_s, 2), "n_s": round(stepless_s, 1)}
    return {**facts, **cases, "stack": captured[-1][:400] if captured else "", "rules": rules}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if not (ENVIRONMENT / "bin" / "python").exists():
        print("NOT RUN: needs vLLM in .cache/runtimes (bench/rivals.sh vllm).", file=sys.stderr)
        return 1
    return tell(run(), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
