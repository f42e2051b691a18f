"""Whatever a file holds, opening a model either works or raises one of our named errors."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from tests.model.builders import tiny_model, write_folder
from tests.model.vocabularies import (
    CHATML,
    byte_level_keys,
    sentencepiece_inner,
    sentencepiece_keys,
    write_tokenizer,
    write_vocabulary,
)

from everystop.core.errors import ModelError
from everystop.model.chat_template import load_chat_template
from everystop.model.checkpoint import inspect_model
from everystop.model.generation_config import load_generation_defaults
from everystop.model.spec import rope_frequencies
from everystop.model.tokenizer_files import load_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
ODD_VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 3.5, 10**400, 2**63, 1e308, 1e-320, float("inf"), float("nan")),
    *("", "x", "yarn", "llama3", [], {}, [1], {"a": 1}),
]


def opens(path: Path) -> bool:
    """Open everything; False where a named error, which names the file, says why not."""
    try:
        checkpoint = inspect_model(path)
        frequencies, _ = rope_frequencies(checkpoint.spec)
        tokenizer = load_tokenizer(checkpoint)
        load_chat_template(checkpoint, tokenizer)
        load_generation_defaults(checkpoint)
        tokenizer.decode(tokenizer.encode("hello 123"))
    except ModelError as error:
        message = str(error)
    else:
        return frequencies.size > 0
    assert path.name in message
    return False


def test_altered_gguf_keys_raise_only_named_errors(tmp_path: Path) -> None:
    rope = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.attention.key_length": 4,
    }
    for keys in (byte_level_keys("llama-bpe"), sentencepiece_keys()):
        path = write_vocabulary(tmp_path / "damaged.gguf", rope | keys)
        data = path.read_bytes()
        rng = random.Random(7)
        num_open = 0
        for _ in range(400):
            bad = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                bad[rng.randrange(900 if rng.random() < 0.5 else len(data))] = rng.choice((0, 1, 9, 128, 255))
            path.write_bytes(bad)
            num_open += opens(path)
        assert 20 < num_open < 380


def test_odd_values_in_json_files_raise_only_named_errors(tmp_path: Path) -> None:
    model = tiny_model("qwen2", vocab_size=1000, rope_parameters=YARN)
    folder = write_folder(tmp_path / "folder", model)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML, "add_bos_token": True}
    write_tokenizer(folder, sentencepiece_inner(), **config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "temperature": 0.5, "top_k": 3}))
    names = ("config.json", "tokenizer_config.json", "generation_config.json")
    originals = {name: json.loads((folder / name).read_text()) for name in names}
    rng = random.Random(1)
    num_open = 0
    for _ in range(600):
        name = rng.choice(names)
        values = copy.deepcopy(originals[name])
        target, key = values, rng.choice([*values, "rope_scaling", "original_max_position_embeddings"])
        if isinstance(target.get(key), dict) and rng.random() < 0.8:
            target = target[key]
            key = rng.choice(list(target))
        target[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        (folder / name).write_text(json.dumps(values))
        num_open += opens(folder)
        (folder / name).write_text(json.dumps(originals[name]))
    assert 100 < num_open < 580
