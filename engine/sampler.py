"""From logits to tokens, for a whole batch at once, each row under its own parameters.

A row's randomness is one uniform number made from (seed, position), so a seeded request gets the
same tokens whatever else is in the batch, after a preemption too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.grammar import NO_MASKS, Masks
from engine.sequence import Sequence
from engine.types import Sampled, SamplingParams

CANDIDATES = (64, 1024, 8192)
"""How many top tokens are looked at before a full sort is paid for."""

LIMIT = 1e30
"""Adjusted logits stay within it: an infinity would make the whole row NaN, whose draw is no token at all."""

RUN = 256
"""Tokens whose weights are summed together before the one that a draw meant is looked for."""

BOUNDS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.inf, -np.inf).astype(np.float32)
"""For each byte of a mask, the most that its eight tokens' logits may be."""

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only (SplitMix64)."""
    x = ((seed & _MASK) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) >> 11) / (1 << 53)


class Sampler:
    """Penalties, bias, temperature, top-k, top-p, min-p, then one draw per row."""

    def sample(self, logits: Tensor, sequences: Seq[Sequence], masks: Masks = NO_MASKS) -> list[Sampled]:
        """Pick a token per row of logits [batch, vocab] float32, which may be overwritten."""
        raw = self._raw_logprobs(logits, sequences)
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
            if sequence.id in masks:
                forbid(logits[row], masks[sequence.id])
        tokens = self._pick(logits, sequences)
        return [self._sampled(token, raw.get(row), sequences[row].params) for row, token in enumerate(tokens)]

    def _pick(self, logits: Tensor, sequences: Seq[Sequence]) -> list[int]:
        """A token per row: by one thread where it is the CPU and nothing has to be sorted, else by torch."""
        tokens = [-1] * len(sequences)
        if logits.device.type == "cpu":
            for row, sequence in enumerate(sequences):
                params = sequence.params
                if params.greedy:
                    tokens[row] = int(logits[row].numpy().argmax())
                elif params.top_k <= 0 and params.top_p >= 1.0:
                    tokens[row] = draw_one(logits[row].numpy(), params, uniform(params.seed, sequence.num_tokens))
        rest = [row for row, token in enumerate(tokens) if token < 0]
        if rest:
            rows = logits if len(rest) == len(sequences) else logits[rest]
            for row, token in zip(rest, pick(rows, [sequences[row] for row in rest]), strict=True):
                tokens[row] = token
        return tokens

    def _adjust(self, row: Tensor, sequence: Sequence) -> None:
        """Apply what depends on one request's history to its row, in place."""
        params = sequence.params
        if params.has_penalties:
            penalise(row, sequence)
            row.clamp_(-LIMIT, LIMIT)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            row.index_add_(0, _ids(ids, row), torch.tensor(values, device=row.device))
        if sequence.num_output < params.min_tokens and params.stop_token_ids:
            row[_ids(sorted(params.stop_token_ids), row)] = -LIMIT

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


def forbid(row: Tensor, mask: npt.NDArray[np.int32]) -> None:
    """Make every token without its bit impossible, in place. row: [vocab]; mask: [ceil(vocab / 32)] words."""
    if row.device.type == "cpu":  # torch would wake its threads for it, which costs more than the work
        logits = row.numpy()
        np.minimum(logits, BOUNDS.take(mask.view(np.uint8), axis=0).reshape(-1)[: len(row)], out=logits)
    else:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(row))
        row.masked_fill_(torch.from_numpy(bits == 0).to(row.device), -torch.inf)


def draw_one(row: npt.NDArray[np.float32], params: SamplingParams, uniform: float) -> int:
    """Draw from a whole row [vocab], which is overwritten, as `draw` does. Waking torch's threads would cost more.

    The running sum is taken run by run, then inside the one run that it has to pass.
    """
    row -= row.max()
    row *= np.float32(1 / max(params.temperature, 1e-4))
    np.exp(row, out=row)
    if params.min_p > 0:
        row[row < params.min_p] = 0  # the heaviest weighs one
    mass = np.add.reduceat(row, np.arange(0, len(row), RUN), dtype=np.float64).cumsum()
    if not mass[-1] > 0:
        return 0  # logits that are no numbers leave nothing to draw from
    # Rounding must not carry the target to the total, past the last token with any weight.
    target = min(uniform * mass[-1], np.nextafter(mass[-1], 0))
    run = int(np.searchsorted(mass, target, side="right"))
    inside = row[run * RUN : (run + 1) * RUN].cumsum(dtype=np.float64)
    left = min(target - (mass[run - 1] if run else 0.0), np.nextafter(inside[-1], 0))
    return run * RUN + int(np.searchsorted(inside, left, side="right"))


def pick(logits: Tensor, sequences: Seq[Sequence]) -> list[int]:
    """A token per row of logits [batch, vocab]: the most likely one, or a draw."""
    tokens = logits.argmax(-1)
    random = [row for row, s in enumerate(sequences) if not s.params.greedy]
    if random:
        rows = logits if len(random) == len(sequences) else logits[random]
        tokens[random] = draw(rows, [sequences[row] for row in random])
    chosen: list[int] = tokens.tolist()
    return chosen


def draw(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Sample one id per row [batch] from logits [batch, vocab] by inverting the distribution."""
    params = [s.params for s in sequences]
    probs = (logits / _column([max(p.temperature, 1e-4) for p in params], logits)).softmax(-1)
    if any(p.min_p > 0 for p in params):
        floor = probs.amax(-1, True) * _column([p.min_p for p in params], logits)
        probs = torch.where(probs < floor, 0, probs)
    draws = [uniform(s.params.seed, s.num_tokens) for s in sequences]
    uniforms = torch.tensor(draws, dtype=torch.float64, device=logits.device)
    cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if not cut:
        return invert(probs, uniforms)
    tokens = invert(probs, uniforms) if len(cut) < len(params) else probs.new_zeros(0).long()
    chosen = draw_from_top(probs[cut], [params[row] for row in cut], uniforms[cut])
    return chosen if len(cut) == len(params) else tokens.index_copy(0, _ids(cut, probs), chosen)


def draw_from_top(probs: Tensor, params: Seq[SamplingParams], uniforms: Tensor) -> Tensor:
    """Sample from each row's top-k, then its nucleus (top-p).

    Looks at a few top tokens first, and only for rows where those do not settle it at more.
    """
    vocab = probs.shape[-1]
    tokens = torch.zeros(len(params), dtype=torch.int64, device=probs.device)
    rows = torch.arange(len(params), device=probs.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=probs.device)
    top_k = torch.tensor([p.top_k or vocab for p in params], device=probs.device)
    total = probs.double().sum(-1)
    for width in (*(w for w in CANDIDATES if w < vocab), vocab):
        values, ids = probs[rows].topk(width)
        mass = values.double().cumsum(-1)
        # A nucleus is a share of what top-k leaves: with a top-k beyond `width`, not known yet.
        covered = (top_k[rows] >= vocab) & (mass[:, -1] >= top_p[rows] * total[rows])
        settled = (top_k[rows] <= width) | covered | (width == vocab)
        kept = _nucleus(values, mass, top_k[rows], top_p[rows], total[rows])
        picked = ids.gather(-1, invert(kept, uniforms[rows])[:, None])[:, 0]
        tokens[rows[settled]] = picked[settled]
        rows = rows[~settled]
        if not len(rows):
            break
    return tokens


def _nucleus(values: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """Zero sorted values outside top-k, and after top_p of what top-k leaves.

    values, mass (its running sum): [rows, width]; top_k, top_p, total: [rows].
    """
    width = values.shape[-1]
    last = mass.gather(-1, top_k.clamp(max=width)[:, None] - 1)[:, 0]
    weight = torch.where(top_k <= width, last, total)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), -1)
    inside = torch.arange(width, device=values.device) < top_k[:, None]
    kept = inside & (before < (top_p * weight)[:, None])
    kept[:, 0] = True  # the smallest top_p times a weight below one is zero
    return torch.where(kept, values, 0)


def invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Index at which the running sum of (unnormalised) probs passes each row's uniform; in range, whatever they are."""
    mass = probs.double().cumsum(-1)
    total = mass[:, -1:]
    # Rounding must not carry the target to the total, past the last token with any weight.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, below)
    return torch.searchsorted(mass, target, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


def _column(values: Seq[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _ids(ids: Seq[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)
