"""Steps on the fused CPU path: arrays for the library, and tokens from what it answers."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.embeddings import Vector, gather
from engine.grammar import NO_MASKS, Masks
from engine.model.fused import FusedModel
from engine.model.hostpool import HostPool
from engine.model.memory import give_back
from engine.native.library import DRAW
from engine.native.library import Step as NativeStep
from engine.sampler import Sampler, uniform
from engine.sequence import Sequence
from engine.types import Sampled, Step

TOP_K_MAX = 2**31 - 1
Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class Started:
    """A step under way: who samples, which of them need their logits, and the arrays the library works on.

    `masks` [samples] are addresses of what grammars allow, for those whose tokens the library draws.
    """

    sampling: list[Sequence]
    picky: list[int]
    tokens: Ints
    masks: Any
    logits: Tensor | None = None
    states: Vector | None = None
    keep: list[Any] = field(default_factory=list)


class FusedRunner:
    """Runs steps on the library's own threads; owns the KV cache."""

    returns_early = True

    def __init__(self, model: FusedModel, sampler: Sampler, host: HostPool | None = None) -> None:
        self.model = model
        self.cache = model.cache
        self.sampler = sampler
        self.host = host

    def forward(self, step: Step) -> Started:
        """Start a step; the library draws the tokens, but for sequences whose logits have to be changed or shown."""
        # The library writes as many rows as it is given: it has room for so many.
        assert step.num_tokens <= self.model.max_tokens, f"{step.num_tokens} tokens in a step"
        self.model.settle()
        if self.host is not None:
            self.host.copy_out(step.copies_out)
            self.host.copy_in(step.copies_in)
        sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
        picky = [row for row, sequence in enumerate(sampling) if needs_logits(sequence)]
        addresses = (c.c_void_p * max(len(sampling), 1))()
        started = Started(sampling, picky, np.empty(len(sampling), np.int32), addresses)
        if picky:
            started.logits = torch.empty(len(picky), self.model.config.vocab_size)
        if any(chunk.sequence.pool for chunk in step.chunks):
            started.states = np.empty((step.num_tokens, self.model.config.hidden_size), np.float32)
        self.model.start(_native(step, started), started)
        return started

    @torch.inference_mode()
    def sample(self, step: Step, computed: object, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        """See Runner."""
        assert isinstance(computed, Started)
        for row, sequence in enumerate(computed.sampling):
            # What is shown of the distribution is what it was before the mask, so the sampler applies that itself.
            if sequence.id in masks and row not in computed.picky:
                computed.masks[row] = masks[sequence.id].ctypes.data
        self.model.release()
        self.model.wait()
        if computed.states is not None:
            gather(step.chunks, computed.states)
        sampled = {s.id: Sampled(token) for s, token in zip(computed.sampling, computed.tokens.tolist(), strict=True)}
        if computed.logits is not None:
            sequences = [computed.sampling[row] for row in computed.picky]
            picked = self.sampler.sample(computed.logits, sequences, masks)
            sampled.update((s.id, token) for s, token in zip(sequences, picked, strict=True))
        return sampled

    def give_back(self, runs: list[tuple[int, int]]) -> None:
        """Let the system have the memory of unused blocks, given as (first, count)."""
        self.model.settle()
        give_back(self.cache.block_view, runs)

    def parts(self) -> Mapping[str, float]:
        """Milliseconds of the last step by part of the forward pass."""
        return self.model.parts


def needs_logits(sequence: Sequence) -> bool:
    """True where the distribution is changed before the draw, or shown."""
    params = sequence.params
    return (
        params.has_penalties
        or bool(params.logit_bias)
        or params.top_logprobs is not None
        or sequence.num_output < params.min_tokens
    )


def _native(step: Step, started: Started) -> NativeStep:
    """The step as the library takes it; its arrays live in `started`."""
    tokens: list[int] = []
    tables: list[int] = []
    starts, counts, begins, last = [], [], [], []
    for chunk in step.chunks:
        sequence = chunk.sequence
        starts.append(chunk.start)
        counts.append(chunk.count)
        begins.append(len(tables))
        tables += sequence.block_table
        tokens += sequence.tokens[chunk.start : chunk.end]
        if chunk.samples:
            last.append(len(tokens) - 1)
    draws = np.array([_draw(sequence) for sequence in started.sampling], DRAW)
    arrays: list[npt.NDArray[Any]] = [
        *(_ints(values) for values in (tokens, starts, counts, begins, tables, last)),
        draws,
        started.tokens,
    ]
    rows = (c.c_void_p * max(len(last), 1))()
    if started.logits is not None:
        for index, row in enumerate(started.picky):
            rows[row] = started.logits[index].data_ptr()
    started.keep += [arrays, rows]
    states = None if started.states is None else started.states.ctypes.data
    addresses = (*(a.ctypes.data for a in arrays), c.addressof(rows), states, c.addressof(started.masks))
    guided = any(sequence.grammar is not None for sequence in started.sampling)
    return NativeStep(len(step.chunks), len(last), *addresses, 0 if guided else 1)


def _draw(sequence: Sequence) -> tuple[float, float, float, float, int]:
    params = sequence.params
    if params.greedy:
        return (0.0, 0.0, 1.0, 0.0, 0)
    return (
        uniform(params.seed, sequence.num_tokens),
        params.temperature,
        params.top_p,
        params.min_p,
        min(params.top_k, TOP_K_MAX),
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)
