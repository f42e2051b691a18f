"""`ChatTemplate`: messages to the text of a prompt, in a sandbox; keeps control tokens out of what clients wrote.

A client's string that contains a control token (`<|im_end|>`) is broken up by a guard: a character that occurs in no
string of the request, put behind the token's first character. The template sees all other strings as they are, so its
own logic (trimming, splitting, comparing) is untouched; `Tokenizer.encode_rendered` finds the template's control tokens
and then takes the guards out, so that a client's `<|im_end|>` is encoded as the text it is.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from everystop.core.errors import (
    ChatTemplateError,
    ChatTemplateMissing,
    ConfigError,
    ModelFileDamaged,
    RequestError,
    UnsupportedField,
    UnsupportedModel,
)
from everystop.model.checkpoint import Checkpoint
from everystop.model.from_gguf import GgufCheckpoint
from everystop.model.from_safetensors import read_json_object
from everystop.model.messages import ROLES, read_messages
from everystop.model.template_sandbox import BoundedEnvironment
from everystop.model.tokenizer import RenderedPrompt, Tokenizer

MAX_REASON_CHARS = 1000
MAX_LAYOUT_CHARS = 200
SHORT_CHARS, SLOW_NS = 8192, 20_000_000
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
# Non-characters: Unicode keeps them for a program's own use, so texts hold them by malice only.
_GUARDS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE))]

# What a template gets from here, and what a caller of `apply_chat_template` would set: never a client's.
RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"),
        *("chat_template", "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs"),
    )
)


class ChatTemplate:
    """A compiled template, or the absence of one (`source` None), which only `render` reports.

    `origin` says where it comes from. `is_slow` tells that some rendering took longer than `SLOW_NS`, however little
    text there was, so none should keep others waiting. Raises UnsupportedModel where the template is no Jinja.
    """

    def __init__(self, source: str | None, origin: str, tokenizer: Tokenizer) -> None:
        self.origin = origin
        self._bos_token, self._eos_token = tokenizer.bos_token, tokenizer.eos_token
        self._guarding = _Guarding(tokenizer.control_tokens)
        self._source = source
        self._variables: frozenset[str] | None = None
        self._environment: BoundedEnvironment | None = None
        self._template: jinja2.Template | None = None
        self.is_slow = False
        if source is not None:
            self._environment = _environment()
            self._template = _compiled(self._environment, source, origin)

    @property
    def is_present(self) -> bool:
        """Whether chat can be served."""
        return self._template is not None

    @property
    def variables(self) -> frozenset[str]:
        """What a client may set: the names that the template looks up, less those that it gets from here."""
        if self._variables is None:
            environment = _environment()
            looked_up = jinja2.meta.find_undeclared_variables(environment.parse(self._source or ""))
            self._variables = frozenset(looked_up - RESERVED - environment.globals.keys())
        return self._variables

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise UnsupportedField for one that the template does not look at, and would ignore."""
        for name in variables:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                place = f"chat_template_kwargs.{name[:60]}"
                raise UnsupportedField(place, f"{place} is no variable of this model's chat template; it has: {known}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt for `messages`, read as `read_messages` says; it ends with the content of the last one where that
        is to be continued.

        Raises ChatTemplateMissing, ChatTemplateError with the template's own words where it refuses or fails, and
        RequestError for messages that cannot be read or continued, and for `variables` in the place of the server's.
        """
        template, environment = self._compiled()
        _check_names(variables or {}, environment)
        plain = read_messages(messages)
        guard, num_chars = _free_guard((plain, tools, variables))
        guarded = self._guarding.guard(plain, guard)
        mark = _free_guard((plain, tools, variables, guard))[0] if continue_final_message else ""
        if continue_final_message:
            _check_continuable(plain[-1], len(plain) - 1)
            guarded[-1]["content"] += mark + " "
        values = {
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
            **self._guarding.guard(dict(variables or {}), guard),
            "messages": guarded,
            "tools": self._guarding.guard(tools, guard),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._timed(is_short=num_chars < SHORT_CHARS):
            text = _run(template, environment, values, num_chars)
        if continue_final_message:
            text = _cut_at(mark, text, plain[-1]["content"])
        return RenderedPrompt(text=text, guard=guard)

    def _compiled(self) -> tuple[jinja2.Template, BoundedEnvironment]:
        """Raises ChatTemplateMissing where there is none."""
        if self._template is None or self._environment is None:
            raise ChatTemplateMissing(
                "this model brings no chat template; start with --chat-template FILE, or use /v1/completions",
                param="messages",
                code="chat_template_missing",
            )
        return self._template, self._environment

    @contextmanager
    def _timed(self, *, is_short: bool) -> Iterator[None]:
        """Note whether what is done inside takes long though there `is_short` text."""
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self.is_slow |= is_short and time.thread_time_ns() - began_ns > SLOW_NS


def _run(template: jinja2.Template, environment: BoundedEnvironment, values: Mapping[str, Any], num_chars: int) -> str:
    """What the template writes; whatever it does wrong is this request's failure alone, a ChatTemplateError."""
    try:
        return environment.run(template, values, num_chars)
    except Exception as error:
        raise ChatTemplateError(
            f"the chat template refused the messages: {_reason(error)}",
            param="messages",
            code="chat_template_error",
        ) from error


def _check_continuable(message: Mapping[str, Any], index: int) -> None:
    """Raise RequestError for a last message that ends with something else than its content."""
    if "tool_calls" in message:
        raise RequestError(
            "continue_final_message needs a last message that ends with its content, and this one has tool_calls",
            param=f"messages[{index}].tool_calls",
            code="conflicting_fields",
        )


def _cut_at(mark: str, text: str, content: str) -> str:
    """The text before the mark, which stood behind the last content with a blank after it.

    Where the template has trimmed that blank, it would have trimmed those at the end of the content too.
    """
    before, found, after = text.rpartition(mark)
    if not found:
        raise ChatTemplateError(
            "the chat template does not write the last message as it is, so it cannot be continued; "
            "leave out continue_final_message",
            param="continue_final_message",
            code="chat_template_error",
        )
    if after.startswith(" ") or not content.strip():
        return before
    return before.removesuffix(content[len(content.rstrip()) :])


def _check_names(variables: Mapping[str, Any], environment: BoundedEnvironment) -> None:
    """Raise RequestError for a variable in the place of one that is set here, such as the beginning of a text."""
    for name in variables:
        if name in RESERVED or name in environment.globals:
            message = f"chat_template_kwargs has {name!r}, which is set by the server; leave it out"
            raise RequestError(message, param="chat_template_kwargs")


def _reason(error: Exception) -> str:
    """What went wrong, in the template's own words, without addresses of objects that it may have printed."""
    text = _ADDRESS.sub("0x…", str(error)) or type(error).__name__
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"


def load_chat_template(checkpoint: Checkpoint, tokenizer: Tokenizer, override: Path | None = None) -> ChatTemplate:
    """The template in the file `override` (a `--chat-template`), else the model's own, else none.

    Raises ConfigError where `override` cannot be read, UnsupportedModel where it, or the model's own, is no Jinja.
    """
    if override is not None:
        return ChatTemplate(_read_override(override), str(override), tokenizer)
    if isinstance(checkpoint, GgufCheckpoint):
        source = checkpoint.gguf.get("tokenizer.chat_template")
        return ChatTemplate(source if isinstance(source, str) else None, str(checkpoint.path), tokenizer)
    return ChatTemplate(*_folder_template(checkpoint.path), tokenizer)


def check_template_file(path: Path) -> None:
    """Raise what `load_chat_template` would of the file `path`; needs no model."""
    _compiled(_environment(), _read_override(path), str(path))


def _read_override(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--chat-template {path} cannot be read: {reason}") from error


def _compiled(environment: BoundedEnvironment, source: str, origin: str) -> jinja2.Template:
    try:
        return environment.compile_bounded(source)
    except jinja2.TemplateError as error:
        raise UnsupportedModel(f"{origin}: the chat template is no valid Jinja: {error}") from error


def _folder_template(folder: Path) -> tuple[str | None, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise ModelFileDamaged(f"{path}: it is not UTF-8") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        source = read_json_object(path).get("chat_template") if path.is_file() else None
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if isinstance(source, str):
            return source, str(path)
    return None, str(folder)


class _Guarding:
    """Breaks up control tokens, whole or in part, in strings that templates may join with others."""

    def __init__(self, control_tokens: Sequence[str]) -> None:
        self._lowered = sorted({token.lower() for token in control_tokens})
        alternatives = "|".join(re.escape(token) for token in sorted(control_tokens, key=len, reverse=True))
        self._pattern = re.compile(alternatives or r"(?!)", re.IGNORECASE)
        self._beginnings = tuple({token[:cut] for token in control_tokens for cut in range(1, len(token))})
        self._endings = tuple({token[cut:] for token in control_tokens for cut in range(1, len(token))})

    def guard(self, value: Any, guard: str) -> Any:
        """A copy of `value` with the strings in its lists and mappings guarded, roles and known keys as they are."""
        if isinstance(value, str):
            return self._guard_text(value, guard)
        if isinstance(value, Mapping):
            return {
                self._break(key, guard) if isinstance(key, str) else key: item
                if key == "role" and item in ROLES
                else self.guard(item, guard)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard(item, guard) for item in value]
        return value

    def _guard_text(self, text: str, guard: str) -> str:
        """Break whole tokens, and close ends that a neighbour could complete to one."""
        text = self._break(text, guard)
        inner = not text.isidentifier() and any(text.lower() in token for token in self._lowered) if text else False
        if inner or text.startswith(self._endings):
            text = guard + text
        if inner or text.endswith(self._beginnings):
            text = text + guard
        return text

    def _break(self, text: str, guard: str) -> str:
        lowered = text.lower()
        if not any(token in lowered for token in self._lowered):
            return text
        # Again, since breaking one token can leave another that overlapped it.
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + guard + match[0][1:], text)
        return text


def _free_guard(value: Any) -> tuple[str, int]:
    """A guard that occurs in no string of `value`, and the characters of all its strings.

    Raises RequestError where every guard occurs.
    """
    used: set[str] = set()
    num_chars = _collect_guards(value, used)
    guard = next((guard for guard in _GUARDS if guard not in used), None)
    if guard is None:
        raise RequestError(
            f"the messages hold all {len(_GUARDS):,} noncharacters and private-use characters of plane 15, and one of "
            "them is needed to keep control tokens apart from text; leave one out",
            param="messages",
            code="invalid_text",
        )
    return guard, num_chars


_GUARD_PATTERN = re.compile("[\ufdd0-\ufdef\U000f0000-\U000ffffd]")


def _collect_guards(value: Any, used: set[str]) -> int:
    """Add the guards in all strings of `value` to `used`, and return how many characters these have."""
    if isinstance(value, str):
        used.update(_GUARD_PATTERN.findall(value))
        return len(value)
    if isinstance(value, Mapping):
        return sum(_collect_guards(key, used) + _collect_guards(item, used) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_collect_guards(item, used) for item in value)
    return 0


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (the library's own convention)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    """Jinja as transformers sets it up for chat templates (`chat_template_utils.py`), without access to Python."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes that Jinja's own filter adds for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_LAYOUT_CHARS:
        raise jinja2.TemplateError(f"the layout of a date has {len(layout):,} characters, not {MAX_LAYOUT_CHARS}")
    return datetime.now().strftime(layout)
