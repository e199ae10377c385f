"""Embeddings: every state is pooled once, whatever the schedule; vectors are those of transformers."""

from __future__ import annotations

import base64
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.embeddings import Pool, gather, pooling_of
from engine.errors import ConfigError, UnsupportedModel
from engine.grammar import NO_MASKS
from engine.hostcache import HostCache
from engine.model.loader import load_model
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.server.embedding import MAX_INPUTS
from engine.tokenizer import Tokenizer, from_folder, from_gguf
from engine.types import FinishReason, Sampled, SamplingParams, Step
from tests.engine.fakes import HashRunner
from tests.engine.served import NAME, Served, serve
from tests.engine.test_families import SIZES, VOCAB, fused, llama, saved
from tests.engine.test_numerics import Bench
from tests.engine.test_sentencepiece import META

TEXTS = ["The capital of France is Paris.", "Paris is the capital of France.", "def f(x): return x", "Ü" * 200]


class StateRunner(HashRunner):
    """Its state of a token is (1, the token), so that a mean tells how many were pooled, and which."""

    def sample(self, step: Step, computed: object, masks: Any = NO_MASKS) -> dict[int, Sampled]:
        states = [[1.0, token] for chunk in step.chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]
        gather(step.chunks, np.array(states, np.float32))
        return super().sample(step, computed, masks)


def pooled(id: int, prompt: list[int], kind: str) -> Sequence:
    return Sequence(id, prompt, SamplingParams(max_tokens=0), pool=Pool(kind))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), cached=st.booleans(), host=st.sampled_from([0, 12]))
def test_any_schedule_pools_every_token_once(seed: int, cached: bool, host: int) -> None:
    """Beside generations that preempt them, with shared prefixes, in pools that are too small."""
    random_ = random.Random(seed)
    limits = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=9, prefix_cache=cached)
    scheduler = Scheduler(BlockPool(16, 4), limits, HostCache(host if cached else 0))
    runner = StateRunner(16, 4, host)
    prefix = [random_.randrange(97) for _ in range(20)]
    sequences = []
    for id in range(12):
        prompt = prefix[: random_.randrange(20)] + [random_.randrange(97) for _ in range(random_.randrange(1, 9))]
        kind = random_.choice(["mean", "last", None])
        generates = Sequence(id, prompt, SamplingParams(max_tokens=random_.randrange(1, 12)))
        sequences.append(pooled(id, prompt, kind) if kind else generates)
    ended: list[Sequence] = []
    waiting = list(sequences)
    while waiting or scheduler.has_work:
        for _ in range(random_.randrange(3)):
            if waiting:
                scheduler.add(waiting.pop(0))
        if scheduler.can_step:
            step = scheduler.schedule()
            ended += scheduler.complete(step, runner.sample(step, runner.forward(step)))
            scheduler.check()
    assert {s.id for s in ended} == {s.id for s in sequences if s.pool}
    for sequence in ended:
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.num_output == 0
        assert sequence.pool is not None
        last = np.array([1.0, sequence.tokens[-1]])
        expected = last if sequence.pool.kind == "last" else np.array([1.0, np.mean(sequence.tokens)])
        np.testing.assert_allclose(sequence.pool.vector(), expected / np.linalg.norm(expected), rtol=1e-5)


def test_a_mean_reads_no_prefix_cache_and_a_last_token_does() -> None:
    scheduler, runner = Scheduler(BlockPool(32, 4), SchedulerLimits()), StateRunner(32, 4)
    for id, kind in enumerate(["mean", "mean", "last"]):
        scheduler.add(pooled(id, list(range(20)), kind))
        step = scheduler.schedule()
        (ended,) = scheduler.complete(step, runner.sample(step, runner.forward(step)))
        assert ended.num_cached == (16 if kind == "last" else 0)
    assert (scheduler.counts.prompt_tokens, scheduler.counts.prefix_query_tokens) == (60, 20)
    assert scheduler.counts.generation_tokens == 0


@torch.inference_mode()
def test_plain_vectors_are_those_of_transformers(tmp_path: Path) -> None:
    """Means and last tokens in one batch with a generation, in chunks; also of a model saved without its head."""
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    bench = Bench(load_model(tmp_path, torch.float32, torch.device("cpu")), batched=64)
    prompts = [torch.randint(0, VOCAB, (n,)).tolist() for n in (1, 5, 90, 200)]
    kinds = ["mean", "last", "mean", "last"]
    batch = [pooled(id, prompt, kind) for id, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))]
    for sequence in [*batch, Sequence(9, prompts[2], SamplingParams(8, temperature=0.0))]:
        bench.scheduler.add(sequence)
    play(bench.scheduler, bench.runner)
    for sequence, kind in zip(batch, kinds, strict=True):
        states = model(torch.tensor([sequence.tokens])).last_hidden_state[0]
        theirs = torch.nn.functional.normalize(states.mean(0) if kind == "mean" else states[-1], dim=0)
        assert sequence.pool is not None
        np.testing.assert_allclose(sequence.pool.vector(), theirs, atol=1e-5)


@torch.inference_mode()
def test_fused_vectors_are_close_and_the_same_in_any_batch(tmp_path: Path) -> None:
    from engine.fused_runner import FusedRunner
    from engine.sampler import Sampler

    model = saved(llama, "default", tmp_path)
    prompts = [torch.randint(0, VOCAB, (n,)).tolist() for n in (3, 60, 150)]
    with fused(tmp_path, prompts[1]) as native:
        runner = FusedRunner(native, Sampler())

        def vectors(batched: int, *ids: int) -> list[Any]:
            limits = SchedulerLimits(max_num_batched_tokens=batched, prefix_cache=False)
            scheduler = Scheduler(BlockPool(32, 16), limits)
            batch = [pooled(id, prompts[id], "mean") for id in ids]
            for sequence in batch:
                scheduler.add(sequence)
            play(scheduler, runner)
            return [sequence.pool.vector() for sequence in batch if sequence.pool]

        together = vectors(512, 0, 1, 2)
        for id, (prompt, ours) in enumerate(zip(prompts, together, strict=True)):
            states = model.model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            assert float(ours @ torch.nn.functional.normalize(states, dim=0).numpy()) > 0.995
            np.testing.assert_allclose(vectors(64, id)[0], ours, atol=1e-7)


def play(scheduler: Scheduler, runner: Any) -> None:
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step)))


# -- What the model's files say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None),
    ],
)
def test_pooling_of_a_sentence_transformers_folder(tmp_path: Path, raw: dict[str, Any], expected: str | None) -> None:
    assert pooling_of(tmp_path, {}) is None
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(raw))
    if expected is not None:
        assert pooling_of(tmp_path, {}) == expected
        (tmp_path / "2_Dense").mkdir()
    with pytest.raises(UnsupportedModel, match="pooling by|2_Dense projects"):
        pooling_of(tmp_path, {})


def test_pooling_of_a_gguf_header() -> None:
    def of(kind: int | None) -> str | None:
        return pooling_of(Path("m.gguf"), {"general.architecture": "qwen3", "qwen3.pooling_type": kind})

    assert [of(kind) for kind in (None, 0, 1, 3)] == [None, None, "mean", "last"]
    with pytest.raises(UnsupportedModel, match="pooling_type 2"):
        of(2)


def test_a_pooling_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean, last, not 'cls'"):
        EngineConfig(Path("m"), pooling="cls")


def test_texts_get_the_special_tokens_of_the_model(tmp_path: Path) -> None:
    vocab = {"a": 0, "<s>": 1, "</s>": 2}
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": list(vocab), "tokenizer.ggml.merges": []}
    meta |= {"tokenizer.ggml.token_type": [1, 3, 3], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    assert from_gguf(meta).encode_document("a") == [0]
    assert from_gguf(meta | {"tokenizer.ggml.add_eos_token": True}).encode_document("a") == [0, 2]
    both = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": True}
    assert from_gguf(meta | both).encode_document("a") == [1, 0, 2]
    assert from_gguf(meta | both).encode("a") == [1, 0], "a prompt goes on, so nothing ends it"
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert from_folder(tmp_path).encode_document("a") == [0, 2]


# -- Over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model as an embedding model, in float32 so that it can be compared."""
    options = ("--pooling", "mean", "--dtype", "fp32", "--num-blocks", "512", "--max-model-len", "2048")
    with serve(bundled_model, tmp_path_factory.mktemp("embedder"), *options) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(bundled_model: Path, tokenizer: Tokenizer) -> Any:
    """Means by transformers, for the texts above."""
    model = AutoModelForCausalLM.from_pretrained(
        bundled_model.parent, gguf_file=bundled_model.name, dtype=torch.float32
    )
    with torch.inference_mode():
        states = [model.model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0] for text in TEXTS]
        return torch.nn.functional.normalize(torch.stack([s.mean(0) for s in states]), dim=1).numpy()


def embed(served: Served, value: Any, **fields: Any) -> Any:
    return served.api.embeddings.create(model=NAME, input=value, **fields)


def post(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/embeddings", json={"model": NAME, "input": "hi"} | body, timeout=60)


def test_the_official_client_gets_the_vectors_of_transformers(
    embedder: Served, expected: Any, tokenizer: Tokenizer
) -> None:
    """As the client asks by default (base64), as floats, and as token ids; in the order of the inputs."""
    ids = [tokenizer.encode(text) for text in TEXTS]
    for answer in (embed(embedder, TEXTS), embed(embedder, TEXTS, encoding_format="float"), embed(embedder, ids)):
        assert [item.index for item in answer.data] == list(range(len(TEXTS)))
        np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=2e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    (one,) = embed(embedder, TEXTS[2]).data
    (same,) = embed(embedder, ids[2]).data
    np.testing.assert_allclose([one.embedding, same.embedding], expected[[2, 2]], atol=2e-5)
    alike, other = expected[0] @ expected[1], expected[0] @ expected[2]
    assert alike > other


def test_dimensions_are_the_first_ones_made_unit_length_again(embedder: Served, expected: Any) -> None:
    (item,) = embed(embedder, TEXTS[0], dimensions=64).data
    first = expected[0][:64] / np.linalg.norm(expected[0][:64])
    np.testing.assert_allclose(item.embedding, first, atol=5e-5)


def test_base64_is_little_endian_float32(embedder: Served) -> None:
    as_text = post(embedder, encoding_format="base64").json()["data"][0]["embedding"]
    as_list = post(embedder).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(as_text), "<f4").tolist() == as_list


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "input 0 is empty"),
        ({"input": []}, "input", "1 to 2048 inputs"),
        ({"input": ["a", []]}, "input", "all texts, or all lists"),
        ({"input": ["a", ""]}, "input", "input 1 is empty"),
        ({"input": [[1], [-1]]}, "input", "all texts, or all lists"),
        ({"input": [1, "a"]}, "input", "all texts, or all lists"),
        ({"input": [True]}, "input", "all texts, or all lists"),
        ({"input": {"text": "a"}}, "input", "1 to 2048 inputs"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "1 to 2048 inputs"),
        ({"input": [[99999]]}, "input", "token id beyond"),
        ({"input": [[1] * 2049]}, "input", "window is 2048 tokens; input 0 has 2049"),
        ({"input": [[1] * 2000] * 151}, "input", "at most 300000 tokens"),
        ({"input": None}, "input", "'input' is required"),
        ({"encoding_format": "hex"}, "encoding_format", "float or base64"),
        ({"dimensions": 0}, "dimensions", "0 is not in"),
        ({"dimensions": 577}, "dimensions", "have 576"),
        ({"temperature": 1}, "temperature", "Unknown field"),
    ],
)
def test_a_bad_field_is_named(embedder: Served, body: dict[str, Any], param: str, message: str) -> None:
    answer = post(embedder, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_another_model_is_not_found(embedder: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        embedder.api.embeddings.create(model="other", input="hi")


def test_embeddings_are_metered_and_leave_nothing(embedder: Served) -> None:
    before = embedder.wait_idle()
    embed(embedder, [[5] * 700, [6] * 30])
    after = embedder.wait_idle()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 730
    assert after["generation_tokens"] == before["generation_tokens"]
    assert after["requests_finished"]["stop"] - before["requests_finished"].get("stop", 0) == 2
    assert after["steps"] - before["steps"] >= 2, "a long prompt is cut into chunks"


def test_more_inputs_than_may_wait_are_served_when_nobody_waits(embedder: Served) -> None:
    """2,048 inputs may be sent, 1,024 sequences may wait: a request alone is never too much for the queue."""
    embedder.wait_idle()
    assert len(embed(embedder, [[5]] * 1100).data) == 1100


def test_a_deadline_ends_an_embedding(embedder: Served) -> None:
    answer = post(embedder, input=[[1] * 2000] * 40, deadline_ms=200)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    embedder.wait_idle()


def test_a_client_that_leaves_aborts_it(embedder: Served) -> None:
    aborted = embedder.stats()["requests_finished"].get("abort", 0)
    client = httpx.Client()
    body = {"model": NAME, "input": [[1] * 2000] * 40}

    def leave() -> None:
        embedder.wait_for(lambda s: s["running"] > 0)
        client.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(httpx.HTTPError):
        client.post(f"{embedder.url}/v1/embeddings", json=body, timeout=2)
    leaving.join()
    assert embedder.wait_idle()["requests_finished"]["abort"] > aborted


def test_it_generates_all_the_same(embedder: Served) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = embedder.api.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=20)  # type: ignore[arg-type]
    assert "Paris" in str(answer.choices[0].message.content)


def test_a_folder_of_an_embedding_model_says_itself_what_it_is(tmp_path: Path) -> None:
    """A decoder without a head, its pooling and its end token from its files, as sentence-transformers writes them."""
    torch.manual_seed(0)
    tokenizer = from_gguf(META | {"tokenizer.ggml.add_eos_token": True})
    model = LlamaModel(LlamaConfig(**SIZES | {"vocab_size": tokenizer.vocab_size})).eval()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    with serve(folder, tmp_path, "--dtype", "fp32", "--num-blocks", "64") as engine:
        assert engine.facts["pooling"] == "last"
        (item,) = embed(engine, "a text").data
        with torch.inference_mode():
            ids = tokenizer.encode_document("a text")
            states = model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert (ids[0], ids[-1]) == (1, 2)
        np.testing.assert_allclose(item.embedding, torch.nn.functional.normalize(states, dim=0), atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="no head that could write text: it makes embeddings"):
            engine.api.completions.create(model=NAME, prompt="a", max_tokens=1)


def test_without_pooling_the_endpoint_says_what_to_do(served: Served) -> None:
    answer = post(served)
    assert answer.status_code == 400
    assert "not an embedding model; the engine's option --pooling" in answer.json()["error"]["message"]
