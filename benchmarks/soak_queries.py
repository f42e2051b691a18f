"""What the soak asks: requests with one right answer each, requests that must be refused, and how answers compare."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = (
    "the bus stops wherever somebody wants to get on and whoever has arrived gets off while all the others go on "
    "reading counting stations naming colours of houses rivers and bread and asking what time it may be in Paris"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Query:
    """A request whose answer is always the same: it is greedy, or it has a seed."""

    path: str
    body: dict[str, Any]

    @property
    def num_sequences(self) -> int:
        """Sequences that an answer takes: prompts times choices."""
        prompt = self.body.get("prompt")
        return (len(prompt) if isinstance(prompt, list) else 1) * int(self.body.get("n", 1))


def queries(num: int, seed: int, *, max_prompt_words: int, only_text: bool = False) -> list[Query]:
    """So many requests of all kinds; with `only_text`, none that asks for log-probabilities."""
    rng = random.Random(seed)
    openings = [_words(rng, rng.randint(20, 60)) for _ in range(4)]
    return [_query(rng, openings, max_prompt_words, only_text) for _ in range(num)]


def _words(rng: random.Random, num: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num))


def _query(rng: random.Random, openings: list[str], max_prompt_words: int, only_text: bool) -> Query:
    def prompt() -> str:
        opening = rng.choice(openings) + " " if rng.random() < 0.5 else ""
        return opening + _words(rng, rng.randint(1, max_prompt_words))

    body: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 8, 20, 40, 60]), "n": rng.choice([1, 1, 1, 2, 3])}
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": rng.randrange(1000), "top_p": rng.choice([0.9, 1])}
    else:
        body |= {"temperature": 0}
    for chance, field in ((0.3, {"ignore_eos": True}), (0.2, {"stop": [".", "\n", " a"]}), (0.1, {"min_tokens": 1})):
        body |= field if rng.random() < chance else {}
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
    has_logprobs = rng.random() < 0.3 and not only_text
    if rng.random() < 0.4:
        logprobs = {"logprobs": True, "top_logprobs": rng.choice([0, 2])} if has_logprobs else {}
        return Query(CHAT, {"messages": [{"role": "user", "content": prompt()}], **body, **logprobs})
    logprobs = {"logprobs": rng.choice([0, 2])} if has_logprobs else {}
    return Query(COMPLETIONS, {"prompt": [prompt(), prompt()] if rng.random() < 0.2 else prompt(), **body, **logprobs})


def refusals() -> list[tuple[str, bytes, int]]:
    """Requests that must be refused: path, body, status."""
    return [
        (COMPLETIONS, b"{", 400),
        (COMPLETIONS, b"", 400),
        (COMPLETIONS, b'{"prompt": ""}', 400),
        (COMPLETIONS, b'{"prompt": "a", "n": 1000000000}', 400),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
        (COMPLETIONS, b'{"prompt": "a", "no_such_field": 1}', 400),
        (COMPLETIONS, b'{"prompt": [999999999]}', 400),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": 100000000}', 400),
        (COMPLETIONS, json.dumps({"prompt": "word " * 20_000}).encode(), 400),
        (CHAT, b'{"messages": []}', 400),
        (CHAT, b'{"messages": [{"role": "user"}]}', 400),
        (CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        ("/v1/nothing", b"{}", 404),
    ]


def canonical(answer: dict[str, Any]) -> Any:
    """What must be the same each time: choices in order, and the numbers of tokens."""
    usage = answer["usage"]
    choices = [
        (
            choice["index"],
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
            choice.get("logprobs"),
        )
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    ]
    return choices, usage["prompt_tokens"], usage["completion_tokens"]


def put_together(events: Iterator[dict[str, Any]]) -> Any:
    """The events of a stream, with usage, as `canonical` has the whole answer."""
    texts: dict[int, str] = {}
    logprobs: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    for event in events:
        if "error" in event:
            raise ValueError(f"an error within a stream: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[index] = texts.get(index, "") + piece
            if choice.get("logprobs") is not None:
                logprobs[index] = _joined(logprobs.get(index), choice["logprobs"])
            if choice["finish_reason"] is not None:
                if index in reasons:
                    raise ValueError(f"two reasons for choice {index}")
                reasons[index] = choice["finish_reason"]
    choices = [(index, texts[index], reasons.get(index), logprobs.get(index)) for index in sorted(texts)]
    return choices, usage["prompt_tokens"], usage["completion_tokens"]


def _joined(before: Any, after: Any) -> Any:
    """Log-probabilities of two pieces of one text: lists one after the other, the rest as it is."""
    if before is None:
        return after
    return {name: before[name] + value if isinstance(value, list) else value for name, value in after.items()}
