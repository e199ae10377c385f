"""From logits to tokens, for a whole batch at once, each row under its own parameters.

A row's randomness is one uniform number made from (seed, position), so a seeded request gets the
same tokens whatever else is in the batch, after a preemption too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.sequence import Sequence
from engine.types import Sampled, SamplingParams

CANDIDATES = 1024
"""How many top tokens are looked at before a full sort is paid for."""

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only (SplitMix64)."""
    x = ((seed & _MASK) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) >> 11) / (1 << 53)


class Sampler:
    """Penalties, bias, temperature, top-k, top-p, min-p, then one draw per row."""

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        """Pick a token per row of logits [batch, vocab] float32, which may be overwritten."""
        raw = self._raw_logprobs(logits, sequences)
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
        tokens = logits.argmax(-1)
        random = [row for row, s in enumerate(sequences) if not s.params.greedy]
        if random:
            rows = logits if len(random) == len(sequences) else logits[random]
            tokens[random] = draw(rows, [sequences[row] for row in random])
        return [
            self._sampled(token, raw.get(row), sequences[row].params)
            for row, token in enumerate(tokens.tolist())
        ]

    def _adjust(self, row: Tensor, sequence: Sequence) -> None:
        """Apply what depends on one request's history to its row, in place."""
        params = sequence.params
        if params.has_penalties:
            penalise(row, sequence)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            row.index_add_(0, _ids(ids, row), torch.tensor(values, device=row.device))
        if sequence.num_output < params.min_tokens and params.stop_token_ids:
            row[_ids(sorted(params.stop_token_ids), row)] = -torch.inf

    def _raw_logprobs(self, logits: Tensor, sequences: Seq[Sequence]) -> dict[int, Tensor]:
        """Log-probabilities before any adjustment, which is what OpenAI's field reports."""
        rows = [row for row, s in enumerate(sequences) if s.params.top_logprobs is not None]
        return {row: logits[row].log_softmax(-1) for row in rows}

    def _sampled(self, token: int, logprobs: Tensor | None, params: SamplingParams) -> Sampled:
        if logprobs is None:
            return Sampled(token)
        values, ids = logprobs.topk(params.top_logprobs or 0)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Sampled(token, float(logprobs[token]), top)


def penalise(row: Tensor, sequence: Sequence) -> None:
    """Repetition penalty over prompt and output; presence and frequency over output only."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = _ids(sorted(set(sequence.tokens)), row)
        values = row[seen]
        by = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / by, values * by)
    output = sequence.tokens[sequence.num_prompt :]
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[_ids(list(counts), row)] -= params.presence_penalty + params.frequency_penalty * times


def draw(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Sample one id per row [batch] from logits [batch, vocab] by inverting the distribution."""
    params = [s.params for s in sequences]
    temperature = _column([max(p.temperature, 1e-4) for p in params], logits)
    probs = (logits / temperature).softmax(-1)
    probs = torch.where(
        probs < probs.amax(-1, True) * _column([p.min_p for p in params], logits), 0, probs
    )
    uniforms = _column(
        [uniform(p.seed, s.num_tokens) for s, p in zip(sequences, params, strict=True)], logits
    )
    tokens = invert(probs, uniforms)
    cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if cut:
        chosen = [params[row] for row in cut]
        tokens[cut] = draw_from_top(probs[cut], chosen, uniforms[cut])
    return tokens


def draw_from_top(probs: Tensor, params: Seq[SamplingParams], uniforms: Tensor) -> Tensor:
    """Sample from each row's top-k and nucleus; sorts fully only where the top is too thin."""
    vocab = probs.shape[-1]
    width = min(vocab, max([CANDIDATES, *(p.top_k for p in params)]))
    top_p = _column([p.top_p for p in params], probs)
    total = probs.sum(-1, True)
    values, ids = probs.topk(width)
    limited = torch.tensor([0 < p.top_k <= width for p in params], device=probs.device)[:, None]
    if width < vocab and bool(((values.sum(-1, True) < top_p * total) & ~limited).any()):
        values, ids = probs.sort(-1, descending=True)
    top_k = torch.tensor([[p.top_k or vocab] for p in params], device=probs.device)
    values = torch.where(torch.arange(values.shape[-1], device=probs.device) < top_k, values, 0)
    before = values.cumsum(-1) - values
    values = torch.where(before < top_p * values.sum(-1, True).where(limited, total), values, 0)
    return ids.gather(-1, invert(values, uniforms)[:, None])[:, 0]


def invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Index at which the cumulative (unnormalised) distribution passes each row's uniform."""
    cumulative = probs.double().cumsum(-1)
    target = uniforms.double() * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may carry the target to the very end; the last token with weight is then meant.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index, last)


def _column(values: Seq[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _ids(ids: Seq[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)
