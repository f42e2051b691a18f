"""Small tokenizers trained on a few lines, as GGUF files and as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tests.model.builders import add_key, close_writer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TRAINING = [
    "The quick brown fox jumps over the lazy dog. It's 1234567890 o'clock, isn't it? We'll see; I'd've thought so.",
    "Numbers: 3.14159, 2,718, 1000000, 42nd, 1/2.",
    "Words: naïve café Straße Ελλάδα Привет мир 你好 世界 こんにちは 안녕하세요",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\r\n# comment   with   blanks  \n",
    "🙂🙃🚀👩‍👩‍👧 emoji and ▁ underlines __init__ ... !!! ??? <html></html> [INST] {json: true}",
] * 3

CORPUS = [
    "",
    " ",
    "Hello world",
    "  two blanks,   three   blanks    ",
    "tabs\tand\nnewlines\r\n\r\n  \n x",
    "digits 1 12 123 1234 12345 ٣٤٥ ½ ² Ⅷ",
    "it's we'll I'd 'Tis they're I'VE DON'T o'clock 's",
    "你好，世界！こんにちは 안녕하세요",
    "🙂🙃🚀 👩‍👩‍👧 e\u0301 é ﬁ Å",
    "naïve café Straße Ελλάδα Привет",
    "snake_case camelCase __init__ x=1;y+=2 // http://a.b/c?d=e&f=1#g",
    "\u200b\u00a0\u2028\ufeff end",
    "<|im_start|>user\nhi<|im_end|>",
    "a" * 300 + " " + "1" * 50 + "  " + "!" * 40,
    "\x00\x01\x7f control",
    "▁already▁there ▁",
]

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def trained_byte_level(num_ids: int = 700) -> tuple[list[str], list[str]]:
    """Tokens (control tokens first) and merges of a byte-level BPE."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_ids, initial_alphabet=sorted(alphabet), special_tokens=CONTROL, show_progress=False
    )
    inner.train_from_iterator(TRAINING, trainer)
    model = json.loads(inner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def trained_sentencepiece(num_ids: int = 600) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types as a SentencePiece BPE model has them."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=num_ids, show_progress=False)
    inner.train_from_iterator(TRAINING, trainer)
    model = json.loads(inner.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    merged = list(dict.fromkeys(merged))
    letters = sorted(set(model["vocab"]) - set(merged))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters))
    return tokens, scores, types


def write_vocabulary(path: Path, keys: dict[str, Any], num_rows: int = 1000, arch: str = "llama") -> Path:
    """A GGUF model file that is as small as a model can be, with these tokenizer keys."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        add_key(writer, key, value)
    shapes = {"attn_norm": (8,), "ffn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8)}
    shapes |= {"attn_output": (8, 8), "ffn_gate": (8, 8), "ffn_up": (8, 8), "ffn_down": (8, 8)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(shape, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((num_rows, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    close_writer(writer)
    return path


def byte_level_keys(pre: str | None = "smollm", **more: Any) -> dict[str, Any]:
    """The tokenizer keys of a byte-level BPE model."""
    tokens, merges = trained_byte_level()
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    if pre is not None:
        keys["tokenizer.ggml.pre"] = pre
    return keys | {f"tokenizer.{key}": value for key, value in more.items()}


def sentencepiece_keys() -> dict[str, Any]:
    """The tokenizer keys of a SentencePiece BPE model."""
    tokens, scores, types = trained_sentencepiece()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_inner(prepend_scheme: str | None = None) -> tokenizers.Tokenizer:
    """SentencePiece as `tokenizer.json` holds it: with a normalizer, or with Metaspace of the given scheme."""
    tokens, scores, _ = trained_sentencepiece()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [
        (vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece, cut)
        for piece in tokens[259:]
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    pairs.sort(key=lambda pair: (-scores[vocabulary[pair[2]]], pair[0], pair[1]))
    merges = [(piece[:cut], piece[cut:]) for _, _, piece, cut in pairs]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prepend_scheme is None:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    return inner


def write_tokenizer(folder: Path, inner: tokenizers.Tokenizer, **config: Any) -> Path:
    """A folder with `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
