"""SentencePiece's kind of BPE: spaces are a visible mark, characters that no piece has are spelled as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def is_sentencepiece(backend: Backend) -> bool:
    """True when its decoder turns the mark into a space and spelled bytes into bytes."""
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step["type"] for step in steps}
    marks = any(step.get("pattern") == {"String": SPACE} and step.get("content") == " " for step in steps)
    return "ByteFallback" in kinds and (marks or "Metaspace" in kinds)


def piece_bytes(piece: str) -> bytes:
    """What a piece stands for within a text. A leading space is kept: the text before it was another token's."""
    spelled = _BYTE.fullmatch(piece)
    return bytes([int(spelled[1], 16)]) if spelled else piece.replace(SPACE, " ").encode()


def backend_of(tokens: Sequence[str], scores: Sequence[float], unknown: str, *, prefix: bool) -> Backend:
    """The tokenizer of a vocabulary with scores, as GGUF files hold it; with `prefix`, texts begin with a space."""
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = _merges(vocab, scores)
    backend = Backend(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs that make a piece, the piece with the best score first: what BPE joins next."""
    ranked = []
    for piece, id in vocab.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab:
                ranked.append((-scores[id], id, vocab[left], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
