"""What each weight format costs in quality, against the file dequantised to float32.

Teacher-forced over the project's own documentation: perplexity, mean KL divergence (nats), how often the most likely
token is the same, and the error of the logits relative to their spread. Beside them: weight bytes and tokens per second
of a batch of eight, one step after another without HTTP.

    python bench/engine_quality.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--positions 4096] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.blocks import BlockPool
from engine.boot import build
from engine.config import EngineConfig
from engine.fused_runner import FusedRunner
from engine.model.fused_loader import logits_of
from engine.model.loader import load_int8, load_weights, open_source
from engine.model.reference import Reference
from engine.native.build import NativeUnavailable
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.tokenizer import load_tokenizer
from engine.types import SamplingParams

WINDOW = 1024
CPU = torch.device("cpu")
BARS = {"int8": {"kl": 0.015, "top1": 0.92}, "q4": {"kl": 0.015, "top1": 0.92}, "bf16": {"kl": 0.002}}

Score = Callable[[list[int]], Tensor]


@dataclass(slots=True)
class Quality:
    """Means over all positions; `kl` in nats, `error` relative to the reference's standard deviation."""

    format: str
    path: str
    positions: int
    perplexity: float
    kl: float
    top1: float
    error: float
    weights_mb: float
    tokens_per_s_at_8: float
    passed: bool = True


def main() -> int:
    """Print the table or JSON; status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    windows = list(read_windows(args.model, args.positions))
    reference = scorer(args.model, "fp32")
    truths = [reference(window) for window in windows]
    results = [measure(args.model, dtype, windows, truths) for dtype in ("fp32", "bf16", "int8", "q4")]
    with without_library():
        results.append(measure(args.model, "int8", windows, truths))
    for result in results:
        bars = BARS.get(result.format, {})
        result.passed = result.kl <= bars.get("kl", 1.0) and result.top1 >= bars.get("top1", 0.0)
    sys.stdout.write(json.dumps([asdict(r) for r in results], indent=1) if args.json else table(results))
    sys.stdout.write("\n")
    return 0 if all(result.passed for result in results) else 1


def read_windows(model: Path, positions: int) -> Iterator[list[int]]:
    """Token windows of the documentation, at least `positions` tokens in all."""
    root = Path(__file__).resolve().parent.parent
    files = [root / "README.md", root / "ARCHITECTURE.md", *sorted((root / "docs").glob("*.md"))]
    source = open_source(model)
    ids = load_tokenizer(source.metadata, model).encode("\n\n".join(file.read_text("utf-8") for file in files))
    if len(ids) < positions:
        raise SystemExit(f"The documentation has {len(ids)} tokens, {positions} are asked for.")
    for start in range(0, positions, WINDOW):
        yield ids[start : start + WINDOW]


def measure(model: Path, dtype: str, windows: list[list[int]], truths: list[Tensor]) -> Quality:
    """Score the windows in one format against their float32 logits."""
    engine = build(EngineConfig(model, dtype=dtype, num_blocks=256))
    runner = engine.runner
    if isinstance(runner, FusedRunner):
        fused = runner.model
        scored = (in_chunks(lambda part, start: logits_of(fused, part, start), window) for window in windows)
    else:
        scored = map(scorer(model, dtype), windows) if dtype != "fp32" else iter(truths)
    totals = torch.zeros(5)
    for truth, logits, window in zip(truths, scored, windows, strict=True):
        totals += compare(truth, logits, window)
    count, nll, kl, top1, error = totals.tolist()
    return Quality(
        format=dtype,
        path=engine.path.target,
        positions=int(count),
        perplexity=round(float(torch.tensor(nll / count).exp()), 3),
        kl=round(kl / count, 5),
        top1=round(top1 / count, 4),
        error=round(error / count, 4),
        weights_mb=round(engine.path.weights_bytes / 1e6, 1),
        tokens_per_s_at_8=round(speed(runner), 1),
    )


def without_library() -> AbstractContextManager[Any]:
    """Here there is no fused path, as where there is no compiler."""
    return mock.patch("engine.paths.find_library", side_effect=NativeUnavailable("left out"))


def in_chunks(score: Callable[[list[int], int], Tensor], tokens: list[int]) -> Tensor:
    """Score a window in the pieces that a step can take."""
    return torch.cat([score(tokens[start : start + 256], start) for start in range(0, len(tokens), 256)])


def scorer(model: Path, dtype: str) -> Score:
    """The plain path's logits [tokens, vocab] of a window."""
    source = open_source(model)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    load = load_int8 if dtype == "int8" else load_weights
    weights = load(source, kind, CPU, lambda done: None)

    def score(tokens: list[int]) -> Tensor:
        reference = Reference(source.config, tokens, weights.embedding, weights.norm)
        for layer in weights.layers:
            reference.advance(layer)
        return reference.logits(weights.head)

    return score


def compare(truth: Tensor, logits: Tensor, tokens: list[int]) -> Tensor:
    """Sums over positions: [count, negative log-likelihood, KL, agreement, relative logit error]."""
    wanted, other = truth.log_softmax(-1), logits.log_softmax(-1)
    following = torch.tensor(tokens[1:])[:, None]
    centred = (logits - logits.mean(-1, keepdim=True)) - (truth - truth.mean(-1, keepdim=True))
    return torch.stack(
        [
            torch.tensor(float(len(tokens) - 1)),
            -other[:-1].gather(-1, following).sum(),
            (wanted.exp() * (wanted - other))[:-1].sum(),
            (wanted.argmax(-1) == other.argmax(-1))[:-1].float().sum(),
            (centred.norm(dim=-1) / (truth.std(-1) * truth.shape[-1] ** 0.5))[:-1].sum(),
        ]
    )


def speed(runner: Runner, batch: int = 8, prompt: int = 96, output: int = 64) -> float:
    """Tokens per second of decode steps at one batch size (median step)."""
    scheduler = Scheduler(BlockPool(256, 16), SchedulerLimits(prefix_cache=False))
    for index in range(batch):
        tokens = torch.randint(40_000, (prompt,), generator=torch.Generator().manual_seed(index)).tolist()
        scheduler.add(Sequence(index, tokens, SamplingParams(max_tokens=output, temperature=0.0)))
    seconds = []
    while scheduler.has_work:
        began = time.perf_counter()
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step)))
        if step.num_tokens == batch:
            seconds.append(time.perf_counter() - began)
    return batch / statistics.median(seconds)


def table(results: list[Quality]) -> str:
    """For people."""
    head = f"{'format':6} {'path':26} {'positions':>9} {'perplexity':>10} {'KL':>8} {'top-1':>7} {'error':>7} {'MB':>7}"
    lines = [head + f" {'tok/s @8':>9}"]
    for r in results:
        numbers = f"{r.positions:9} {r.perplexity:10.3f} {r.kl:8.5f} {r.top1:7.4f} {r.error:7.4f} {r.weights_mb:7.1f}"
        lines.append(
            f"{r.format:6} {r.path:26} {numbers} {r.tokens_per_s_at_8:9.1f} {'' if r.passed else 'BAR MISSED'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
