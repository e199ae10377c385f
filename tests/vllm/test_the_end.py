"""What ends the engine: the rows of the table in which it dies. Last of all; the second with another size of model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from console.catalog import facts, files
from engine.footprint import Shape, held_weights, kv_bytes
from serving.metering import Billed
from serving.port import Settled
from tests.serving.fakes import KEY, MODEL, OTHER_KEY, Stack
from tests.serving.outcomes import ROWS
from tests.vllm.gateway import ASKED, CHAT, ENDLESS, billed, client_of, in_front_of
from tests.vllm.server import KV_BYTES, Server

DIED = {row.name: row for row in ROWS if row.name.startswith("engine died")}


@pytest.fixture(scope="module")
def small_model(converted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 M random weights in the bundled model's clothes: another size for the memory plan, and quick to load."""
    folder = tmp_path_factory.mktemp("small")
    config = json.loads((converted_model / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "tie_word_embeddings": True}
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(4):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
            }.items()
        }  # fmt: skip
    tensors = {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((converted_model / name).read_bytes())
    return folder


@pytest.fixture
def dying(small_model: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="fl-d-") as folder:
        server = Server(small_model, Path(folder), "small")
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()


class Asked:
    """Three requests: one that streams tokens, and two that wait for their first, streamed and whole."""

    def __init__(self, stack: Stack, server: Server) -> None:
        self.stack, self.server = stack, server
        self.statuses: dict[str, int] = {}
        self.bodies: dict[str, str] = {}

    async def post(self, name: str, key: str, **body: Any) -> None:
        async with client_of(self.stack, key) as client:
            asked = {"model": MODEL, "messages": ASKED, **ENDLESS, **body}
            async with client.stream("POST", CHAT, json=asked) as response:
                self.statuses[name] = response.status_code
                self.bodies[name] = (await response.aread()).decode()

    async def __call__(self, end: Callable[[], None]) -> dict[str, Settled]:
        """Let them come so far, end the engine, and return what was settled, by name."""
        tasks = [asyncio.create_task(self.post("speaking", KEY, stream=True))]
        pipeline = self.stack.gateway._pipeline
        assert pipeline is not None
        await self.until(lambda: any(r.counts.generated >= 2 for r in pipeline.in_flight.values()))
        with self.server.frozen():
            tasks += [asyncio.create_task(self.post("waiting streamed", OTHER_KEY, stream=True))]
            await self.until(lambda: sum(1 for r in pipeline.in_flight.values() if r.stamps.posted) == 2)
            tasks += [asyncio.create_task(self.post("waiting whole", OTHER_KEY, stream=False))]
            await self.until(lambda: sum(1 for r in pipeline.in_flight.values() if r.stamps.posted) == 3)
            end()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
        settled = {entry.record.id: entry for entry in await self.stack.settled()}
        by_time = sorted(settled.values(), key=lambda entry: entry.record.id)
        return dict(zip(("speaking", "waiting streamed", "waiting whole"), by_time, strict=True))

    async def until(self, there: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not there():
                await asyncio.sleep(0.005)


def plan_is_right(dying: Server, small_model: Path) -> None:
    """The memory plan of another size, within two percent."""
    read = facts.read(files.inspect(small_model, [small_model.parent]))
    shape = Shape(
        layers=read.layers, hidden=read.hidden_size, heads=read.heads, kv_heads=read.kv_heads, head_dim=read.head_dim,
        intermediate=read.intermediate_size, vocab=read.vocab_size, parameters=read.parameters,
        weights_bytes=read.weights_bytes, context=read.context_length,
    )  # fmt: skip
    assert 25e6 < read.parameters < 45e6
    assert held_weights(shape, engine="vllm", kind="cpu") == pytest.approx(2 * read.parameters, rel=0.02)
    planned = kv_bytes(shape, 1, dying.facts["kv_tokens"], dying.facts["block_size"], 2)
    assert planned == pytest.approx(KV_BYTES, rel=0.02)


async def test_a_killed_server_ends_each_request_as_the_table_says(vllm: Server, root: Path) -> None:
    async with in_front_of(vllm, root, 4) as stack:
        asked = Asked(stack, vllm)
        settled = await asked(vllm.kill_server)
        after, before = DIED["engine died after a byte was sent"], DIED["engine died before a byte was sent"]
        speaking = settled["speaking"]
        assert (speaking.record.outcome, speaking.record.code) == (after.outcome, after.code)
        paid = billed(speaking)
        assert paid.completion >= 2 and paid.prompt > 30
        assert asked.statuses["speaking"] == 200 and '"error"' in asked.bodies["speaking"]
        for name in ("waiting streamed", "waiting whole"):
            assert (settled[name].record.outcome, settled[name].record.code) == (before.outcome, before.code)
            assert billed(settled[name]) == Billed()
            assert asked.statuses[name] == before.status == 502


async def test_a_killed_core_ends_each_request_with_an_error_and_its_tokens(
    dying: Server, small_model: Path, root: Path
) -> None:
    """The server outlives its core for a moment: it reports the failure itself, or goes before it can.

    The same start of another size of model shows what the memory plan says of it.
    """
    plan_is_right(dying, small_model)
    core = dying.core.pid
    async with in_front_of(dying, root, 4) as stack:
        asked = Asked(stack, dying)
        settled = await asked(lambda: os.kill(core, signal.SIGKILL))
        assert {entry.record.outcome for entry in settled.values()} == {"error"}
        assert {entry.record.code for entry in settled.values()} <= {"engine_error", "engine_unreachable"}
        assert billed(settled["speaking"]).completion >= 2
        assert asked.statuses == {"speaking": 200, "waiting streamed": 502, "waiting whole": 502}
        assert billed(settled["waiting streamed"]) == billed(settled["waiting whole"]) == Billed()
