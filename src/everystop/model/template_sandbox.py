"""Renders Jinja templates that nobody has read: without access to Python, and bounded in time, text and structure.

A chat template comes with a model, so it is code of a stranger, and clients choose the data that it works on. Jinja's
sandbox keeps it from Python's objects. This one also keeps it from using up the machine:

- Time: each round of a loop, call, filter, and operation that can grow its operands counts; now and then the processor
  time of the thread is looked at. Between two looks a template can do little, since
- Text: what joins, repeats, replaces or formats is refused before it makes a text beyond a bound, which grows with the
  text of the request; all texts made in one rendering have a bound together.
- Structure: a list, tuple or mapping may hold so many values, counted as often as they are written out, and stand so
  deep, so that nothing that walks it (printing, comparing, hashing) runs away.
- Numbers: no product or power beyond `MAX_BITS` bits.

Filters and methods that would need a bound of their own and that no chat template needs are not there.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

MAX_SOURCE_CHARS = 1 << 20
MAX_RENDER_NS = 2_000_000_000  # of the thread's processor time
TEXT_CHARS, TEXT_FACTOR = 4_000_000, 4  # one text: so many characters, and so many more for each of the request's
ALL_CHARS, ALL_FACTOR = 64_000_000, 32  # all texts that are made in one rendering
MAX_NODES, CHARS_PER_NODE = 250_000, 16  # and one more for so many characters of the request, for it may be split
MAX_DEPTH = 100
MAX_BITS = 4096
MAX_NUMBER = 100_000  # for a width, a length or a count
STEPS_BETWEEN_LOOKS, NODES_PER_STEP, CHARS_PER_STEP = 64, 8, 10_000
MAX_LAYOUT_CHARS = 100_000
_NODE_CHARS = 16  # quotes, commas and brackets
# Fields of layouts that are too wide, or whose width is an argument; each pattern takes time linear in the layout.
_WIDE = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(?:\*|\d{5,}|\d*\.(?:\*|\d{5,}))")
_BRACED, _NESTED, _WIDE_NUMBER = re.compile(r"\{[^{}]*\}"), re.compile(r"\{[^{}]*\{"), re.compile(r"\d{5,}")
_LARGE_NUMBER = re.compile(r"\d{3,}")
_CONTAINERS = (list, tuple, dict)
_SCALARS = (int, float, type(None), jinja2.Undefined)
_SIZED = frozenset(("batch", "center", "indent", "ljust", "rjust", "round", "slice", "truncate", "zfill"))
_GATHERED = frozenset(("groupby", "join", "list", "max", "min", "sort", "sum", "unique"))
_LEFT_OUT_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({
        "capitalize", "casefold", "center", "count", "endswith", "find", "format", "index", "isalnum",
        "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
        "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix",
        "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
        "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
    }),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length", "imag", "real"}),
    float: frozenset({"imag", "is_integer", "real"}),
}  # fmt: skip


class TemplateLimit(jinja2.TemplateError):
    """The template does more than one rendering may."""


class _Budget:
    """What one rendering may still do; `num_chars` is the size of the request's text."""

    __slots__ = ("_end_ns", "_max_nodes", "_next_look", "_num_steps", "_spare_chars", "text_chars")

    def __init__(self, num_chars: int) -> None:
        self.text_chars = TEXT_CHARS + TEXT_FACTOR * num_chars
        self._spare_chars = ALL_CHARS + ALL_FACTOR * num_chars
        self._max_nodes = MAX_NODES + num_chars // CHARS_PER_NODE
        self._num_steps, self._next_look = 0, STEPS_BETWEEN_LOOKS
        self._end_ns = time.thread_time_ns() + MAX_RENDER_NS

    def step(self, num: int = 1) -> None:
        """Count steps; raises TemplateLimit when the time is over."""
        self._num_steps += num
        if self._num_steps >= self._next_look:
            self._next_look = self._num_steps + STEPS_BETWEEN_LOOKS
            if time.thread_time_ns() > self._end_ns:
                raise TemplateLimit(f"it took more than {MAX_RENDER_NS / 1e9:g} s of processor time")

    def items(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items, each a step."""
        for item in iterable:
            self.step()
            yield item

    def take_text(self, num_chars: int) -> None:
        """Count a text that is about to be made; raises TemplateLimit when it is too long, or one too many."""
        self._spare_chars -= num_chars
        if num_chars > self.text_chars or self._spare_chars < 0:
            raise TemplateLimit(f"it makes a text of more than {self.text_chars:,} characters, or too many of them")
        self.step(1 + num_chars // CHARS_PER_STEP)

    def measure(self, value: Any) -> int:
        """The characters of a value written out, at most; raises TemplateLimit for a structure that is too large or
        deep, and for what cannot be written: a namespace or a macro may stand for a structure without end.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, _SCALARS):
            return _num_digits(value)
        num_nodes, num_chars = 1, 0
        waiting = [(value, 1)]
        while waiting:
            item, depth = waiting.pop()
            children = _children(item)
            num_nodes += len(children)
            if depth > MAX_DEPTH or num_nodes > self._max_nodes:
                raise TemplateLimit(f"it makes a list or mapping of too many values, or more than {MAX_DEPTH} deep")
            self.step(1 + len(children) // NODES_PER_STEP)
            for child in children:
                if isinstance(child, str):
                    num_chars += len(child)
                elif isinstance(child, _SCALARS):
                    num_chars += _num_digits(child)
                else:
                    waiting.append((child, depth + 1))
        if num_chars > self.text_chars:
            raise TemplateLimit(f"it makes a list or mapping of more than {self.text_chars:,} characters")
        return num_chars + num_nodes * _NODE_CHARS


def _children(value: Any) -> Sequence[Any]:
    """The values, and keys, in a container; raises TemplateLimit for what is none."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return [*value, *value.values()]
    raise TemplateLimit(f"it writes out, or puts into a list, what is no text, number or list: a {_kind(value)}")


def _num_digits(value: Any) -> int:
    """The characters of a number written out, at most."""
    return 2 + value.bit_length() // 3 if isinstance(value, int) else 32


def _kind(value: Any) -> str:
    return type(value).__name__.lower()


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Jinja's compiler, with a call of the environment around what makes loops, texts and structures."""

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        """A loop over `environment.counted(iterable)`."""
        counted = jinja2.nodes.EnvironmentAttribute("counted", lineno=node.lineno)
        node.iter = jinja2.nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """`a ~ b` is `environment.joined((a, b))`."""
        self.write("environment.joined((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        """`[a]` is `environment.built([a])`."""
        self._visit_built(super().visit_List, node, frame, node.items)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        """`(a, b)` is `environment.built((a, b))`, but where it is assigned to."""
        items = node.items if node.ctx == "load" else []
        self._visit_built(super().visit_Tuple, node, frame, items)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        """`{a: b}` is `environment.built({a: b})`."""
        parts = [part for pair in node.items for part in (pair.key, pair.value)]
        self._visit_built(super().visit_Dict, node, frame, parts)

    def _visit_built(
        self,
        visit: Callable[[Any, jinja2.compiler.Frame], None],
        node: jinja2.nodes.Node,
        frame: jinja2.compiler.Frame,
        items: list[jinja2.nodes.Expr],
    ) -> None:
        is_constant = all(isinstance(item, jinja2.nodes.Const) for item in items)
        self.write("" if is_constant else "environment.built(")
        visit(node, frame)
        self.write("" if is_constant else ")")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose `run` renders a template within bounds; one may be used in several threads."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_finalize, **options)
        self._active = threading.local()
        del self.globals["lipsum"]
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]

    def compile_bounded(self, source: str) -> jinja2.Template:
        """The template; raises jinja2.TemplateError for what is none, or longer or deeper than any."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimit(f"it has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} are read")
        for name, filter_function in self.filters.items():
            if not getattr(filter_function, "is_bounded", False):
                self.filters[name] = _bounded(self, name, filter_function)
        try:
            return self.from_string(source)
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise TemplateLimit(f"it is nested too deeply, or no compiler can read it ({_kind(error)})") from error

    def run(self, template: jinja2.Template, values: Mapping[str, Any], num_chars: int) -> str:
        """The rendered text; `num_chars` is the size of the text in `values`. Raises what the template raises."""
        self._active.budget = _Budget(num_chars)
        try:
            return template.render(values)
        finally:
            del self._active.budget

    @property
    def budget(self) -> _Budget:
        """That of the rendering in this thread."""
        budget: _Budget = self._active.budget
        return budget

    def counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop; each is a step."""
        return self.budget.items(iterable)

    def built(self, value: Any) -> Any:
        """A new list, tuple or mapping, if it is within bounds."""
        self.budget.measure(value)
        return value

    def joined(self, items: tuple[Any, ...]) -> str:
        """The items as one text."""
        budget = self.budget
        budget.take_text(sum(map(budget.measure, items)))
        return "".join(map(str, items))

    def concat(self, pieces: Iterable[str]) -> str:
        """What a template, a macro or a block has put out, as one text."""
        budget, kept, num_chars = self.budget, [], 0
        for piece in pieces:
            num_chars += len(piece)
            if num_chars > budget.text_chars:
                break
            kept.append(piece)
        budget.take_text(num_chars)
        return "".join(kept)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of texts, numbers and containers only methods that cannot run away; of the rest what the sandbox allows."""
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """An operation that may make something larger than its operands."""
        budget = self.budget
        budget.step()
        if operator == "%" and isinstance(left, str):
            _check_format(budget, left, "%", right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.take_text(len(left) + len(right))
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        result = super().call_binop(context, operator, left, right)
        return self.built(result) if isinstance(result, _CONTAINERS) else result

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a method, a macro or a function."""
        budget = __self.budget
        budget.step()
        if isinstance(__obj, jinja2.runtime.Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            budget.measure((*args, *kwargs.values()))
        text = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(text, str) or name in ("format", "format_map"):
            _check_method(budget, name, getattr(getattr(__obj, "__wrapped__", None), "__self__", text), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            budget.take_text(len(result))
        return __self.built(result) if isinstance(result, _CONTAINERS) else result


@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    """What is put out: text and numbers, and containers of them within bounds."""
    if not isinstance(value, str):
        environment = context.environment
        assert isinstance(environment, BoundedEnvironment)
        environment.budget.take_text(environment.budget.measure(value))
    return value


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise TemplateLimit(f"it makes a number of more than {MAX_BITS} bits")


def _check_product(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for one, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(one, (str, list, tuple)):
            size = len(one) if isinstance(one, str) else budget.measure(one)
            budget.take_text(size * max(count, 0))


def _check_method(budget: _Budget, name: str, text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The methods of a text that make one of a size that its own does not bound."""
    if not isinstance(text, str):
        return
    if name in _SIZED:
        _check_numbers(args, kwargs)
    elif name in ("format", "format_map"):
        _check_format(budget, text, "{", (*args, *kwargs.values()))
    elif name == "replace" and len(args) > 1:
        _check_replace(budget, text, args[0], args[1])
    elif name == "join" and args:
        if not isinstance(args[0], (*_CONTAINERS, str)):
            raise TemplateLimit("it joins what is no list; make a list of it first")
        budget.take_text(budget.measure(args[0]) + len(text) * len(args[0]))


def _check_format(budget: _Budget, layout: str, mark: str, args: tuple[Any, ...]) -> None:
    """A text with fields, `%s` or `{}`, each of which may be as long as the longest argument, or as wide as it says."""
    if len(layout) > MAX_LAYOUT_CHARS:
        raise TemplateLimit(f"it formats a layout of {len(layout):,} characters; at most {MAX_LAYOUT_CHARS:,} may be")
    if mark == "%":
        is_wide = _WIDE.search(layout) is not None
    else:
        layout = layout.replace("{{", "").replace("}}", "")
        is_wide = any(map(_WIDE_NUMBER.search, _BRACED.findall(layout))) or _NESTED.search(layout) is not None
    if is_wide:
        raise TemplateLimit("it formats a field that is too wide, or whose width is an argument")
    width = 10_000 if _LARGE_NUMBER.search(layout) is not None else 100
    largest = max(map(budget.measure, args), default=0)
    budget.take_text(len(layout) + layout.count(mark) * (largest + width))


def _check_replace(budget: _Budget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        count = text.count(old) if old else len(text) + 1
        budget.take_text(len(text) + count * len(new))


def _check_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateLimit(f"it asks for a width, length or count beyond {MAX_NUMBER:,}")


def _bounded(environment: BoundedEnvironment, name: str, filter_function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts as a step, takes no large numbers, and makes no large texts or structures."""
    num_passed = 0 if getattr(filter_function, "jinja_pass_arg", None) is None else 1

    @wraps(filter_function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = environment.budget
        budget.step()
        passed, given = args[:num_passed], list(args[num_passed:])
        _check_filter(budget, name, given, kwargs)
        result = filter_function(*passed, *given, **kwargs)
        if isinstance(result, str):
            budget.take_text(len(result))
        return environment.built(result) if isinstance(result, _CONTAINERS) else result

    run.is_bounded = True  # type: ignore[attr-defined]
    return run


def _check_filter(budget: _Budget, name: str, given: list[Any], kwargs: Mapping[str, Any]) -> None:
    """What one filter may make too large; a generator among `given` is put into a list, for it can be read once."""
    value = given[0] if given else None
    if name in _SIZED:
        _check_numbers(tuple(given[1:]), kwargs)
    if name in _GATHERED and not isinstance(value, (str, *_CONTAINERS, *_SCALARS)):
        given[0] = value = list(budget.items(value))
    if name == "join":
        separator = given[1] if len(given) > 1 else kwargs.get("d", "")
        budget.take_text(budget.measure(value) + budget.measure(separator) * _length(value))
    elif name == "replace":
        old, new = (given[i] if len(given) > i else kwargs.get(key, "") for i, key in ((1, "old"), (2, "new")))
        _check_replace(budget, str(value) if budget.measure(value) else "", str(old), str(new))
    elif name == "indent":
        width = given[1] if len(given) > 1 else kwargs.get("width", 4)
        lines = str(value).count("\n") + 1 if budget.measure(value) else 1
        budget.take_text(budget.measure(value) + lines * (width if isinstance(width, int) else budget.measure(width)))
    elif name == "format":
        _check_format(budget, str(value), "%", (*given[1:], *kwargs.values()))
    elif name == "tojson":
        _check_json(budget, given, kwargs)
    elif name == "sum" and not isinstance(given[2] if len(given) > 2 else kwargs.get("start", 0), (int, float)):
        raise TemplateLimit("it adds up what is no number")
    elif name in ("string", "e", "escape", "forceescape", "safe", "urlencode"):
        budget.take_text(budget.measure(value))


def _check_json(budget: _Budget, given: list[Any], kwargs: Mapping[str, Any]) -> None:
    """JSON of at most twelve characters for each (`\\ud83d\\ude00`), if it is not indented beyond reason."""
    value, *layout = given
    for option in (*layout, *kwargs.values()):
        is_long = not isinstance(option, bool) and isinstance(option, int) and option > 16
        if is_long or (isinstance(option, (str, list, tuple)) and budget.measure(option) > 64):
            raise TemplateLimit("it writes JSON with separators or indents of more than 16 characters")
    budget.take_text(budget.measure(value))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1
