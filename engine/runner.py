"""A step as tensors: build the batch, run the decoder, sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.embeddings import gather
from engine.grammar import NO_MASKS, Masks
from engine.model.attention import KVCache, plan_groups
from engine.model.decoder import Batch, Decoder
from engine.model.hostpool import HostPool
from engine.model.memory import give_back
from engine.sampler import Sampler
from engine.types import Chunk, Sampled, Step


class Runner(Protocol):
    """The seam between the step loop and the device; split so that aborts fit in between."""

    def forward(self, step: Step) -> object:
        """Start a step and return what `sample` needs: copies out, copies in, then the batch, which fills KV slots.

        May return before the device is done, so that the caller can deliver and fill masks meanwhile.
        """
        ...

    def sample(self, step: Step, computed: object, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        """Wait for the step; the next token by sequence id, for every chunk that `samples`.

        `masks` hold the allowed tokens of sequences with a grammar; others have no entry.
        """
        ...


@dataclass(slots=True)
class Computed:
    """A step's chunks in the order of its rows, and on the device its logits and states, as the decoder gives them."""

    chunks: list[Chunk]
    logits: Tensor
    states: Tensor | None


class TorchRunner:
    """Runs steps on a torch device; owns the KV cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, sampler: Sampler, host: HostPool | None = None) -> None:
        self.decoder = decoder
        self.cache = cache
        self.sampler = sampler
        self.host = host
        # Kernels are only queued on a card, so its forward comes back at once.
        self.returns_early = decoder.device.type == "cuda"

    @torch.inference_mode()
    def forward(self, step: Step) -> object:
        """Start the batch; what it will give."""
        if self.host is not None:
            self.host.copy_out(step.copies_out)
            self.host.copy_in(step.copies_in)
        chunks = order_chunks(step.chunks)
        return Computed(chunks, *self.decoder.forward(self._batch(chunks), self.cache))

    def give_back(self, runs: list[tuple[int, int]]) -> None:
        """Let the system have the memory of unused blocks, given as (first, count)."""
        give_back(self.cache.block_view, runs)

    @torch.inference_mode()
    def sample(self, step: Step, computed: object, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        """See Runner."""
        assert isinstance(computed, Computed)
        if computed.states is not None:
            gather(computed.chunks, computed.states.cpu().numpy())
        sequences = [chunk.sequence for chunk in computed.chunks if chunk.samples]
        if not sequences:
            return {}
        sampled = self.sampler.sample(computed.logits, sequences, masks)
        return {s.id: token for s, token in zip(sequences, sampled, strict=True)}

    def _batch(self, chunks: list[Chunk]) -> Batch:
        size, device = self.cache.block_size, self.decoder.device
        tokens: list[int] = []
        positions, slots = [], []
        last = []
        for chunk in chunks:
            tokens += chunk.sequence.tokens[chunk.start : chunk.end]
            span = np.arange(chunk.start, chunk.end)
            table = np.asarray(chunk.sequence.block_table[chunk.start // size : -(-chunk.end // size)], np.int64)
            positions.append(span)
            slots.append(table[span // size - chunk.start // size] * size + span % size)
            if chunk.samples:
                last.append(len(tokens) - 1)
        config = self.decoder.config
        return Batch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.from_numpy(np.concatenate(positions)).to(device),
            slots=torch.from_numpy(np.concatenate(slots)).to(device),
            last=torch.tensor(last, dtype=torch.int64, device=device),
            groups=plan_groups(chunks, size, config.group, self.decoder.dtype, device),
            pooled=any(chunk.sequence.pool for chunk in chunks),
        )


def order_chunks(chunks: list[Chunk]) -> list[Chunk]:
    """Single tokens first, by length, so that attention can bucket them; then prefill."""
    return sorted(chunks, key=lambda chunk: (chunk.count > 1, chunk.end))
