"""Build a `Tokenizer` from a model's files: the keys of a GGUF file, or `tokenizer.json` and its neighbours."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

import everystop
from everystop.core.errors import ModelError, ModelFileDamaged, UnsupportedModel
from everystop.model.checkpoint import Checkpoint
from everystop.model.from_gguf import GgufCheckpoint
from everystop.model.from_safetensors import read_json_object
from everystop.model.gguf import GgufFile
from everystop.model.home import Home, write_atomically
from everystop.model.pretokenizer import pretokenizer_kind
from everystop.model.tokenizer import Tokenizer, TokenizerSettings

TOKENIZER_VERSION = 1
"""Raised whenever the same file gives another tokenizer than before."""

MAX_TOKEN_CHARS = 4096
MAX_CUTS = 100_000_000
"""Characters that are compared, at most, to find the pairs of pieces that make a piece."""

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_tokenizer(checkpoint: Checkpoint, home: Home | None = None) -> Tokenizer:
    """The tokenizer of a checked model; one that had to be built from a GGUF file is kept in `home`.

    Raises UnsupportedModel for kinds that are not served, ModelFileDamaged where the files contradict themselves.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        tokenizer = Tokenizer(_gguf_inner(checkpoint.gguf, home), _gguf_settings(checkpoint.gguf))
    else:
        tokenizer = tokenizer_from_folder(checkpoint.path)
    if tokenizer.num_ids > checkpoint.spec.vocab_size:
        raise ModelFileDamaged(
            f"{checkpoint.path}: the tokenizer has {tokenizer.num_ids:,} ids, "
            f"but the embedding only {checkpoint.spec.vocab_size:,} rows"
        )
    return tokenizer


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with `tokenizer.json`; ids that end a text come from all files that name some."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{path} is missing; only models with a tokenizer.json are supported")
    try:
        inner = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises no narrower class
        raise ModelFileDamaged(f"{path}: is no tokenizer: {error}") from error
    config, generation, model = (
        _optional_object(folder / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )

    def id_of(token: Any) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return inner.token_to_id(content) if isinstance(content, str) else None

    eos_ids = [*_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id"))]
    if (eos_id := id_of(config.get("eos_token"))) is not None:
        eos_ids.insert(0, eos_id)
    bos_id = id_of(config.get("bos_token"))
    if bos_id is None:
        bos_id = next(iter(_ids(model.get("bos_token_id"))), None)
    adds_bos = config.get("add_bos_token")
    settings = TokenizerSettings(
        bos_id=bos_id,
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        eos_ids=tuple(eos_ids),
        source=str(path),
    )
    return Tokenizer(inner, settings)


def _optional_object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    """One id or a list of ids, as configuration files have them."""
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if type(token_id) is int and token_id >= 0]


def _gguf_inner(gguf: GgufFile, home: Home | None) -> tokenizers.Tokenizer:
    """The built tokenizer, from `home` where it is kept; a home that cannot be used only costs time."""
    if home is None:
        return _build_gguf(gguf)
    try:
        key = f"{home.sha256(gguf.path)[:32]}-{everystop.__version__}-{TOKENIZER_VERSION}-{tokenizers.__version__}"
        path = home.folder("tokenizers") / f"{key}.json"
    except OSError:
        return _build_gguf(gguf)
    if (inner := _read_cached(path)) is None:
        inner = _build_gguf(gguf)
        data = _compact_json(inner)
        with contextlib.suppress(OSError):
            write_atomically(path, b"%08x\n%s" % (zlib.crc32(data), data))
    return inner


def _read_cached(path: Path) -> tokenizers.Tokenizer | None:
    """A cached tokenizer: CRC-32 in hex, newline, JSON; None where there is none or it has been altered."""
    try:
        checksum, _, data = path.read_bytes().partition(b"\n")
        if int(checksum, 16) != zlib.crc32(data):
            return None
        return tokenizers.Tokenizer.from_buffer(data)
    except (OSError, ValueError):
        return None


def _compact_json(inner: tokenizers.Tokenizer) -> bytes:
    """The tokenizer as JSON; merges as "a b", which are read in two thirds of the time of pairs."""
    data = json.loads(inner.to_str())
    merges = data["model"]["merges"]
    if not any(" " in piece for pair in merges for piece in pair):
        data["model"]["merges"] = [" ".join(pair) for pair in merges]
    return json.dumps(data, ensure_ascii=False).encode()


def _gguf_settings(gguf: GgufFile) -> TokenizerSettings:
    kind = gguf.get("tokenizer.ggml.model")
    default = True if kind == "llama" else pretokenizer_kind(gguf.get("tokenizer.ggml.pre"), str(gguf.path)).adds_bos
    adds_bos = gguf.get("tokenizer.ggml.add_bos_token", default)
    eos_ids = [token_id for key in _GGUF_EOS_KEYS for token_id in _ids(gguf.get(f"tokenizer.ggml.{key}"))]
    bos_ids = _ids(gguf.get("tokenizer.ggml.bos_token_id"))
    return TokenizerSettings(
        bos_id=bos_ids[0] if bos_ids else None,
        adds_bos=bool(adds_bos),
        eos_ids=tuple(eos_ids),
        num_ids=_num_used(gguf.get("tokenizer.ggml.token_type")),
        source=str(gguf.path),
    )


def _build_gguf(gguf: GgufFile) -> tokenizers.Tokenizer:
    kind = gguf.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{gguf.path}: a tokenizer of the model {kind!r} is not supported; supported: gpt2 (byte-level BPE), llama"
        )
    tokens = _strings(gguf, "tokens")
    if (longest := max(map(len, tokens))) > MAX_TOKEN_CHARS:
        raise ModelFileDamaged(f"{gguf.path}: a token has {longest:,} characters; at most {MAX_TOKEN_CHARS:,} may be")
    types = _numbers(gguf, "token_type", len(tokens))
    try:
        inner = _byte_level(gguf, tokens, types) if kind == "gpt2" else _sentencepiece(gguf, tokens, types)
    except ModelError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise ModelFileDamaged(f"{gguf.path}: the vocabulary and its merges do not fit together: {error}") from error
    _add_tokens(inner, tokens, types)
    return inner


def _strings(gguf: GgufFile, name: str) -> list[str]:
    values = gguf.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ModelFileDamaged(f"{gguf.path}: key tokenizer.ggml.{name} is missing or no list of strings")
    return values


def _numbers(gguf: GgufFile, name: str, count: int) -> list[float]:
    values = gguf.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or len(values) != count or not isinstance(values[0], int | float):
        raise ModelFileDamaged(f"{gguf.path}: key tokenizer.ggml.{name} is missing or no list of {count:,} numbers")
    return values


def _num_used(types: list[float]) -> int:
    """The ids without unused ones at the end, which pad the list to the rows of the embedding."""
    num_used = len(types)
    while num_used and types[num_used - 1] == _UNUSED:
        num_used -= 1
    return num_used


def _vocabulary(tokens: list[str], types: list[float]) -> dict[str, int]:
    """The ids of the tokens that are used; of equal ones the last."""
    return {token: token_id for token_id, token in enumerate(tokens[: _num_used(types)])}


def _byte_level(gguf: GgufFile, tokens: list[str], types: list[float]) -> tokenizers.Tokenizer:
    kind = pretokenizer_kind(gguf.get("tokenizer.ggml.pre"), str(gguf.path))
    merges = []
    for merge in _strings(gguf, "merges"):
        left, blank, right = merge.partition(" ")
        if not (left and blank and right):
            raise ModelFileDamaged(f"{gguf.path}: {merge!r} in tokenizer.ggml.merges is no pair")
        merges.append((left, right))
    vocabulary = _vocabulary(tokens, types)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind.ignore_merges))
    inner.pre_tokenizer = kind.build()
    if kind.normalizer is not None:
        inner.normalizer = kind.normalizer()
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(gguf: GgufFile, tokens: list[str], types: list[float]) -> tokenizers.Tokenizer:
    """SentencePiece as BPE with merges: a pair's rank is the score of the piece that it makes."""
    scores = _numbers(gguf, "scores", len(tokens))
    if sum(len(token) ** 2 for token in tokens) > MAX_CUTS:
        raise ModelFileDamaged(f"{gguf.path}: the tokens are too long to find the pairs that make them")
    vocabulary = _vocabulary(tokens, types)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    special = {token for token, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)}
    merges = _merges_from_scores(vocabulary, scores, special)
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    blanks: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.get("tokenizer.ggml.add_space_prefix", True):
        blanks.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    inner.normalizer = normalizers.Sequence(blanks)
    inner.decoder = decoders.Sequence(undo)
    return inner


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float], special: set[str]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best score first, then by the ids of their halves."""
    ranked = []
    for piece, piece_id in vocabulary.items():
        if piece in special:
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[piece_id], left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_tokens(inner: tokenizers.Tokenizer, tokens: list[str], types: Iterable[float]) -> None:
    """Mark control tokens, and those that the model's authors defined, as never cut."""
    control, defined = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN) and token:
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and token:
            defined.append(AddedToken(token, special=False, normalized=False))
    inner.add_special_tokens(control)
    inner.add_tokens(defined)
