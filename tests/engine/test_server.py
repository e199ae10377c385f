"""A real engine process, driven by the official OpenAI client."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.served import NAME, Served, serve

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a long story about the sea."}]


def aclient(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def chat(served: Served, **fields: Any) -> Any:
    settings = {"model": NAME, "messages": FRANCE, "temperature": 0, "max_tokens": 32} | fields
    return served.api.chat.completions.create(**settings)


def content(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def post(served: Served, body: dict[str, Any], path: str = "chat/completions") -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json={"model": NAME, **body}, timeout=60)


def test_paris_streaming_and_not_is_the_same_text(served: Served) -> None:
    whole = chat(served)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.id.startswith("chatcmpl-")
    chunks = list(chat(served, stream=True))
    assert content(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


async def test_the_async_client_works_too(served: Served) -> None:
    async with aclient(served) as api:
        stream = await api.chat.completions.create(model=NAME, messages=FRANCE, temperature=0, stream=True)
        assert "Paris" in content([chunk async for chunk in stream])


def test_the_usage_chunk_comes_last_and_only_when_asked(served: Served) -> None:
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage == chat(served).usage.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details})
    assert not any(chunk.usage for chunk in chat(served, stream=True))


def test_continuous_usage_counts_tokens_whose_text_is_held_back(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(served, stream=True, stream_options=options, extra_body={"stop": ["Paris!"]}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    # Tokens that are ready together may share a chunk: a count can be skipped, but none goes back.
    assert counts == sorted(counts)
    assert counts[-1] == chat(served, extra_body={"stop": ["Paris!"]}).usage.completion_tokens
    assert any(not chunk.choices[0].delta.content and chunk.choices[0].finish_reason is None for chunk in chunks[1:-1])


def test_stop_strings_never_show(served: Served) -> None:
    full = chat(served).choices[0].message.content
    stop = full[8:14]
    whole = chat(served, stop=stop)
    assert whole.choices[0].message.content == full[: full.find(stop)]
    assert whole.choices[0].finish_reason == "stop"
    assert content(list(chat(served, stop=[stop], stream=True))) == full[: full.find(stop)]


def test_completions_take_text_and_token_ids(served: Served) -> None:
    api = served.api.completions
    text = api.create(model=NAME, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert text.object == "text_completion"
    assert text.choices[0].finish_reason == "length"
    assert text.usage.completion_tokens == 8
    chunks = list(
        api.create(
            model=NAME,
            prompt=["The capital of France is"],
            temperature=0,
            max_tokens=8,
            stream=True,
        )
    )
    assert "".join(c.choices[0].text for c in chunks) == text.choices[0].text
    ids = api.create(model=NAME, prompt=[504, 3575, 282], temperature=0, max_tokens=4)
    assert ids.usage.prompt_tokens == 3


def test_a_seed_repeats_and_other_seeds_differ(served: Served) -> None:
    def said(seed: int) -> str:
        answer = chat(served, messages=STORY, temperature=1.0, seed=seed, top_p=0.95, max_tokens=12)
        return str(answer.choices[0].message.content)

    assert said(1) == said(1)
    assert len({said(seed) for seed in range(4)}) > 1


def test_n_choices_share_the_prompt_and_sum_their_tokens(served: Served) -> None:
    whole = chat(served, messages=STORY, temperature=1.0, n=3, max_tokens=8)
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert len({c.message.content for c in whole.choices}) > 1
    assert whole.usage.completion_tokens == 24
    chunks = list(chat(served, messages=STORY, temperature=1.0, n=2, max_tokens=8, stream=True))
    ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]


def test_logprobs_come_with_each_token(served: Served) -> None:
    whole = chat(served, logprobs=True, top_logprobs=2)
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    assert tokens[0].token == tokens[0].top_logprobs[0].token
    assert bytes(tokens[0].bytes).decode() == tokens[0].token
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in tokens)
    text = served.api.completions.create(model=NAME, prompt="The capital", logprobs=1, max_tokens=3, temperature=0)
    assert len(text.choices[0].logprobs.token_logprobs) == 3


def test_null_content_and_parts_are_answered(served: Served) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Say hi."}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Again."},
    ]
    assert post(served, {"messages": messages, "max_tokens": 4}).status_code == 200


def test_errors_arrive_as_their_sdk_classes(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(served, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        chat(served, messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wide:
        chat(served, max_tokens=8192)
    assert wide.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        chat(served, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as echo:
        served.api.completions.create(model=NAME, prompt="a", max_tokens=1, echo=True)
    assert (echo.value.param, "cannot do it yet" in echo.value.message) == ("echo", True)
    with pytest.raises(openai.BadRequestError) as token:
        served.api.completions.create(model=NAME, prompt=[999_999], max_tokens=1)
    assert token.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as bias:
        chat(served, logit_bias={"999999": 1})
    assert bias.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError) as stop:
        chat(served, extra_body={"stop_token_ids": [999999]})
    assert stop.value.param == "stop_token_ids"
    with pytest.raises(openai.BadRequestError) as empty:
        served.api.completions.create(model=NAME, prompt="", max_tokens=1)
    assert empty.value.param == "prompt"


def test_unknown_paths_and_methods_have_an_envelope(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/nothing").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{served.url}/v1/chat/completions").status_code == 405
    assert httpx.post(f"{served.url}/health").status_code == 405
    broken = httpx.post(f"{served.url}/v1/chat/completions", content=b"{")
    assert broken.status_code == 400


def test_the_request_id_comes_back_on_every_answer(served: Served) -> None:
    headers = {"x-request-id": "mine-1"}
    good = httpx.get(f"{served.url}/v1/models", headers=headers)
    bad = httpx.get(f"{served.url}/v1/models/none", headers=headers)
    assert good.headers["x-request-id"] == bad.headers["x-request-id"] == "mine-1"
    evil = httpx.get(f"{served.url}/health", headers={"x-request-id": "a b<script>"})
    assert "script" not in evil.headers["x-request-id"]
    body = {"messages": FRANCE, "max_tokens": 1, "request_id": "from-body"}
    answer = post(served, body)
    assert answer.headers["x-request-id"] == "from-body"
    assert answer.json()["id"] == "chatcmpl-from-body"


def test_models_show_their_window(served: Served) -> None:
    models = served.api.models.list().data
    assert [model.id for model in models] == [NAME]
    assert models[0].max_model_len == 8192  # type: ignore[attr-defined]
    assert served.api.models.retrieve(NAME).owned_by == "fanlight"
    with pytest.raises(openai.NotFoundError):
        served.api.models.retrieve("other")


def test_a_salt_isolates_and_shares_the_prefix_cache(served: Served) -> None:
    """Same salt hits, another salt and no salt do not."""

    def cached(salt: str | None) -> int:
        body: dict[str, Any] = {"prompt": "lighthouse keeper " * 60, "max_tokens": 1}
        if salt is not None:
            body["cache_salt"] = salt
        usage = post(served, body, "completions").json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("salt-a") == 0
    assert cached("salt-a") >= 100
    assert cached("salt-b") == 0
    assert cached(None) == 0


def events(report: dict[str, Any]) -> dict[str, Any]:
    return {name: (at, args) for name, at, args in report["events"]}


def test_the_timeline_is_on_the_first_content_chunk_and_the_last(served: Served) -> None:
    body = {
        "model": NAME,
        "messages": FRANCE,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{served.url}/v1/chat/completions"
    lines = httpx.post(url, json=body, headers={"x-fanlight-timeline": "1"}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    reports = [chunk["fanlight"] for chunk in chunks if "fanlight" in chunk]
    assert [at for at, chunk in enumerate(chunks) if "fanlight" in chunk] == [1, len(chunks) - 1]
    assert chunks[-1]["choices"] == []
    first, last = events(reports[0]), events(reports[1])
    order = ["RECEIVED", "TOKENIZED", "QUEUED", "SCHEDULED", "CHUNK", "FIRST_TOKEN", "STREAM_START"]
    assert list(first) == order
    assert list(last) == [*order, "FINISHED"]
    stamps = [at for at, _ in last.values()]
    assert stamps == sorted(stamps)
    assert last["TOKENIZED"][1]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
    assert last["FINISHED"][1]["reason"] == "stop"
    report = reports[1]
    assert report["anchor"]["mono_ns"] == last["RECEIVED"][0]
    assert report["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert report["cached_tokens"] + report["computed_tokens"] == last["TOKENIZED"][1]["prompt_tokens"]
    whole = httpx.post(
        url,
        json=body | {"stream": False, "stream_options": None},
        headers={"x-fanlight-timeline": "1"},
    )
    assert "FINISHED" in events(whole.json()["fanlight"])
    assert "fanlight" not in post(served, {"messages": FRANCE, "max_tokens": 1}).json()


async def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    """Streaming and not: the sequence is aborted, and nothing runs or is held afterwards."""
    body = {
        "model": NAME,
        "messages": STORY,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    before = served.wait_idle()
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as api:
        async with api.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            lines = answer.aiter_lines()
            for _ in range(9):
                await anext(lines)
        plain = {key: value for key, value in body.items() if key != "stream_options"}
        pending = asyncio.create_task(api.post("/v1/chat/completions", json=plain))
        await asyncio.to_thread(served.wait_for, lambda s: s["running"] == 1)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        after = await asyncio.to_thread(served.wait_idle)
    aborted = after["requests_finished"]["abort"] - before["requests_finished"].get("abort", 0)
    assert aborted == 2
    assert after["generation_tokens"] - before["generation_tokens"] < 4000


async def test_32_mixed_streams_complete_and_every_token_is_accounted(served: Served) -> None:
    """Sums of reported usage equal the engine's counters; all blocks are free afterwards."""
    before = served.wait_idle()

    async def one(api: openai.AsyncOpenAI, at: int) -> tuple[int, int]:
        stream = await api.completions.create(
            model=NAME,
            prompt=f"Number {at}. " + "the quick brown fox " * (at * 3 % 40),
            max_tokens=4 + at % 13,
            temperature=at % 3 / 2,
            seed=at,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-2].choices[0].finish_reason in ("length", "stop")
        return chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens

    async with aclient(served) as api:
        usages = await asyncio.gather(*(one(api, at) for at in range(32)))
    after = await asyncio.to_thread(served.wait_idle)

    def gained(name: str) -> int:
        return int(after[name] - before[name])

    assert gained("prompt_tokens") == sum(prompt for prompt, _ in usages)
    assert gained("generation_tokens") == sum(completion for _, completion in usages)
    assert gained("undelivered_tokens") == 0


async def test_greedy_answers_do_not_depend_on_company(served: Served) -> None:
    """A greedy request among seven sampled ones says what it says alone."""
    alone = chat(served).choices[0].message.content
    async with aclient(served) as api:

        async def ask(at: int) -> str | None:
            answer = await api.chat.completions.create(
                model=NAME,
                messages=FRANCE if at == 0 else STORY,
                temperature=0 if at == 0 else 1,
                max_tokens=16,
            )
            return answer.choices[0].message.content

        answers = await asyncio.gather(*(ask(at) for at in range(8)))
    assert answers[0] == alone


async def test_a_reader_that_stops_reading_slows_nobody(served: Served) -> None:
    """One client takes the headers and no more; others stream on, and its leaving frees blocks."""
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": NAME,
            "messages": STORY,
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
    )
    request = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    before = served.wait_idle()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        lazy.sendall(request.encode())
        await asyncio.to_thread(
            served.wait_for,
            lambda s: s["generation_tokens"] > before["generation_tokens"] + 60,
        )
        answer = await asyncio.to_thread(chat, served)
        assert "Paris" in answer.choices[0].message.content
    await asyncio.to_thread(served.wait_idle)


def test_metrics_agree_with_stats_under_vllm_names(served: Served) -> None:
    chat(served)
    stats = served.wait_idle()
    text = httpx.get(f"{served.url}/metrics").text
    samples = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert samples["vllm:generation_tokens_total", None] == stats["generation_tokens"]
    assert samples["vllm:prompt_tokens_total", None] == stats["prompt_tokens"]
    assert samples["vllm:prefix_cache_hits_total", None] == stats["prefix_hit_tokens"]
    assert samples["vllm:num_requests_running", None] == 0
    assert samples["vllm:kv_cache_usage_perc", None] == 0
    assert samples["vllm:iteration_tokens_total_count", None] == stats["steps"]
    assert samples["vllm:request_success_total", "stop"] == stats["requests_finished"]["stop"]
    assert samples["fanlight:free_blocks", None] == samples["fanlight:total_blocks", None]
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "e2e_request_latency",
    ):
        assert samples[f"vllm:{name}_seconds_count", None] > 0, name
    assert 'block_size="16"' in text


def test_health_and_version(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/version").json()["version"] == served.facts["engine_version"]


def test_a_unix_socket_a_key_and_a_drain(bundled_model: Path, tmp_path: Path) -> None:
    """Inference only on the socket and with the key; SIGTERM lets the running stream finish."""
    key = tmp_path / "key"
    key.write_text("secret-key\n")
    options = ("--api-key-file", str(key), "--log-json", "--max-queued", "1", "--num-blocks", "64")
    with serve(bundled_model, tmp_path, *options, uds=True) as engine:
        path = Path(engine.facts["uds"])
        assert path.stat().st_mode & 0o777 == 0o600
        assert engine.facts["max_model_len"] == 1024
        assert httpx.get(f"{engine.url}/health").status_code == 200
        assert httpx.post(f"{engine.url}/v1/chat/completions", json={}).status_code == 404
        assert httpx.get(f"{engine.url}/v1/models").status_code == 404
        assert httpx.put(f"{engine.url}/pool", json={"usable_blocks": 1}).status_code == 404
        transport = httpx.HTTPTransport(uds=str(path))
        auth = {"authorization": "Bearer secret-key"}
        with httpx.Client(transport=transport, base_url="http://engine", timeout=60) as api:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                refused = api.get("/v1/models", headers=headers)
                assert refused.status_code == 401
                assert api.put("/pool", json={"usable_blocks": 1}, headers=headers).status_code == 401
                assert "secret" not in refused.text
            assert api.get("/v1/models", headers=auth).status_code == 200
            body = {"model": NAME, "messages": STORY, "max_tokens": 40, "ignore_eos": True}
            two = api.post("/v1/chat/completions", json=body | {"n": 2}, headers=auth)
            assert two.status_code == 503
            assert int(two.headers["retry-after"]) >= 1
            with api.stream("POST", "/v1/chat/completions", json=body | {"stream": True}, headers=auth) as answer:
                lines = answer.iter_lines()
                next(lines)
                engine.process.send_signal(signal.SIGTERM)
                rest = list(lines)
            assert rest[-2] == "data: [DONE]" or rest[-1] == "data: [DONE]"
        assert engine.process.wait(30) == 0
        log = [json.loads(line) for line in engine.log.read_text().splitlines()]
        assert [entry["event"] for entry in log][-3:] == ["ready", "draining", "stopped"]
        assert log[0]["event"] == "loading"
        assert not path.exists()


def test_a_second_signal_stops_at_once(bundled_model: Path, tmp_path: Path) -> None:
    with serve(bundled_model, tmp_path, "--num-blocks", "512") as engine:
        body = {"model": NAME, "messages": STORY, "max_tokens": 4000, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{engine.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.process.send_signal(signal.SIGTERM)
            # Two equal signals at once are one; the second must find the first handled.
            engine.wait_for_log("draining")
            engine.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                while "error" not in next(lines):
                    pass
                raise httpx.ReadError("an error event is as good as a cut")
        assert engine.process.wait(20) == 0


def test_a_drain_that_takes_too_long_ends_streams_with_an_error(bundled_model: Path, tmp_path: Path) -> None:
    with serve(bundled_model, tmp_path, "--num-blocks", "512", "--drain-seconds", "0.5") as engine:
        body = {"model": NAME, "messages": STORY, "max_tokens": 8000, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{engine.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["message"] == "The engine is shutting down."
        assert engine.process.wait(30) == 0


PHASES = {
    "tokenize": ("RECEIVED", "TOKENIZED", 100),
    "engine_queue": ("QUEUED", "SCHEDULED", 200),
    "prefill": ("SCHEDULED", "FIRST_TOKEN", 300),
    "decode": ("FIRST_TOKEN", "FINISHED", 400),
}


def test_each_fault_delay_lands_in_its_phase_once(bundled_model: Path, tmp_path: Path) -> None:
    """A prompt of several chunks and several tokens: every phase sleeps, none twice."""
    options = [f"--fault-delay={phase}={ms}" for phase, (_, _, ms) in PHASES.items()]
    options += ["--num-blocks=64", "--max-num-batched-tokens=64"]
    with serve(bundled_model, tmp_path, *options) as engine:
        body = {"model": NAME, "prompt": "lighthouse keeper " * 60, "max_tokens": 5}
        answer = httpx.post(
            f"{engine.url}/v1/completions",
            json=body | {"ignore_eos": True},
            headers={"x-fanlight-timeline": "1"},
            timeout=60,
        )
        seen = events(answer.json()["fanlight"])
        steps = engine.stats()["step_ms_p99"]
    for first, last, ms in PHASES.values():
        assert seen[last][0] - seen[first][0] >= ms * 1e6
    assert steps < 1000, "a sleep of 300 or 400 ms happened twice in one step"


def test_a_hung_engine_says_so(bundled_model: Path, tmp_path: Path) -> None:
    """The step thread stops while a request runs: /health turns 503 with a reason, /stats lives."""
    option = ("--fault-delay", "hang=1", "--num-blocks", "64")
    with serve(bundled_model, tmp_path, *option) as engine:
        body = {"model": NAME, "messages": STORY, "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
            engine.wait_for(lambda s: s["last_step_age_s"] > 10)
            health = httpx.get(f"{engine.url}/health")
            assert health.status_code == 503
            assert "no step for" in health.json()["reason"]
            assert post(engine, body).status_code == 503


async def test_40_clients_that_hang_up_at_random_leave_nothing_behind(served: Served) -> None:
    """generation_tokens = what each client was last told + what nobody was told."""
    before = served.wait_idle()
    chance = random.Random(7)

    async def one(api: httpx.AsyncClient, at: int) -> int:
        body = {
            "model": NAME,
            "prompt": f"{at} " + "lighthouse keeper " * (at % 7 * 20),
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        told, leave_after = 0, chance.randint(0, 12)
        async with api.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    told = json.loads(line[6:])["usage"]["completion_tokens"]
                if told >= leave_after:
                    break
        return told

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as api:
        told = await asyncio.gather(*(one(api, at) for at in range(40)))
    after = await asyncio.to_thread(served.wait_idle)
    generated = after["generation_tokens"] - before["generation_tokens"]
    undelivered = after["undelivered_tokens"] - before["undelivered_tokens"]
    # A chunk may have been sent that its client, already leaving, did not read.
    assert sum(told) <= generated - undelivered <= generated < 40 * 500
    aborted = after["requests_finished"]["abort"] - before["requests_finished"].get("abort", 0)
    assert aborted == 40


async def test_a_pool_too_small_for_all_preempts_and_still_answers_right(bundled_model: Path, tmp_path: Path) -> None:
    """Five greedy streams that cannot all fit: somebody is preempted, and nobody's text changes."""
    options = ("--num-blocks", "10", "--num-host-blocks", "40", "--dtype", "fp32")
    body = {"model": NAME, "max_tokens": 36, "temperature": 0, "ignore_eos": True}

    async def ask(api: httpx.AsyncClient, at: int) -> str:
        answer = await api.post("/v1/completions", json=body | {"prompt": f"Chapter {at}. The"})
        return str(answer.json()["choices"][0]["text"])

    with serve(bundled_model, tmp_path, *options) as engine:
        async with httpx.AsyncClient(base_url=engine.url, timeout=120) as api:
            together = await asyncio.gather(*(ask(api, at) for at in range(5)))
            stats = engine.stats()
            assert stats["preemptions"] == sum(stats["preemptions_by_kind"].values())
            assert stats["preemptions_by_kind"]["swap"] > 0
            assert stats["swapped_out_blocks"] >= stats["host_blocks_used"] > 0
            alone = [await ask(api, at) for at in (0, 4)]
        engine.wait_idle()
    assert [together[0], together[4]] == alone
