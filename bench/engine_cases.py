"""The loads of bench/engine.py: what a server is asked for, and the figures that come of it."""

from __future__ import annotations

import random
import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from bench.clients import quantile
from bench.engine_load import Ask, LoadError, Reply, drive, words

Metrics = dict[str, float]


@dataclass(frozen=True)
class Bar:
    """A promise about one figure of one of our servers, by itself: at most, or at least, so much."""

    server: str
    figure: str
    limit: float
    at_most: bool = True


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One load. `metric` is what servers are compared by; `bars`: the least ratio in our favour, by (ours, rival)."""

    name: str
    at_once: int = 1
    metric: str = "tok_s"
    bars: dict[tuple[str, str], float] = field(default_factory=dict)
    own_bars: tuple[Bar, ...] = ()
    servers: tuple[str, ...] = ()  # measured on these only; empty: on all that were chosen

    @abstractmethod
    def load(self, port: int, nonce: object, warm_up: bool = False) -> Metrics:
        """Put it on a server. Prompts are new for every nonce, so no prefix cache can help unasked."""


def faster(case: Case) -> int:
    """+1 where more is better, -1 where less is."""
    return 1 if case.metric == "tok_s" else -1


@dataclass(frozen=True, kw_only=True)
class Tokens(Case):
    """So many clients at once, each with a prompt of its own."""

    prompt: int = 96
    tokens: int = 128

    def load(self, port: int, nonce: object, warm_up: bool = False) -> Metrics:
        tokens = min(self.tokens, 16) if warm_up else self.tokens
        asks = [Ask(words((nonce, at), self.prompt), tokens) for at in range(self.at_once)]
        replies = drive(port, asks, self.at_once)
        wrong = {reply.counts["prompt_tokens"] for reply in replies} - {self.prompt}
        if wrong:
            raise LoadError(f"{self.name}: prompts of {wrong} tokens instead of {self.prompt}")
        return summary(replies)


def summary(replies: list[Reply]) -> Metrics:
    """Tokens per second from the first request to the last token, prefill included; milliseconds for the rest."""
    gaps = [gap for reply in replies for gap in reply.gaps]
    return {
        "tok_s": rate(replies),
        "ttft_ms": statistics.median(reply.ttft for reply in replies) * 1000,
        "itl_p50_ms": quantile(gaps, 0.5) * 1000,
        "itl_p99_ms": quantile(gaps, 0.99) * 1000,
    }


def rate(replies: list[Reply]) -> float:
    """Output tokens per second of all of them together."""
    seconds = max(reply.ended for reply in replies) - min(reply.sent for reply in replies)
    return sum(reply.counts["completion_tokens"] for reply in replies) / seconds


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Case):
    """A long prefix never seen before with a tail of its own, then the same prefix with other tails."""

    prefix: int = 600
    tail: int = 40

    def load(self, port: int, nonce: object, warm_up: bool = False) -> Metrics:
        prefix = words(nonce, self.prefix)
        # Without the article that begins a text, a tail is as long as its words are many.
        tails = [words((nonce, at), self.tail + 1).removeprefix("The ") for at in range(4)]
        replies = [drive(port, [Ask(f"{prefix} {tail}", 4)], 1)[0] for tail in tails]
        first, second = replies[0].ttft, statistics.median(reply.ttft for reply in replies[1:])
        return {
            "prompt_tokens": replies[0].counts["prompt_tokens"],
            "first_ttft_ms": first * 1000,
            "second_ttft_ms": second * 1000,
            "second_to_first": second / first,
        }


@dataclass(frozen=True, kw_only=True)
class LongTail(Case):
    """Answers most of which are short and a few long: each batch after the last, against one that is always full.

    Enough of them that the end, when the last long answers have no mates under either scheme, weighs little.
    """

    requests: int = 384
    batch: int = 16  # as many as the server takes at once; the rest wait
    prompt: int = 16

    def lengths(self, seed: object) -> list[int]:
        """Seven of eight answers have 8 to 32 tokens, the eighth 256 to 512."""
        rng = random.Random(repr(seed))
        ranges = [(256, 512) if at % 8 == 0 else (8, 32) for at in range(self.requests)]
        rng.shuffle(ranges)
        return [rng.randint(*each) for each in ranges]

    def load(self, port: int, nonce: object, warm_up: bool = False) -> Metrics:
        lengths = [8] * self.batch if warm_up else self.lengths(nonce)
        continuous = drive(port, self._asks((nonce, "continuous"), lengths), len(lengths))
        static: list[Reply] = []
        for start in range(0, len(lengths), self.batch):
            part = lengths[start : start + self.batch]
            static += drive(port, self._asks((nonce, start), part), self.batch)
        return {
            "tok_s": rate(continuous),
            "static_tok_s": rate(static),
            "continuous_to_static": rate(continuous) / rate(static),
        }

    def _asks(self, nonce: object, lengths: list[int]) -> list[Ask]:
        return [Ask(words((nonce, at), self.prompt), tokens) for at, tokens in enumerate(lengths)]


CASES: list[Case] = [
    Tokens(name="tokens@1", at_once=1, bars={("ours", "vllm"): 4.0, ("ours", "llama"): 1.3}),
    Tokens(name="tokens@8", at_once=8, bars={("ours", "vllm"): 3.5, ("ours-bf16", "vllm"): 0.5}),
    Tokens(name="tokens@32", at_once=32, bars={("ours", "vllm"): 2.5, ("ours", "llama"): 4.0}),
    Tokens(name="prompt-2000", prompt=2000, tokens=4, metric="ttft_ms", bars={("ours", "vllm"): 1 / 0.8}),
    SharedPrefix(name="shared-prefix", metric="second_ttft_ms", own_bars=(Bar("ours", "second_to_first", 0.5),)),
    LongTail(
        name="long-tail",
        own_bars=(Bar("ours-batch-16", "continuous_to_static", 2.0, at_most=False),),
        servers=("ours-batch-16",),
    ),
]
