from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import transformers
from tests.model.reference_tokenizer import byte_level_ids, gpt2_pieces, sentencepiece_ids, single_digit_pieces
from tests.model.vocabularies import (
    CORPUS,
    byte_level_keys,
    sentencepiece_inner,
    sentencepiece_keys,
    trained_byte_level,
    trained_sentencepiece,
    write_tokenizer,
    write_vocabulary,
)
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from everystop.core.errors import ModelFileDamaged, RequestError, UnsupportedModel
from everystop.core.request import SamplingParams
from everystop.model.checkpoint import inspect_model
from everystop.model.gguf import GgufFile
from everystop.model.home import Home
from everystop.model.tokenizer import IncrementalDetokenizer, RenderedPrompt, Tokenizer, TokenizerSettings
from everystop.model.tokenizer_files import load_tokenizer, tokenizer_from_folder

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(tmp_path: Path, keys: dict[str, object], home: Home | None = None) -> Tokenizer:
    return load_tokenizer(inspect_model(write_vocabulary(tmp_path / "m.gguf", keys)), home)


@pytest.mark.parametrize(("pre", "cut"), [("smollm", single_digit_pieces), ("gpt-2", gpt2_pieces)])
def test_byte_level_ids_equal_the_slow_reference(tmp_path: Path, pre: str, cut: object) -> None:
    tokens, merges = trained_byte_level()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    ours = gguf_tokenizer(tmp_path, byte_level_keys(pre))
    for text in CORPUS:
        assert ours.encode(text) == byte_level_ids(cut(text), vocabulary, merges), text  # type: ignore[operator]


def test_qwen2_ids_equal_transformers(tmp_path: Path) -> None:
    tokens, merges = trained_byte_level()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    theirs = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    ours = gguf_tokenizer(tmp_path, byte_level_keys("qwen2"))
    for text in CORPUS:
        if "<|" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_llama3_ids_equal_the_published_form(tmp_path: Path) -> None:
    tokens, merges = trained_byte_level()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = gguf_tokenizer(tmp_path, byte_level_keys("llama-bpe"))
    assert ours.adds_bos
    for text in CORPUS:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids, text


def test_pretokenizer_kinds_differ_where_they_should(tmp_path: Path) -> None:
    cuts = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"):
        inner = gguf_tokenizer(tmp_path, byte_level_keys(pre))._inner
        cuts[pre] = [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str("It'S 12345 HelloWorld\n\n x")]
    assert cuts["gpt-2"] == ["It", "'", "S", "Ġ12345", "ĠHelloWorld", "ĊĊ", "Ġx"]
    assert cuts["smollm"] == ["It", "'", "S", "Ġ", "1", "2", "3", "4", "5", "ĠHelloWorld", "ĊĊ", "Ġx"]
    assert cuts["llama-bpe"] == ["It", "'S", "Ġ", "123", "45", "ĠHelloWorld", "ĊĊ", "Ġx"]
    assert cuts["qwen2"] == ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "ĠHelloWorld", "ĊĊ", "Ġx"]
    assert cuts["tekken"] == ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "ĠHello", "World", "ĊĊ", "Ġx"]


@pytest.mark.parametrize("pre", ["mpt", "default", None])
def test_unknown_or_missing_pretokenizer_is_refused_by_name(tmp_path: Path, pre: str | None) -> None:
    with pytest.raises(UnsupportedModel, match=repr(pre) if pre is not None else "names no pre-tokenizer") as caught:
        gguf_tokenizer(tmp_path, byte_level_keys(pre))
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("model", ["bert", "t5", None])
def test_unknown_tokenizer_model_is_refused_by_name(tmp_path: Path, model: str | None) -> None:
    keys = byte_level_keys("gpt-2")
    del keys["tokenizer.ggml.model"]
    with pytest.raises(UnsupportedModel, match=repr(model)):
        gguf_tokenizer(tmp_path, keys | ({"tokenizer.ggml.model": model} if model else {}))


def test_sentencepiece_ids_equal_the_slow_reference(tmp_path: Path) -> None:
    tokens, scores, _ = trained_sentencepiece()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    ours = gguf_tokenizer(tmp_path, sentencepiece_keys())
    assert ours.adds_bos
    for text in CORPUS:
        assert ours.encode(text, add_special=False) == sentencepiece_ids(text, vocabulary, scores), text
        assert ours.encode(text)[0] == 1
        assert ours.decode(ours.encode(text)) == text.replace("▁", " "), text


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    keys = sentencepiece_keys() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    ours = gguf_tokenizer(tmp_path, keys)
    assert ours.token_bytes(ours.encode("the")[0])[:1] != b" "
    assert ours.decode(ours.encode(" the dog")) == " the dog"


def test_control_tokens_are_never_made_from_text(tmp_path: Path) -> None:
    for ours in (gguf_tokenizer(tmp_path, byte_level_keys()), gguf_tokenizer(tmp_path, sentencepiece_keys())):
        for control in (*ours.control_tokens, "x<|im_end|>y", "<s>", "</s></s>"):
            ids = ours.encode(control, add_special=False)
            assert not ours.control_ids & set(ids)
            assert ours.decode(ids) == control


def test_rendered_prompt_keeps_the_template_s_control_tokens(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    ids = ours.encode_rendered(RenderedPrompt(text="<|im_start|>user\nhi there<|im_end|>\n"))
    assert ids == [1, *ours.encode("user\nhi there"), 2, *ours.encode("\n")]
    guarded = RenderedPrompt(text="<|im_start|>user\n<\ufdd0|im_end|> hi<|im_end|>\n", guard="\ufdd0")
    assert ours.encode_rendered(guarded) == [1, *ours.encode("user\n<|im_end|> hi"), 2, *ours.encode("\n")]


def whole(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    """The ids that the library gives for a rendered prompt as one string."""
    reference = tokenizers.Tokenizer.from_str(inner.to_str())
    reference.encode_special_tokens = False
    return list(reference.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("scheme", [None, "first", "always", "never"])
def test_rendered_prompt_equals_the_library_on_the_whole_string(tmp_path: Path, scheme: str | None) -> None:
    inner = sentencepiece_inner(scheme)
    ours = tokenizer_from_folder(write_tokenizer(tmp_path, inner))
    rng = random.Random(3)
    for text in CORPUS:
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        prompt = f"<s>[INST] {text[: cuts[0]]}</s>{text[cuts[0] : cuts[1]]}<s> {text[cuts[1] :]}"
        assert ours.encode_rendered(RenderedPrompt(text=prompt)) == whole(inner, prompt), prompt


def test_rendered_prompt_with_tokens_that_swallow_blanks_equals_the_library(tmp_path: Path) -> None:
    inner = sentencepiece_inner()
    inner.add_special_tokens([AddedToken("<end>", special=True, rstrip=True, lstrip=True, normalized=False)])
    ours = tokenizer_from_folder(write_tokenizer(tmp_path, inner))
    prompt = "<s>a quick  <end>  fox<end>\n\ndog"
    ids = ours.encode_rendered(RenderedPrompt(text=prompt))
    assert ids == whole(inner, prompt)
    assert ids.count(inner.token_to_id("<end>")) == 2
    guarded = ours.encode_rendered(RenderedPrompt(text="<s>a <\ufdd0end> b<end>", guard="\ufdd0"))
    assert guarded.count(inner.token_to_id("<end>")) == 1


def bos_tokenizer(tmp_path: Path, adds_bos: bool) -> Tokenizer:
    inner = sentencepiece_inner()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer_from_folder(write_tokenizer(tmp_path, inner, bos_token="<s>", eos_token="</s>"))


@pytest.mark.parametrize("in_template", ["", "<s>", "<s><s>"])
def test_begin_of_text_comes_exactly_once(tmp_path: Path, in_template: str) -> None:
    ours = bos_tokenizer(tmp_path, adds_bos=True)
    assert ours.adds_bos
    ids = ours.encode_rendered(RenderedPrompt(text=in_template + "[INST] the fox"))
    assert ids == [1, *ours.encode("[INST] the fox", add_special=False)]
    raw = ours.encode("the fox")
    assert raw == [1, *ours.encode("the fox", add_special=False)]
    assert ours.encode(in_template + "the fox").count(1) == 1


def test_begin_of_text_is_not_added_where_the_model_does_not_use_it(tmp_path: Path) -> None:
    ours = bos_tokenizer(tmp_path, adds_bos=False)
    assert not ours.adds_bos
    assert 1 not in ours.encode("the fox")
    assert ours.encode_rendered(RenderedPrompt(text="the fox")).count(1) == 0
    assert ours.encode_rendered(RenderedPrompt(text="<s>the fox")).count(1) == 1


@pytest.mark.parametrize(("written", "post_processor"), [(True, False), (False, True)])
def test_add_bos_token_of_the_config_rules(tmp_path: Path, written: bool, post_processor: bool) -> None:
    inner = sentencepiece_inner()
    if post_processor:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    ours = tokenizer_from_folder(write_tokenizer(tmp_path, inner, bos_token="<s>", add_bos_token=written))
    assert ours.adds_bos is written
    assert ours.encode("the") == [*[1] * written, *ours.encode("the", add_special=False), *[2] * post_processor]


def test_end_ids_come_from_all_sources(tmp_path: Path) -> None:
    inner = sentencepiece_inner()
    inner.add_special_tokens(["<stop>", "<|eot_id|>"])
    folder = write_tokenizer(tmp_path, inner, eos_token={"content": "<stop>"}, bos_token="<s>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9, 10**9]}))
    ours = tokenizer_from_folder(folder)
    stop, turn = inner.token_to_id("<stop>"), inner.token_to_id("<|eot_id|>")
    assert ours.eos_ids == tuple(sorted({2, 7, 8, 9, stop, turn}))
    assert (ours.bos_token, ours.eos_token) == ("<s>", "<stop>")


def test_end_ids_of_gguf_keys_and_known_names(tmp_path: Path) -> None:
    keys = byte_level_keys() | {"tokenizer.ggml.eot_token_id": 40, "tokenizer.ggml.eom_token_id": 41}
    ours = gguf_tokenizer(tmp_path, keys)
    assert ours.eos_ids == (0, 2, 40, 41)
    assert (ours.bos_token, ours.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_number_of_ids_excludes_padding_and_counts_gaps(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    assert ours.num_ids == len(trained_byte_level()[0]) < 1000
    tokens, scores, types = trained_sentencepiece()
    padded = sentencepiece_keys() | {"tokenizer.ggml.tokens": [*tokens, "[PAD1]", "[PAD2]"]}
    padded |= {"tokenizer.ggml.scores": [*scores, 0.0, 0.0], "tokenizer.ggml.token_type": [*types, 5, 5]}
    assert gguf_tokenizer(tmp_path, padded).num_ids == len(tokens)


@pytest.mark.parametrize(
    ("ids", "added", "num_ids"),
    [((0, 1, 2), 0, 3), ((0, 9), 0, 10), ((0, 1, 3, 9), 0, 10), ((0, 2, 9), 0, 10), ((0, 1), 2, 4), ((0, 7), 1, 8)],
)
def test_no_gap_hides_an_id(ids: tuple[int, ...], added: int, num_ids: int) -> None:
    """Of the ids 0, 1, 3 and 9 the id 3 is there and 4 is not, as in a vocabulary of four tokens without a gap."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={chr(97 + i): token_id for i, token_id in enumerate(ids)}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([f"<{i}>" for i in range(added)])
    ours = Tokenizer(inner, TokenizerSettings())
    assert ours.num_ids == num_ids
    every = "".join(map(chr, range(97, 97 + len(ids))))
    assert max(ours.encode(every)) < num_ids


def test_a_gap_hides_no_id_beyond_the_embedding(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", byte_level_keys(), num_rows=8)
    inner = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 3, "d": 9}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))
    checkpoint = SimpleNamespace(path=tmp_path, spec=inspect_model(path).spec)
    with pytest.raises(ModelFileDamaged, match=r"tokenizer has 10 ids, but the embedding only 8 rows"):
        load_tokenizer(checkpoint)  # type: ignore[arg-type]


def test_equal_tokens_hide_no_id(tmp_path: Path) -> None:
    tokens, scores, types = trained_sentencepiece()
    num_tokens = len(tokens)
    keys = sentencepiece_keys() | {
        "tokenizer.ggml.tokens": [*tokens, "twice", "twice"],
        "tokenizer.ggml.scores": [*scores, 0.0, 0.0],
        "tokenizer.ggml.token_type": [*types, 1, 1],
    }
    for home in (None, Home(tmp_path / "home"), Home(tmp_path / "home")):
        assert gguf_tokenizer(tmp_path, keys, home).num_ids == num_tokens + 2


@pytest.mark.parametrize("wrong", ["before", "behind", "bos"])
def test_no_id_beyond_the_vocabulary_is_put_around_texts(wrong: str) -> None:
    """Every prompt would have it, and no row of the embedding does."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    settings = TokenizerSettings(source="some/tokenizer.json")
    if wrong == "bos":
        settings = replace(settings, bos_id=7, adds_bos=True)
    else:
        template = "<s> $A" if wrong == "before" else "$A <s>"
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 7)])
    with pytest.raises(ModelFileDamaged, match=r"some/tokenizer\.json: the token id 7 .+ tokenizer has 2 ids"):
        Tokenizer(inner, settings)


def test_more_ids_than_rows_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", byte_level_keys(), num_rows=32)
    with pytest.raises(ModelFileDamaged, match=r"tokenizer has \d+ ids, but the embedding only 32 rows"):
        load_tokenizer(inspect_model(path))


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "ok \ud83d\u0020"])
def test_lone_surrogates_are_the_client_s_error(tmp_path: Path, text: str) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    with pytest.raises(RequestError, match="lone surrogate"):
        ours.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        ours.encode_rendered(RenderedPrompt(text="<|im_start|>" + text))


def test_decode_equals_the_library(tmp_path: Path) -> None:
    rng = random.Random(1)
    for keys in (byte_level_keys(), sentencepiece_keys()):
        ours = gguf_tokenizer(tmp_path, keys)
        for text in CORPUS:
            ids = ours.encode(text, add_special=False)
            assert ours.decode(ids) == ours._inner.decode(ids), text
        ids = [rng.randrange(3, ours.num_ids) for _ in range(300)]
        if keys["tokenizer.ggml.model"] == "gpt2":
            assert ours.decode(ids) == ours._inner.decode(ids)


def test_tokens_that_do_not_exist_decode_to_nothing(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    for token_id in (ours.num_ids, 10**6, 2**40, -1):
        assert ours.token_bytes(token_id) == b""
        assert IncrementalDetokenizer(ours).push([token_id]) == ""


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_incremental_text_joins_to_the_whole_and_never_holds_half_a_character(tmp_path: Path, kind: str) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys() if kind == "byte-level" else sentencepiece_keys())
    for text in CORPUS:
        ids = ours.encode("x" + text, add_special=False)
        for stride in (1, 2, 5):
            detokenizer = IncrementalDetokenizer(ours)
            deltas = [detokenizer.push(ids[i : i + stride]) for i in range(0, len(ids), stride)]
            assert not any("\ufffd" in delta for delta in deltas)
            assert detokenizer.flush() == ""
            whole_text = b"".join(map(ours.token_bytes, ids)).decode()
            assert "".join(deltas) == whole_text
            assert "".join(map(ours.text_decoder().feed, ids)) == whole_text


def test_invalid_bytes_become_replacement_characters_and_hold_at_most_three(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    of_byte = {ours.token_bytes(i): i for i in range(3, 300) if len(ours.token_bytes(i)) == 1}
    rng = random.Random(2)
    for _ in range(300):
        data = bytes(rng.choice((0x41, 0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xBD, 0xC3, 0xFF)) for _ in range(12))
        detokenizer = IncrementalDetokenizer(ours)
        text, sent = "", 0
        for position, byte in enumerate(data):
            delta = detokenizer.push([of_byte[bytes([byte])]])
            text += delta
            sent = position + 1 if delta else sent
            assert position + 1 - sent <= 3
        text += detokenizer.flush()
        assert text == data.decode(errors="replace")


def test_prompt_that_ends_inside_a_character_leaks_nothing(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    of_byte = {ours.token_bytes(i): i for i in range(3, 300) if len(ours.token_bytes(i)) == 1}
    detokenizer = IncrementalDetokenizer(ours)  # the prompt was "Hello " and the first two bytes of 你
    assert detokenizer.push([of_byte["你".encode()[2:]]]) == "\ufffd"
    assert detokenizer.push(ours.encode("A")) == "A"


def test_control_tokens_are_skipped_or_shown(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    ids = [1, *ours.encode("hi"), 2]
    assert ours.decode(ids) == IncrementalDetokenizer(ours).push(ids) == "hi"
    shown = IncrementalDetokenizer(ours, skip_special_tokens=False).push(ids)
    assert shown == ours.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_built_tokenizer_is_kept_and_read_again(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gguf_tokenizer(tmp_path, byte_level_keys("qwen2"), home)
    (entry,) = (home.root / "tokenizers").iterdir()
    checkpoint = inspect_model(tmp_path / "m.gguf")
    real = GgufFile.get

    def get(self: GgufFile, key: str, default: object = None) -> object:
        assert key not in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
        return real(self, key, default)

    with monkeypatch.context() as patch:
        patch.setattr(GgufFile, "get", get)
        second = load_tokenizer(checkpoint, home)
    for text in CORPUS:
        assert second.encode(text) == first.encode(text)
    assert (second.eos_ids, second.num_ids, second.control_ids) == (first.eos_ids, first.num_ids, first.control_ids)
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    third = load_tokenizer(checkpoint, home)
    assert third.encode(CORPUS[9]) == first.encode(CORPUS[9])
    assert entry.read_bytes() != bytes(data)


def test_home_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ours = gguf_tokenizer(tmp_path, byte_level_keys(), Home(tmp_path / "file"))
    assert ours.encode("hi")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.merges": ["a b", "nopair"]}, "'nopair'"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "do not fit together"),
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, "tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
    ],
)
def test_contradicting_vocabulary_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileDamaged, match=message):
        gguf_tokenizer(tmp_path, byte_level_keys() | changes)


def test_hostile_byte_tokens_are_plain_text(tmp_path: Path) -> None:
    tokens, scores, types = trained_sentencepiece()
    keys = sentencepiece_keys() | {"tokenizer.ggml.tokens": [*tokens, "<0x-1>", "<0xGG>", "<0x100>"]}
    keys |= {"tokenizer.ggml.scores": [*scores, 0.0, 0.0, 0.0], "tokenizer.ggml.token_type": [*types, 6, 6, 6]}
    ours = gguf_tokenizer(tmp_path, keys)
    assert [ours.token_bytes(len(tokens) + i) for i in range(3)] == [b"<0x-1>", b"<0xGG>", b"<0x100>"]


def test_folder_without_tokenizer_or_with_a_broken_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json is missing"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelFileDamaged, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


def test_decoder_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        tokenizer_from_folder(write_tokenizer(tmp_path, inner))


def test_threads_may_encode_at_once(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys())
    wanted = [ours.encode(text) for text in CORPUS]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            wrong.extend(text for text, ids in zip(CORPUS, wanted, strict=True) if ours.encode(text) != ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.model
def test_embedded_tokenizer_equals_the_slow_reference(smollm2_path: Path) -> None:
    checkpoint = inspect_model(smollm2_path)
    ours = load_tokenizer(checkpoint)
    gguf = GgufFile(smollm2_path)
    vocabulary = {token: token_id for token_id, token in enumerate(gguf.get("tokenizer.ggml.tokens"))}
    merges = gguf.get("tokenizer.ggml.merges")
    for text in (*CORPUS, "The capital of France is", "Hello world! 123", "Café déjà vu."):
        assert ours.encode(text) == byte_level_ids(single_digit_pieces(text), vocabulary, merges), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert ours.eos_ids == (0, 2)
    assert (ours.num_ids, ours.adds_bos) == (49_152, False)


@pytest.mark.parametrize("in_template", ["", "<s>"])
def test_a_rendered_prompt_gets_what_a_raw_one_gets_on_request(tmp_path: Path, in_template: str) -> None:
    inner = sentencepiece_inner()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    ours = tokenizer_from_folder(write_tokenizer(tmp_path, inner, bos_token="<s>", eos_token="</s>"))
    prompt = RenderedPrompt(text=in_template + "the fox")
    plain = ours.encode_rendered(prompt)
    assert (plain.count(1), plain.count(2)) == (1, 0)
    assert ours.encode_rendered(prompt, add_special=True) == [*plain, 2]


def test_stop_strings_that_are_control_tokens_stop_at_their_ids(tmp_path: Path) -> None:
    ours = bos_tokenizer(tmp_path, adds_bos=True)
    params = SamplingParams(stop=("the", "</s>"), stop_token_ids=(9,))
    assert ours.with_control_stops(params) == replace(params, stop_token_ids=(9, 2))
    assert ours.with_control_stops(SamplingParams(stop=("the",))) == SamplingParams(stop=("the",))


def test_control_tokens_are_left_out_of_text_or_not(tmp_path: Path) -> None:
    ours = bos_tokenizer(tmp_path, adds_bos=True)
    ids = [*ours.encode("the fox", add_special=False), 2]
    assert ours.text_decoder().push(ids).strip() == "the fox"
    assert ours.text_decoder(skip_special_tokens=False).push(ids).strip() == "the fox</s>"


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2"])
def test_spans_are_the_same_ids_with_their_places(tmp_path: Path, pre: str) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys(pre))
    for text in CORPUS:
        spans = ours.spans(text)
        assert [token_id for token_id, _, _ in spans] == ours.encode(text), text
        assert all(0 <= start < stop <= len(text) for _, start, stop in spans), text
        covered = sorted({i for _, start, stop in spans for i in range(start, stop)})
        assert covered == list(range(len(text))) or pre == "qwen2", text  # which composes characters first
        assert [start for _, start, _ in spans] == sorted(start for _, start, _ in spans), text


def test_what_is_put_around_a_text_stands_nowhere_in_it(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys("llama-bpe"))
    assert ours.spans("a")[0] == (ours.bos_id, 0, 0)
    assert ours.spans("a", add_special=False) == ours.spans("a")[1:]
    assert len(ours.spans("a", add_special=False)) == 1


def test_tokens_of_one_character_all_stand_for_it(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, byte_level_keys("smollm"))
    spans = ours.spans("a\U0001f9ffb")
    assert len(spans) > 3, "the character is rare enough to have no token of its own"
    assert {(start, stop) for _, start, stop in spans} == {(0, 1), (1, 2), (2, 3)}
