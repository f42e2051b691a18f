"""`Tokenizer`: text to ids and back; control tokens come from templates and settings, never from a user's text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from everystop.core.errors import ModelFileDamaged, RequestError, UnsupportedModel
from everystop.core.request import SamplingParams

# Control tokens that end a turn or a text; files often declare only one of those that a model writes.
END_TOKENS = frozenset(
    (
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    )
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, int]:
    """Code point to byte for byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return dict(zip([*printable, *range(0x100, 0x100 + len(rest))], [*printable, *rest], strict=True))


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """What a chat template wrote. `guard` is a character that breaks up control tokens inside a client's strings.

    It is put there by `chat_template` and taken out after the control tokens of the template itself have been found.
    """

    text: str
    guard: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What the files say beside the vocabulary.

    `adds_bos` None means: as the tokenizer's own post-processor does. The first of `eos_ids` is the text's end by name.
    `num_ids` is one more than the greatest id, None where only the vocabulary itself tells it.
    """

    bos_id: int | None = None
    adds_bos: bool | None = None
    eos_ids: tuple[int, ...] = ()
    num_ids: int | None = None
    source: str = ""


class Tokenizer:
    """Encodes and decodes with one `tokenizers.Tokenizer`, which it owns; safe to use from several threads.

    `eos_ids` end a generation, `bos_id` may be None, `num_ids` counts valid ids: no text has others, and rows of the
    embedding from there on are padding and must not be sampled. Raises ModelFileDamaged where a text would have others.
    """

    def __init__(self, inner: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self._added = inner.get_added_tokens_decoder()
        self._control = {token_id: token.content for token_id, token in self._added.items() if token.special}
        # One character cannot be broken up by a guard, so tokens of one are left to the text that they stand in.
        self._control_ids = {content: token_id for token_id, content in self._control.items() if len(content) > 1}
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._bytes: dict[int, bytes] = {}
        self._decoding = _Decoding.of(inner, settings.source)
        self._exact: tokenizers.Tokenizer | None = None
        self._continuation: tokenizers.Tokenizer | None = None
        self.bos_id = settings.bos_id
        num_ids = _num_ids(inner) if settings.num_ids is None else settings.num_ids
        self.num_ids = max([num_ids, *(token_id + 1 for token_id in self._added)])
        self._prefix, self._suffix = self._affixes(settings)
        self.eos_ids = self._end_ids(settings.eos_ids)
        self.bos_token = "" if self.bos_id is None else self.token_text(self.bos_id)
        self.eos_token = self.token_text(settings.eos_ids[0]) if settings.eos_ids else ""

    def to_json(self) -> str:
        """The content of a `tokenizer.json` that encodes and decodes alike."""
        return self._inner.to_str()

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The control tokens as text; what a chat template must keep out of a client's strings."""
        return tuple(self._control_ids)

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of control tokens."""
        return frozenset(self._control)

    @property
    def adds_bos(self) -> bool:
        """Whether a raw prompt begins with the begin-of-text token."""
        return self.bos_id is not None and self.bos_id in self._prefix

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a client's text, in which no control token is recognised.

        With `add_special`, begin-of-text (and what else the model's tokenizer adds) is put around it. Raises
        RequestError for text that is not Unicode (a lone surrogate).
        """
        return self.encode_batch([text], add_special=add_special)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """`encode` for several texts at once; lets other threads run meanwhile."""
        encoded = self._encode_plain(self._inner, texts)
        if not add_special or not (self._prefix or self._suffix):
            return encoded
        return [[*self._prefix, *ids, *self._suffix] for ids in encoded]

    def spans(self, text: str, *, add_special: bool = True) -> list[tuple[int, int, int]]:
        """`encode` with places: (id, start, stop) in characters of the text, 0 and 0 for what is put around it.

        Tokens that share a character all stand for it.
        """
        encoding = self._inner.encode_batch([text], add_special_tokens=False)[0]
        inside = [(token, *place) for token, place in zip(encoding.ids, encoding.offsets, strict=True)]
        if not add_special:
            return inside
        return [*((token, 0, 0) for token in self._prefix), *inside, *((token, 0, 0) for token in self._suffix)]

    def encode_rendered(self, prompt: RenderedPrompt, *, add_special: bool = False) -> list[int]:
        """The ids of what a chat template wrote; its own control tokens are recognised, those of clients are text.

        Begins with begin-of-text exactly once where the model uses it, whether or not the template wrote it. With
        `add_special` all else that the model's tokenizer puts around a text is put around this one too.
        """
        guarded = bool(prompt.guard) and prompt.guard in prompt.text
        ids = self._encode_runs(prompt) if guarded or not self._needs_exact else self._encode_exact(prompt.text)
        if add_special:
            ids = [*self._prefix, *ids, *self._suffix]
        bos = self.bos_id
        if bos is None:
            return ids
        if self.adds_bos and ids[:1] != [bos]:
            return [bos, *ids]
        while len(ids) > 1 and ids[1] == bos == ids[0]:
            del ids[0]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids from the start of a text; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        parts = [self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self._control)]
        text = b"".join(parts).decode("utf-8", errors="replace")
        return text[1:] if self._decoding.strips_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; empty for ids that do not exist."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token as text for display; bytes of half a character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def text_decoder(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh decoder for one sequence's output."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)

    def with_control_stops(self, params: SamplingParams) -> SamplingParams:
        """The same, but ending at a control token whose text is one of the stop strings, whether or not it is shown."""
        ids = tuple(self._control_ids[stop] for stop in params.stop if stop in self._control_ids)
        return replace(params, stop_token_ids=(*params.stop_token_ids, *ids)) if ids else params

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        token = self._inner.id_to_token(token_id) if 0 <= token_id < self.num_ids else None
        return b"" if token is None else self._decoding.token_bytes(token)

    def _encode_plain(self, inner: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        try:
            encoded = inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            if all(map(_is_unicode, texts)):
                raise
            raise RequestError(
                "the text is not valid Unicode: it holds a lone surrogate; send UTF-8",
                param="prompt",
                code="invalid_text",
            ) from error
        return [encoding.ids for encoding in encoded]

    def _encode_runs(self, prompt: RenderedPrompt) -> list[int]:
        """Cut at the template's control tokens, and nowhere else: merges are those of the whole text."""
        pieces: list[int | None] = []
        runs: list[str] = []
        later: list[str] = []
        position = 0

        def add_run(start: int, end: int) -> None:
            run = prompt.text[start:end]
            if run := run.replace(prompt.guard, "") if prompt.guard else run:
                pieces.append(None)
                (runs if start == 0 else later).append(run)

        for match in self._control_pattern.finditer(prompt.text):
            add_run(position, match.start())
            pieces.append(self._control_ids[match[0]])
            position = match.end()
        add_run(position, len(prompt.text))
        encoded = iter([*self._encode_plain(self._inner, runs), *self._encode_plain(self._later(), later)])
        ids: list[int] = []
        for piece in pieces:
            ids.extend(next(encoded) if piece is None else (piece,))
        return ids

    @property
    def _needs_exact(self) -> bool:
        """Whether control tokens swallow blanks or match whole words only, which `_encode_runs` does not do."""
        return any(
            token.special and (token.lstrip or token.rstrip or token.single_word) for token in self._added.values()
        )

    def _encode_exact(self, text: str) -> list[int]:
        if self._exact is None:
            exact = tokenizers.Tokenizer.from_str(self._inner.to_str())
            exact.encode_special_tokens = False
            self._exact = exact  # whole, since other threads may encode
        return self._encode_plain(self._exact, [text])[0]

    def _later(self) -> tokenizers.Tokenizer:
        """The tokenizer for text behind a control token: without the blank that some put before a text only."""
        if not self._decoding.prefixes_first_only:
            return self._inner
        if self._continuation is None:
            data = json.loads(self._inner.to_str())
            _never_prefix(data["pre_tokenizer"])
            continuation = tokenizers.Tokenizer.from_str(json.dumps(data))
            continuation.encode_special_tokens = True
            self._continuation = continuation  # whole, since other threads may encode
        return self._continuation

    def _affixes(self, settings: TokenizerSettings) -> tuple[list[int], list[int]]:
        """What the tokenizer's post-processor puts before and behind a text, amended by `adds_bos`."""
        bare = self._inner.encode("a", add_special_tokens=False).ids
        full = self._inner.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
        prefix, suffix = full[:start], full[start + len(bare) :]
        if settings.adds_bos is not None and settings.bos_id is not None:
            prefix = [token_id for token_id in prefix if token_id != settings.bos_id]
            prefix = [settings.bos_id, *prefix] if settings.adds_bos else prefix
        for token_id in (*prefix, *suffix):
            if token_id >= self.num_ids:
                raise ModelFileDamaged(
                    f"{settings.source}: the token id {token_id} is put around every text, and the tokenizer has "
                    f"{self.num_ids:,} ids, from 0; correct the post-processor, or the begin-of-text id"
                )
        return prefix, suffix

    def _end_ids(self, declared: Iterable[int]) -> tuple[int, ...]:
        named = (token_id for token_id, content in self._control.items() if content in END_TOKENS)
        return tuple(sorted({token_id for token_id in (*declared, *named) if 0 <= token_id < self.num_ids}))


class IncrementalDetokenizer:
    """Turns one request's tokens into text as they come; holds at most 3 bytes, those of an unfinished character.

    It starts after the prompt and never looks at it, so a prompt that ends inside a character leaks nothing.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.control_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return "" if token_id in self._skipped else self._decoder.decode(self._token_bytes(token_id))

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty. Ids that do not exist add nothing."""
        skipped = self._skipped
        return self._decoder.decode(b"".join([self._token_bytes(i) for i in token_ids if i not in skipped]))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How tokens become bytes: byte-level BPE, or SentencePiece with ▁ for a blank and <0xAB> for bytes."""

    byte_level: bool
    strips_space: bool = False
    prefixes_first_only: bool = False

    @staticmethod
    def of(inner: tokenizers.Tokenizer, source: str) -> _Decoding:
        """Read it off the decoder; raises UnsupportedModel for kinds that are not known to decode token by token."""
        parts = _parts(inner.decoder)
        kinds = [part.get("type") for part in parts]
        if kinds == ["ByteLevel"]:
            return _Decoding(byte_level=True)
        pre = [part for part in _parts(inner.pre_tokenizer) if part.get("type") == "Metaspace"]
        first_only = any(part.get("prepend_scheme") == "first" for part in pre)
        if kinds == ["Metaspace"]:
            return _Decoding(False, parts[0].get("prepend_scheme") != "never", first_only)
        if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return _Decoding(False, "Strip" in kinds, first_only)
        raise UnsupportedModel(f"{source}: a tokenizer with the decoder {kinds} is not supported")

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary."""
        if self.byte_level:
            try:
                return bytes([_ALPHABET[ord(character)] for character in token])
            except KeyError:
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()


def _num_ids(inner: tokenizers.Tokenizer) -> int:
    """One more than the greatest id of the vocabulary, which is looked through: as many ids from 0 as there are tokens
    leave none for others; where there are gaps it is listed, which is slow.
    """
    model, num_tokens = inner.model, inner.get_vocab_size(with_added_tokens=False)
    if None not in map(model.id_to_token, range(num_tokens)):
        return num_tokens
    return max(inner.get_vocab(with_added_tokens=False).values(), default=-1) + 1


def _parts(component: Any) -> list[dict[str, Any]]:
    """The description of a tokenizer's component, sequences flattened."""
    if component is None:
        return []
    state = component.__getstate__()
    data = json.loads(state)
    for key in ("decoders", "pretokenizers"):
        if key in data:
            return list(data[key])
    return [data]


def _never_prefix(pre_tokenizer: dict[str, Any]) -> None:
    for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
