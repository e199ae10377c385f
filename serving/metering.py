"""What a request is billed for. The outcome table in docs/metering.md is this file in words.

Tokens are the engine's own counts; nothing is ever estimated from text. Where an engine tells no usage, the pieces that
were relayed are a lower bound of its completion tokens.
"""

from __future__ import annotations

import msgspec

from serving.port import Outcome, Price


class Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage` as an engine sends it, with any chunk or at the end."""

    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None


class Counts(msgspec.Struct):
    """Tokens of one request so far. Counts only grow: a late or partial report never takes anything back."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    relayed: int = 0  # pieces of text that came from the engine, each at least one token
    reported: bool = False  # whether the engine ever told its own count

    def take(self, usage: Usage, completion: int) -> None:
        """Take the engine's account; `completion` is its total over all choices."""
        self.reported = True
        self.prompt = max(self.prompt, usage.prompt_tokens or 0)
        self.completion = max(self.completion, completion)
        if usage.prompt_tokens_details is not None:
            cached = usage.prompt_tokens_details.cached_tokens or 0
            self.cached = min(max(self.cached, cached), self.prompt)
        if usage.completion_tokens_details is not None:
            reasoning = usage.completion_tokens_details.reasoning_tokens or 0
            self.reasoning = min(max(self.reasoning, reasoning), self.completion)

    @property
    def generated(self) -> int:
        """Completion tokens to bill: the engine's count, and never less than what was passed on."""
        return max(self.completion, self.relayed)


class Billed(msgspec.Struct, frozen=True):
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


NOTHING = Billed()


def cost(bill: Billed, price: Price | None) -> int:
    """What that costs in nano-units, rounded up once: the ledger and the budgets count the same whole number."""
    if price is None:
        return 0
    pico = (bill.prompt - bill.cached) * price.input + bill.cached * price.cached_input + bill.completion * price.output
    return -(-pico // 1000)


def billed(outcome: Outcome, counts: Counts, *, delivered: bool) -> Billed:
    """The billing rule of each outcome. `delivered`: the client has been sent part of the answer."""
    if outcome is Outcome.REJECTED:
        return NOTHING
    if outcome is Outcome.ERROR and not delivered:
        # it got nothing for it: the work is a failure cost of ours
        return NOTHING
    return Billed(counts.prompt, counts.cached, counts.generated, counts.reasoning)
