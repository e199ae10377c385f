"""Text to token ids and back, from a GGUF header or a tokenizer.json."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.errors import ContextTooLong, TemplateError, UnsupportedModel
from engine.sentencepiece import backend_of, is_sentencepiece, piece_bytes
from engine.template import ChatTemplate

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_END_NAMES = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids and texts around a sequence; `end_ids` all end a generation."""

    bos_token: str
    eos_token: str
    bos_id: int | None
    end_ids: frozenset[int]
    add_bos: bool


class Tokenizer:
    """Encodes prompts, renders chats and makes detokenizers. Thread-safe."""

    def __init__(self, backend: Backend, special: SpecialTokens, chat_template: str | None) -> None:
        self._backend = backend
        self._bytes = token_bytes(backend)
        self._template = chat_template and ChatTemplate(
            chat_template, bos_token=special.bos_token, eos_token=special.eos_token
        )
        self.special = special
        self.vocab_size = backend.get_vocab_size()
        added = (token.content for token in backend.get_added_tokens_decoder().values())
        self._longest = max([*map(len, self._bytes), *map(len, added), 1])

    def encode(self, text: str, window: int | None = None, *, bos: bool = True) -> list[int]:
        """Ids of plain text, with a BOS where the model wants one. Raises ContextTooLong for what no window holds."""
        ids = self._encode(text, window, "prompt")
        if bos and self.special.add_bos and self.special.bos_id is not None:
            if not ids or ids[0] != self.special.bos_id:
                ids.insert(0, self.special.bos_id)
        return ids

    def encode_document(self, text: str, window: int | None = None) -> list[int]:
        """Ids of text that is to be embedded, with the special tokens that the model's own tokenizer puts around it."""
        return self._encode(text, window, "input", special=True)

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (), window: int | None = None
    ) -> list[int]:
        """Ids of a rendered chat, with the functions that it may call. Raises TemplateError, or ContextTooLong."""
        if not self._template:
            raise TemplateError("This model has no chat template; use /v1/completions.", "messages")
        return self._encode(self._template.render(messages, tools), window, "messages")

    def _encode(self, text: str, window: int | None, param: str, *, special: bool = False) -> list[int]:
        """Ids of a text, unless even the longest tokens could not bring it into the window.

        A batch of one: the library keeps the GIL for a single text, which would stop all other requests meanwhile.
        """
        least = len(text) // self._longest
        if window is not None and least > window:
            raise ContextTooLong(f"This model's window is {window} tokens; the text has more than {least}.", param)
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Text of ids; special tokens are left out, or with `special` written by their names."""
        text: str = self._backend.decode(ids, skip_special_tokens=not special)
        return text

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token as text shows it; empty for control tokens."""
        return self._bytes[id] if id < len(self._bytes) else b""

    def token_text(self, id: int) -> str:
        """One token on its own, control tokens by name, for log-probability reports."""
        return self.token_bytes(id).decode("utf-8", "replace") or str(self._backend.id_to_token(id) or "")

    def to_json(self) -> str:
        """All of it as tokenizer.json holds it, for a grammar library that reads that."""
        text: str = self._backend.to_str()
        return text

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self._bytes)


class Detokenizer:
    """Tokens to text, piece by piece; bytes of an unfinished character are held back.

    The concatenation of all pieces equals Tokenizer.decode of all ids.
    """

    __slots__ = ("_bytes", "_decoder")

    def __init__(self, table: list[bytes]) -> None:
        self._bytes = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """Text that this token completes, possibly empty."""
        return self._decoder.decode(self._bytes[id] if id < len(self._bytes) else b"")

    def flush(self) -> str:
        """What is left at the end; broken characters become U+FFFD."""
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte value."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [value for value in range(256) if value not in kept]
    table = {chr(value): value for value in kept}
    return table | {chr(256 + index): value for index, value in enumerate(moved)}


def token_bytes(backend: Backend) -> list[bytes]:
    """Bytes of every id; special tokens have none. Raises UnsupportedModel for other kinds of vocabulary."""
    if isinstance(backend.decoder, decoders.ByteLevel):
        spell = _byte_level(byte_alphabet())
    elif is_sentencepiece(backend):
        spell = piece_bytes
    else:
        raise UnsupportedModel("Only byte-level BPE and SentencePiece BPE tokenizers are supported.")
    added = backend.get_added_tokens_decoder()
    table = [b""] * (max(backend.get_vocab().values(), default=-1) + 1)
    for text, id in backend.get_vocab().items():
        if id in added:
            table[id] = b"" if added[id].special else added[id].content.encode()
        else:
            table[id] = spell(text)
    return table


def _byte_level(alphabet: Mapping[str, int]) -> Callable[[str], bytes]:
    def spell(text: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in text])
        except KeyError:
            return text.encode()

    return spell


def load_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that belongs to the model at `path`. Raises UnsupportedModel."""
    if "tokenizer.ggml.model" in metadata:
        return from_gguf(metadata)
    return from_folder(path if path.is_dir() else path.parent)


def from_gguf(meta: Mapping[str, Any]) -> Tokenizer:
    """Build a byte-level or a SentencePiece BPE from GGUF metadata."""
    kind = meta["tokenizer.ggml.model"]
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"GGUF tokenizer {kind!r} is not supported; byte-level and SentencePiece BPE are.")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds = meta.get("tokenizer.ggml.token_type") or []
    backend = _gguf_byte_level(meta, tokens) if kind == "gpt2" else _gguf_sentencepiece(meta, tokens, kinds)
    for token, kind_id in zip(tokens, kinds, strict=False):
        if kind_id in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            _add(backend, token, special=kind_id != _USER_DEFINED)
    backend.post_processor = _surround(meta, tokens)
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(backend, _gguf_special(meta, tokens, kinds), template)


def _gguf_byte_level(meta: Mapping[str, Any], tokens: list[str]) -> Backend:
    pre = str(meta.get("tokenizer.ggml.pre", "default"))
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab, merges, ignore_merges=_SPLITS.get(pre) in (_LLAMA3, _TEKKEN)))
    if _SPLITS.get(pre) is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _gguf_sentencepiece(meta: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Backend:
    """Llama 2 and the first Mistrals; unigram vocabularies go by another name."""
    if meta.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModel("SentencePiece vocabularies that normalise texts are not supported.")
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else 0
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    return backend_of(tokens, meta["tokenizer.ggml.scores"], tokens[unknown], prefix=prefix)


def from_folder(folder: Path) -> Tokenizer:
    """Load tokenizer.json and its companions from a Hugging Face folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{folder} has no tokenizer.json.")
    backend = Backend.from_file(str(path))
    settings = _read(folder / "tokenizer_config.json")
    bos, eos = _text(settings.get("bos_token")), _text(settings.get("eos_token"))
    declared = _read(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _read(folder / "config.json").get("eos_token_id")
    ends = set(declared if isinstance(declared, list) else [declared]) - {None}
    ends.add(backend.token_to_id(eos) if eos else None)
    bos_id = backend.token_to_id(bos) if bos else None
    special = SpecialTokens(
        bos_token=bos,
        eos_token=eos,
        bos_id=bos_id,
        end_ids=frozenset(id for id in ends if id is not None),
        add_bos=bos_id is not None and backend.encode("").ids[:1] == [bos_id],
    )
    return Tokenizer(backend, special, _folder_template(folder, settings))


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging; an unknown way is refused, as it would cut wrongly."""
    if pre in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("smollm", "codeshell", "starcoder", "refact"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if pre in ("default", "gpt-2", "gpt2"):
        return plain
    raise UnsupportedModel(f"GGUF pre-tokenizer {pre!r} is not supported.")


def _gguf_special(meta: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> SpecialTokens:
    bos_id = meta.get("tokenizer.ggml.bos_token_id")
    eos_id = meta.get("tokenizer.ggml.eos_token_id")
    ends = {eos_id, meta.get("tokenizer.ggml.eot_token_id")}
    ends |= {
        id
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _END_NAMES
    }
    return SpecialTokens(
        bos_token=tokens[bos_id] if bos_id is not None else "",
        eos_token=tokens[eos_id] if eos_id is not None else "",
        bos_id=bos_id,
        end_ids=frozenset(id for id in ends if id is not None),
        add_bos=_adds(meta, "bos"),
    )


def _adds(meta: Mapping[str, Any], kind: str) -> bool:
    """Whether texts get the token; where the file does not say, SentencePiece's get a BOS, as in llama.cpp."""
    default = kind == "bos" and meta["tokenizer.ggml.model"] == "llama"
    return bool(meta.get(f"tokenizer.ggml.add_{kind}_token", default))


def _surround(meta: Mapping[str, Any], tokens: list[str]) -> processors.TemplateProcessing | None:
    """The special tokens that the file wants before and after a text, where it wants any."""
    ids = {kind: meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    used = {kind: id for kind, id in ids.items() if id is not None and _adds(meta, kind)}
    if not used:
        return None
    before, after = ([tokens[used[kind]]] if kind in used else [] for kind in ("bos", "eos"))
    special = [(tokens[id], id) for id in used.values()]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)


def _add(backend: Backend, token: str, *, special: bool) -> None:
    added = AddedToken(token, normalized=False, special=special)
    if special:
        backend.add_special_tokens([added])
    else:
        backend.add_tokens([added])


def _text(token: Any) -> str:
    """tokenizer_config.json spells a token as text, as an object, or as null."""
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text("utf-8"))
    return data if isinstance(data, dict) else {}
