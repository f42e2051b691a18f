"""Whatever a chat template does, rendering ends soon, in little memory, and with an error of the request at worst."""

from __future__ import annotations

import gc
import re
import resource
import time
from typing import Any

import pytest
from tests.model.vocabularies import byte_level_keys, write_vocabulary

from everystop.core.errors import ChatTemplateError, RequestError, UnsupportedModel
from everystop.model import template_sandbox
from everystop.model.chat_template import ChatTemplate
from everystop.model.checkpoint import inspect_model
from everystop.model.tokenizer import Tokenizer
from everystop.model.tokenizer_files import load_tokenizer

USER = [{"role": "user", "content": "hello"}]
DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ END }}"
MIB = 1 << 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "m.gguf", byte_level_keys())
    return load_tokenizer(inspect_model(path))


def render(tokenizer: Tokenizer, source: str, messages: list[dict[str, Any]] = USER, **variables: Any) -> str:
    return ChatTemplate(source, "test", tokenizer).render(messages, variables=variables).text


def doubled(start: str, step: str, end: str = "1") -> str:
    return DOUBLED.replace("START", start).replace("STEP", step).replace("END", end)


def repeated(step: str, end: str) -> str:
    return doubled("1", step, end).replace("60", "99999")


LOOPS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested ranges with text": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "macros that call each other": (
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": (
        "{% for i in range(9) recursive %}{% if loop.depth < 40 %}{{ loop(range(9)) }}{% endif %}{% endfor %}"
    ),
    "filters of filters": "{% for i in range(99999) %}{{ range(99999) | map('abs') | list | length }}{% endfor %}",
    "a generator of generators": "{{ range(99999) | batch(1) | map('list') | map('first') | sum }}" * 300,
    "a long text again and again": "{% for i in range(99999) %}{{ ('x' * 1000000) | upper | length }}{% endfor %}",
    "searching": "{% set t = 'a' * 1000000 %}{% for i in range(99999) %}{{ t.count('ab') }}{% endfor %}",
    "looking": "{% set t = 'a' * 3000000 %}{% for i in range(99999) %}{% if 'ab' in t %}x{% endif %}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{{ range(99999) | reverse | sort | length }}{% endfor %}",
}
GROWTH = {
    "a product": "{{ 'x' * 10**12 }}",
    "a product of a list": "{{ [1] * 10**10 }}",
    "a product that nobody prints": "{% set x = 'x' * 10**12 %}",
    "a power": "{{ 10 ** 100000000 }}",
    "powers of powers": doubled("7", "ns.x * ns.x"),
    "a sum of a text with itself": doubled("'x'", "ns.x + ns.x"),
    "a text joined to itself": doubled("'x'", "ns.x ~ ns.x"),
    "a list added to itself": doubled("[1]", "ns.x + ns.x"),
    "replacing": doubled("'xx'", "ns.x.replace('x', ns.x)"),
    "replacing by a filter": doubled("'xx'", "ns.x | replace('x', ns.x)"),
    "replacing nothing": doubled("'xx'", "ns.x.replace('', ns.x)"),
    "joining": doubled("'xx'", "ns.x.join(ns.x)"),
    "joining by a filter": doubled("'xx'", "[ns.x, ns.x] | join(ns.x)"),
    "joining by a filter's name": doubled("'xx'", "[ns.x, ns.x] | join(d=ns.x)"),
    "formatting": doubled("'xx'", "'%s%s' % (ns.x, ns.x)"),
    "formatting by a filter": doubled("'xx'", "'%s%s' | format(ns.x, ns.x)"),
    "formatting by a method": doubled("'xx'", "'{0}{0}'.format(ns.x)"),
    "a wide field": "{{ '%999999999d' % 1 }}",
    "a field of a given width": "{{ '%*d' % (999999999, 1) }}",
    "a wide field of a method": "{{ '{:999999999}'.format(1) }}",
    "a field of a given width of a method": "{{ '{:{}}'.format(1, 999999999) }}",
    "a precise number": "{{ '%.99999999f' % 1 }}",
    "a macro of itself": doubled("'xx'", "twice(ns.x)").replace(
        "{% set ns", "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns", 1
    ),
    "a block of itself": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}",
    "text of a template": "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "text of a block": "{% set y %}{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "centring": "{{ 'x' | center(10**9) }}",
    "padding": "{{ 'x'.ljust(10**9) }}{{ 'x'.zfill(10**9) }}",
    "indenting": "{{ 'x\n' * 1000000 | indent(99999) }}{{ ('x\n' * 1000000) | indent(99999) }}",
    "indenting JSON": "{{ [[[1]]] | tojson(indent=99999999) }}",
    "separating JSON": "{{ ([1] * 100000) | tojson(separators=('x' * 100000, ':')) }}",
    "filling": "{{ [1] | batch(10**9, 'x') | list }}",
    "lists in lists": doubled("[1]", "[ns.x, ns.x]"),
    "lists in lists that nobody prints": doubled("[1]", "[ns.x, ns.x]", "1"),
    "lists in lists as JSON": doubled("[1]", "[ns.x, ns.x]", "ns.x | tojson"),
    "lists in lists compared": doubled("[1]", "[ns.x, ns.x]", "ns.x == [[1]]"),
    "mappings in mappings": doubled("{}", "{'a': ns.x, 'b': ns.x}", "ns.x"),
    "mappings in mappings by a call": doubled("{}", "dict(a=ns.x, b=ns.x)", "ns.x"),
    "pairs in pairs": doubled("1", "(ns.x, ns.x)", "{ns.x: 1}"),
    "arguments in arguments": "{% set ns = namespace(x=1) %}{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ f(ns.x, ns.x) }}{% endfor %}{{ {ns.x: 1} }}",
    "batches in batches": doubled("[1]", "ns.x | batch(2, ns.x) | list", "ns.x"),
    "lists of long texts": "{% set t = 'x' * 1000000 %}{{ [t, t, t, t, t, t, t, t] | string | length }}",
    "a deep list": repeated("[ns.x]", "ns.x"),
    "a deep pair": repeated("(ns.x,)", "{ns.x: 1}"),
    "deep batches": repeated("[ns.x][0] | batch(1) | list", "ns.x").replace("x=1", "x=[1]"),
    "namespaces in namespaces": doubled("1", "namespace(a=ns.x, b=ns.x)", "ns.x"),
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "bytes": "{{ (5).to_bytes(10**9, 'big') }}{{ 'x'.encode('utf-8') }}",
    "a map of fields": doubled("'xx'", "'{a}{a}'.format_map({'a': ns.x})"),
    "comments": "{{ ('<!-- -->' * 400000) | striptags }}",
    "fields without ends": "{{ ('%(' * 2000000) % {} }}{{ ('{:' * 2000000).format(1) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(99999) }}",
    "a table of characters": "{{ 'xxxx'.translate({120: 'x' * 1000000}) }}",
    "a sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "a long date": "{{ strftime_now('%c' * 1000000) }}",
    "filler": "{{ lipsum(n=999999) }}",
}


@pytest.mark.parametrize("source", [*LOOPS.values(), *GROWTH.values()], ids=[*LOOPS, *GROWTH])
def test_no_template_runs_away(tokenizer: Tokenizer, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal, and where there is none because somebody found a way to do it in time, a text that is not large."""
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_NS", 200_000_000)
    began_s, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        text = render(tokenizer, source)
    except (ChatTemplateError, UnsupportedModel) as error:
        text = str(error)
    assert re.search(r"0x[0-9a-f]{4}", text[:2000]) is None
    assert len(text) <= template_sandbox.TEXT_CHARS + 100
    assert time.thread_time() - began_s < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024, "in KiB"


@pytest.mark.parametrize(
    "name", ["nested ranges", "macros that call each other", "filters of filters", "searching", "looking"]
)
def test_time_is_bounded_and_said(tokenizer: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_NS", 100_000_000)
    template = ChatTemplate(LOOPS[name], "test", tokenizer)
    with pytest.raises(ChatTemplateError, match=r"it took more than 0\.1 s of processor time"):
        template.render(USER)
    assert template.is_slow


def test_an_ordinary_template_is_not_slow(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    templates = [ChatTemplate(source, "test", tokenizer) for _ in range(5)]
    gc.disable()  # a collection of all that the tests have made would count as the template's time
    try:
        for template in templates * 3:
            assert template.render(USER).text == "user: hello\n"
    finally:
        gc.enable()
    assert not all(template.is_slow for template in templates), "a processor that is taken away counts now and then"


@pytest.mark.parametrize(
    "source",
    ["{{ 'x' * 10**12 }}" * 2, "{{ 2 ** 1000000000000 }}", "{{ 'x' | center(10**12) }}",
     "{% if 'x' * 10**12 == 'y' %}{% endif %}", "{{ 'x' ~ 'x' * 10**11 }}", "{{ ('x' * 10**12)[0] }}"],
)  # fmt: skip
def test_nothing_is_worked_out_when_a_template_is_read(tokenizer: Tokenizer, source: str) -> None:
    began_s = time.thread_time()
    template = ChatTemplate(source, "test", tokenizer)
    assert time.thread_time() - began_s < 5
    with pytest.raises(ChatTemplateError):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    ["x" * (template_sandbox.MAX_SOURCE_CHARS + 1),
     "{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "{{ " + "-" * 50_000 + "1 }}",
     "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ " + "[" * 3000 + "]" * 3000 + " }}", "{{ 1" + ".a" * 9999 + " }}",
     "{% for a in b %}" * 200 + "{% endfor %}" * 200],
)  # fmt: skip
def test_a_template_too_long_or_deep_is_no_crash(tokenizer: Tokenizer, source: str) -> None:
    with pytest.raises((UnsupportedModel, ChatTemplateError)):
        render(tokenizer, source)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__ }}", "{{ x.__init__ }}", "{{ range.__globals__ }}", "{{ cycler.__init__.__globals__ }}",
     "{{ raise_exception.__code__ }}", "{{ ''['__class__'] }}", "{{ '' | attr('__class__') }}",
     "{{ '{0.__class__}'.format(1) }}", "{{ self.__init__ }}", "{{ loop.__class__ }}",
     "{% for i in [1] %}{{ loop.__class__ }}{% endfor %}", "{% macro f() %}{% endmacro %}{{ f.__call__ }}",
     "{{ namespace().__class__ }}",
     "{{ messages[0].pop('role') }}",
     "{{ messages.append(1) }}", "{{ messages.clear() }}", "{{ messages[0].update(a=1) }}", "{% include 'x' %}",
     "{% import '/etc/passwd' as x %}", "{% extends '/etc/passwd' %}", "{{ range }}", "{{ raise_exception }}",
     "{{ self }}", "{{ namespace }}", "{{ joiner() }}", "{{ cycler(1) }}",
     "{{ messages | map('upper') }}", "{{ [range] }}"],
)  # fmt: skip
def test_a_template_reaches_neither_python_nor_files_nor_addresses(tokenizer: Tokenizer, source: str) -> None:
    try:
        text = render(tokenizer, source)
    except (ChatTemplateError, UnsupportedModel) as error:
        text = str(error)
    assert re.search(r"0x[0-9a-f]{4}|<class|root:|/etc/passwd'? ", text) is None
    assert USER == [{"role": "user", "content": "hello"}]


def test_the_work_grows_with_the_request(tokenizer: Tokenizer) -> None:
    """What is bounded for a short request is allowed for a long one, whose client has sent as much."""
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</' + m.role + '>' }}{% endfor %}"
    long = [{"role": "user", "content": "x" * 3 * MIB} for _ in range(4)]
    assert len(render(tokenizer, source, long)) == 4 * (3 * MIB + 13)
    many = [{"role": "user", "content": "x\n" * 100} for _ in range(4000)]
    lines = "{% for m in messages %}{% for line in m.content.split('\n') %}{{ line }}{% endfor %}{% endfor %}"
    assert len(render(tokenizer, lines, many)) == 400_000


def test_what_real_templates_do_is_within_bounds(tokenizer: Tokenizer) -> None:
    """Pieces of published templates: what they call must not be left out by mistake."""
    source = (
        "{%- set ns = namespace(system='', index=0, tools=[]) %}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.index = loop.index0 %}{%- endif %}"
        "{%- endfor %}"
        "{%- macro show(tool) -%}{{ tool.function.name }}({%- for k, v in tool.function.arguments.items() -%}"
        "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{%- endfor -%}){%- endmacro %}"
        "{%- for m in messages[::-1] %}{%- set ns.tools = ns.tools + [m.role] %}{%- endfor %}"
        "{%- set t = messages[0].content | trim %}{{ t.split('e')[-1].lstrip('l') ~ '|' }}"
        "{{ t[:2] }}{{ t.upper() }}{{ t | replace('l', 'L') }}{{ '%s-%d' % (t, 3) }}{{ '{}:{:.2f}'.format(t, 1.5) }}"
        '{{ \'{{"n": {}}}\'.format(10**6) }}{{ \'{"a": {"b": "%s 123456"}}\' % t }}'
        "{{ [t, t] | join(', ') }}{{ ns.tools | length }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ messages | map(attribute='role') | join('/') }}{{ t.startswith('h') }}{{ ', '.join(['a', 'b']) }}"
        "{{ t | indent(2, true) }}{{ {'a': [1, none]} | tojson(indent=2) }}"
        "{{ messages[1].tool_calls | map(attribute='function') | map(attribute='name') | list | first }}"
        "{%- for c in messages[1].tool_calls %}{{ show(c) }}{%- endfor %}"
        "{{ (messages | list)[0]['content'] is string }}{{ none is none }}{{ t.strip().endswith('o') }}"
        "{{ 10**3 // 7 % 5 }}"
    )
    call = {"function": {"name": "look", "arguments": {"at": ["x"], "n": 10**12}}}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render(tokenizer, source, messages)
    assert text == (
        'o|heHELLOheLLohello-3hello:1.50{"n": 1000000}{"a": {"b": "hello 123456"}}'
        "hello, hello21user/assistantTruea, b  hello"
        '{\n  "a": [\n    1,\n    null\n  ]\n}'
        'looklook(at=["x"], n=1000000000000)TrueTrueTrue2'
    )


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "eos_token", "raise_exception", "range", "namespace"]
)
def test_variables_take_the_place_of_nothing_that_the_server_sets(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}', which is set by the server"):
        ChatTemplate("{{ messages }}", "test", tokenizer).render(USER, variables={name: "x"})
    assert render(tokenizer, "{{ style }}", style="x") == "x"
