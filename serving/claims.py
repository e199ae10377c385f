"""What a request asks of the coordinator, and what its refusals say to a client. Pure."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from serving.coordination.contract import Allowance, Claim, Granted, Refused, Scope, Slots, Waiting
from serving.errors import NO_RETRY, GatewayError, Header, RateLimited, Unavailable
from serving.metering import Billed, cost
from serving.port import PRIORITIES, Principal
from serving.request import Request
from serving.routing import Ranking

TEMPLATE_TOKENS = 512  # what a chat template may add of its own to a prompt, such as a default system message
UNKNOWN_OUTPUT = 4096  # tokens reserved for an answer of a model whose context length is not known


def claim(request: Request, pool: str, ranking: Ranking | None, body: bytes) -> Claim:
    """Limits, queue and slot for one request, with upper bounds: what is admitted can only turn out cheaper."""
    assert request.route is not None and request.ask is not None
    principal, route = request.principal, request.route
    prompt, completion = bounds(request)
    return Claim(
        id=request.id,
        scopes=scopes(principal),
        currency=principal.currency,
        zone=principal.billing_zone,
        input_tokens=prompt,
        output_tokens=completion,
        cost=cost(Billed(prompt=prompt, completion=completion), request.price),
        pool=pool,
        candidates=offered(ranking) if ranking else (),
        least=ranking is not None and ranking.least,
        slots=request.ask.choices,
        tenant_id=principal.tenant_id,
        weight=principal.weight,
        priority=PRIORITIES.index(principal.priority) if principal.priority in PRIORITIES else 1,
        max_queued=route.max_queued,
        max_queued_tokens=route.max_queued_tokens,
        fingerprint=fingerprint(principal, body),
    )


def slot_claim(request: Request, claim_id: str, pool: str, ranking: Ranking) -> Claim:
    """A free slot and nothing else, for a copy of a request: it counts against nobody's limits and never waits."""
    full = claim(request, pool, ranking, b"")
    return msgspec.structs.replace(full, id=claim_id, scopes=(), cost=0, max_queued=0, fingerprint="")


def limits_claim(request: Request, pool: str) -> Claim:
    """Limits and nothing else, asked before there is a replica.

    With no slot to take and no room to wait it is never granted and reserves nothing: only why it is refused matters.
    """
    full = claim(request, pool, None, b"")
    return msgspec.structs.replace(full, id=f"{request.id}-limits", max_queued=0, fingerprint="")


def scopes(principal: Principal) -> tuple[Scope, ...]:
    """Whose limits hold: the tenant's over all its keys, and the key's own."""
    return (
        Scope("key", principal.key_id, principal.limits),
        Scope("tenant", principal.tenant_id, principal.tenant_limits),
    )


def offered(ranking: Ranking) -> tuple[Slots, ...]:
    return tuple(Slots(each.replica.id, each.replica.max_num_seqs) for each in ranking.ranked)


def bounds(request: Request) -> tuple[int, int]:
    """Tokens of prompt and of all answers together, at most."""
    ask, route = request.ask, request.route
    assert ask is not None and route is not None
    longest = route.max_model_len
    prompt = ask.prompt_bound + TEMPLATE_TOKENS
    answer = ask.max_tokens or route.default_max_tokens or longest or UNKNOWN_OUTPUT
    if longest:
        prompt, answer = min(prompt, longest), min(answer, longest)
    return prompt, answer * ask.choices


def fingerprint(principal: Principal, body: bytes) -> str:
    """The same for every try of one call: clients send the same bytes again."""
    return blake2b(body, key=principal.key_id.encode()[:64], digest_size=12).hexdigest()


_LIMITS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "input_tokens_per_minute": "input tokens per minute",
    "output_tokens_per_minute": "output tokens per minute",
    "concurrency": "requests at once",
}


def refusal(refused: Refused, currency: str) -> GatewayError:
    """Says which limit, how much of it is used, and when to come back."""
    if refused.reason == "queue_full":
        return Unavailable(
            f"All replicas of this model are busy and {refused.depth} requests wait for one already.",
            code="queue_full",
            retry_after=refused.retry_after_s,
        )
    whose = "key" if refused.scope == "key" else "tenant"
    error = RateLimited(
        f"This {whose}'s limit of {_amount(refused, refused.allowed, currency)} is reached: "
        f"{_amount(refused, refused.used, currency, bare=True)} are spent or reserved and this request needs up to "
        f"{_amount(refused, refused.wanted, currency, bare=True)}. {_advice(refused)}",
        code="insufficient_quota" if refused.limit.startswith("budget_") else None,
        retry_after=refused.retry_after_s if refused.retryable else None,
    )
    if not refused.retryable:
        error.headers.append(NO_RETRY)
    return error


def _amount(refused: Refused, value: int, currency: str, *, bare: bool = False) -> str:
    if refused.limit.startswith("budget_"):
        window = refused.limit.removeprefix("budget_")
        per = "" if bare else " in total" if window == "total" else f" per {window}"
        return f"{value / 1e9:.6f} {currency}{per}"
    return str(value) if bare else f"{value} {_LIMITS.get(refused.limit, refused.limit)}"


def _advice(refused: Refused) -> str:
    if refused.retryable:
        return f"Try again in {refused.retry_after_s} seconds."
    if refused.wanted > refused.allowed:
        return "It can never fit: ask for fewer tokens (max_tokens), or have the limit raised."
    return "Trying again will not help until the window ends or the limit is raised."


def headers(verdict: Granted | Waiting | Refused) -> list[Header]:
    """OpenAI's x-ratelimit-* headers: the tightest limit that counts requests, and the tightest that counts tokens."""
    told: list[Header] = []
    for kind, allowance in ((b"requests", verdict.requests), (b"tokens", verdict.tokens)):
        if allowance is not None:
            told += _allowance(kind, allowance)
    return told


def _allowance(kind: bytes, allowance: Allowance) -> list[Header]:
    return [
        (b"x-ratelimit-limit-" + kind, b"%d" % allowance.limit),
        (b"x-ratelimit-remaining-" + kind, b"%d" % max(allowance.remaining, 0)),
        (b"x-ratelimit-reset-" + kind, _duration(allowance.reset_s)),
    ]


def _duration(seconds: float) -> bytes:
    """As OpenAI writes them: 350ms, 12s, 6m0s."""
    if seconds < 1:
        return b"%dms" % max(int(seconds * 1000), 0)
    whole = int(seconds + 0.999)
    return b"%dm%ds" % divmod(whole, 60) if whole >= 60 else b"%ds" % whole
