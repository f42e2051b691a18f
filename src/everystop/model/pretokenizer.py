"""How text is cut before byte-pair merging, by the kind that a GGUF file names in `tokenizer.ggml.pre`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from everystop.core.errors import UnsupportedModel

# The expressions are part of the models' published tokenizers (tokenizer.json of Llama 3, Qwen 2 and Mistral Nemo).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """`ignore_merges` takes a whole piece that is a token as it is; `adds_bos` holds where the file does not say."""

    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizer: Callable[[], Normalizer] | None = None


def _split(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_GPT2 = PreTokenizerKind(_gpt2)
_SMOLLM = PreTokenizerKind(_single_digits)
_LLAMA_BPE = PreTokenizerKind(_split(_LLAMA3), ignore_merges=True, adds_bos=True)

KINDS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "smaug-bpe": PreTokenizerKind(_split(_LLAMA3)),
    "qwen2": PreTokenizerKind(_split(_QWEN2), normalizer=normalizers.NFC),
    "tekken": PreTokenizerKind(_split(_TEKKEN), ignore_merges=True, adds_bos=True),
}


def pretokenizer_kind(name: object, source: str) -> PreTokenizerKind:
    """The kind called `name`; raises UnsupportedModel, since a guess gives other ids without any sign."""
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    what = "names no pre-tokenizer (key tokenizer.ggml.pre)" if name is None else f"names the pre-tokenizer {name!r}"
    raise UnsupportedModel(f"{source} {what}, which is not supported; supported: {', '.join(sorted(KINDS))}")
