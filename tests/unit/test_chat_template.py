"""Chat templates: rendered as makers mean them, found where they are, stopped when hostile."""

# ruff: noqa: E501  (templates are easier to read on one line)

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrt.chat_template import ChatTemplate
from kvrt.errors import TemplateError

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "  Grüße\n"},
    {"role": "assistant", "content": "<think>hm</think>\n\nHallo"},
]


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


# Expressions that templates of published models are made of.
SNIPPETS = [
    "{% for m in messages %}{{ m.role }}:{{ m['content'] | trim }}|{{ loop.index0 }}{{ loop.last }}"
    "{% if not loop.last %},{% endif %}{% else %}none{% endfor %}",
    "{%- if messages[0]['role'] == 'system' -%}\n  {%- set rest = messages[1:] -%}\n{%- else -%}\n"
    "{%- set rest = messages -%}\n{%- endif -%}\n{{ rest | length }}",
    "{% set ns = namespace(last='', n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = ns.last + m.role[0] ~ ns.n %}{% endfor %}{{ ns.last }}",
    "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
    "{{ messages | rejectattr('role', '==', 'user') | map(attribute='role') | join('+') }}",
    "{{ messages | map(attribute='role') | map('upper') | join }}",
    "{{ ['b', 'a', 'b'] | unique | sort | list }}{{ [3, 1] | max }}{{ (1, 2) | first }}",
    "{{ {'b': 1, 'a': [1, none]} | dictsort }}{{ {'a': 1}.items() | list }}{{ {'a': 1} | items | list }}",
    "{{ 'a\nb\n' | indent(2) }}|{{ 'a\n\nb' | indent(2, true, true) }}|{{ '' | indent }}|"
    "{{ 'a\nb' | indent('> ') }}",
    "{{ 'a.b.a' | replace('a', 'x') }}{{ 'a.b.a' | replace('a', 'x', 1) }}{{ 'aa'.replace('a', 'b') }}",
    "{{ '<&>\"\\'' | e }}{{ '<b>' | safe }}{{ [1, 2] | join(', ') }}{{ '-'.join(['a', 'b']) }}",
    "{% for m in messages if m.role != 'system' %}{{ loop.length }}{{ loop.revindex }}"
    "{{ loop.previtem.role if loop.index0 }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% endfor %}",
    "{% macro show(m, tail='!') %}[{{ m.role }}{{ tail }}]{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{{ show(m, tail='?') }}{% endfor %}",
    "{% macro box() %}({{ caller() }}){% endmacro %}{% call box() %}in{% endcall %}",
    "{% set text %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ text }}{{ text | length }}",
    "{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is iterable else i }},{% endfor %}",
    "{{ '%s is %d' % ('x', 3) }}{{ '{} {name}'.format(1, name='n') }}{{ '%s' | format('f') }}",
    "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 8 }}{{ 7 / 2 }}{{ 2 * 3 - 1 }}{{ -1 }}{{ '-' * 3 }}{{ [0] * 2 }}",
    "{{ nothing }}{{ nothing is defined }}{{ tools is none }}{{ nothing | default('d') }}"
    "{{ bos_token }}{{ add_generation_prompt }}",
    "{{ messages is sequence }}{{ messages[0] is mapping }}{{ 'x' is string }}{{ 'x' in 'xyz' }}"
    "{{ 5 is divisibleby 5 }}{{ messages[0].get('nope', 'no') }}",
    "{{ '5' | int + 1 }}{{ '2.5' | float }}{{ 2.567 | round(1) }}{{ 'aBc' | capitalize }}"
    "{{ 'a b' | title }}{{ [1, 2] | reverse | list }}{{ 'ab' | reverse }}{{ 'abc' | list }}",
    "{% filter upper %}{{ messages[0].role }}{% endfilter %}{{ (messages | last).role }}{# note #}",
    "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n",
]  # fmt: skip


@pytest.mark.parametrize("source", SNIPPETS)
def test_renders_as_plain_jinja_does(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(source).render(
        messages=MESSAGES, bos_token="<s>", tools=None, add_generation_prompt=True
    )
    assert render(source) == expected


def test_what_plain_jinja_has_not() -> None:
    assert render("{{ messages[0].content | tojson }}") == '"Be <brief> & \\"kind\\"."'
    assert render("{{ {'b': 'ü', 'a': [1]} | tojson(indent=2) }}") == (
        '{\n  "b": "ü",\n  "a": [\n    1\n  ]\n}'
    )
    assert render("{{ 'ü' | tojson(ensure_ascii=true) }}") == '"\\u00fc"'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
                  "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "013"  # fmt: skip
    assert render("a{% generation %}{{ 'b' }}{% endgeneration %}c") == "abc"
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("{{ eos_token }}|{{ extra }}", extra=1) == "|1"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


LOOPS = {
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "huge range": "{% for i in range(10**12) %}{% endfor %}",
    "length": "{% for i in range(99999) %}{% for j in range(99999) %}{{ loop.length }}{% endfor %}{% endfor %}",
    "recursive": "{% for i in range(99999) recursive %}{% if loop.depth < 50 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "endless recursion": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "lazy filters": "{% for i in range(99999) %}{{ range(99999)" + "|select" * 50 + "|list|length }}{% endfor %}",
    "mapped": "{% for i in range(9999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "sorted": "{% for i in range(9999) %}{{ (range(99999) | sort)[0] }}{% endfor %}",
    "compared": "{% set x = 'x' * 9000000 %}{% set y = 'x' * 9000000 %}"
    "{% for i in range(99999) %}{% if x == y and y == x %}{% endif %}{% endfor %}",
    "searched": "{% set x = range(99999) | list %}{% for i in range(99999) %}{{ -1 in x }}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set ns = namespace(a=9) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "rounded": "{{ 5 | round(-1000000000) }}",
    "digits": "{{ ('9' * 9000000) | int }}",
}  # fmt: skip
DOUBLED = "{% set ns = namespace(a='xx', b=['x']) %}{% for i in range(60) %}BODY{% endfor %}"
FLOODS = {
    "times": "{{ 'x' * 10**10 }}",
    "times reversed": "{{ 10**10 * 'x' }}",
    "list times": "{% set x = [0] * 10**9 %}",
    "plus": DOUBLED.replace("BODY", "{% set ns.a = ns.a + ns.a %}"),
    "tilde": DOUBLED.replace("BODY", "{% set ns.a = ns.a ~ ns.a %}"),
    "list plus": DOUBLED.replace("BODY", "{% set ns.b = ns.b + ns.b %}"),
    "captured": DOUBLED.replace("BODY", "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
    "autoescaped": "{% autoescape true %}" + DOUBLED.replace("BODY", "{% set ns.a = ns.a ~ ns.a %}") + "{% endautoescape %}",
    "replaced": DOUBLED.replace("BODY", "{% set ns.a = ns.a | replace('x', 'xx') %}"),
    "replace()": DOUBLED.replace("BODY", "{% set ns.a = ns.a.replace('x', 'xx') %}"),
    "formatted": DOUBLED.replace("BODY", "{% set ns.a = '%s%s' % (ns.a, ns.a) %}"),
    "format()": DOUBLED.replace("BODY", "{% set ns.a = '{0}{0}'.format(ns.a) %}"),
    "many fields": "{{ ('%(a)s' * 99999) % {'a': 'x' * 99999} }}",
    "many fields()": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "joined": DOUBLED.replace("BODY", "{% set ns.a = ns.a | join(ns.a) %}"),
    "join()": DOUBLED.replace("BODY", "{% set ns.a = ns.a.join(ns.b * 9) %}"),
    "laughs, printed": DOUBLED.replace("BODY", "{% set ns.b = [ns.b, ns.b] %}") + "{{ ns.b }}",
    "laughs, tuples": DOUBLED.replace("BODY", "{% set ns.b = (ns.b, ns.b) %}"),
    "laughs, dicts": DOUBLED.replace("BODY", "{% set ns.b = {'a': ns.b, 'b': ns.b} %}"),
    "laughs, dict()": DOUBLED.replace("BODY", "{% set ns.b = dict(a=ns.b, b=ns.b) %}"),
    "laughs, namespaces": DOUBLED.replace("BODY", "{% set ns.b = namespace(a=ns.b, b=ns.b) %}") + "{{ [ns.b] }}",
    "output": "{% set x = 'x' * 100000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "indent": "{{ ('x\n' * 99999) | indent('y' * 99999) }}",
    "tojson": "{{ ([[[[[[[[1] * 99] * 99]]]]]] * 9) | tojson(indent=16) }}",
    "tojson indent": "{{ [1] | tojson(indent=10**9) }}",
    "width": "{{ '{:10000000000}'.format(1) }}",
    "width of an argument": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "percent width": "{{ '%(a)10000000000d' % {'a': 1} }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "lorem ipsum": "{{ lipsum(n=10**6) }}",
    "split": "{% for i in range(99) %}{% set x = ('ab ' * 999999).split() %}{% endfor %}",
    "slices": "{% set x = 'x' * 999999 %}{% for i in range(9999) %}{% set y = x[1:] %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", [*LOOPS, *FLOODS])
def test_hostile_templates_end(name: str) -> None:
    source = {**LOOPS, **FLOODS}[name]
    started = time.thread_time()
    with pytest.raises(TemplateError, match=r"^the chat template (fails|is malformed)") as caught:
        render(source)
    # The limit is 1 s of this thread's CPU time, checked between operations on bounded values.
    assert time.thread_time() - started < 2
    assert "\n" not in str(caught.value)
    assert "MemoryError" not in str(caught.value)


def test_hostile_templates_end_in_a_thread() -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            render(LOOPS["nested"])
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(error) for error in caught] == [TemplateError]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.pop.__self__.clear() }}",
        "{{ dict.fromkeys(['a']) }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ range.__self__.meter }}",
        "{{ '{0.__class__.x.y}'.format(1) }}",
        "{% for i in messages %}{{ loop.cycle.__func__() }}{% endfor %}",
    ],
)
def test_forbidden_access(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)
    assert len(MESSAGES) == 3


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles\nmust alternate') }}", "refuses .*: roles must alternate$"),
        ("{% if %}", "malformed, line 1: "),
        ("a\n{% if x %}", "malformed, line 2: "),
        ("{{ missing.role }}", "'missing' is undefined"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'x' %}", "no loader"),
        ("{{ messages | nope }}", "No filter named 'nope'"),
        ("{{ messages | map('upper') }}", "generator cannot be turned into text"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "too deeply"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, "fails: "),
        (" " * 200_001, "at most 200000"),
    ],
)
def test_errors_are_one_line(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words) as caught:
        render(source)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_a_refused_system_role_is_named() -> None:
    with pytest.raises(TemplateError, match="refuses the system role: System role not supported;"):
        render(NO_SYSTEM)
    assert render(NO_SYSTEM, MESSAGES[1:2]) == "  Grüße\n"
    with pytest.raises(TemplateError, match="refuses this conversation: always"):
        render("{{ raise_exception('always') }}")


def test_an_honest_template_has_room() -> None:
    """Long conversations, long messages, and text put together piece by piece."""
    many = [{"role": "user", "content": "word " * 20}] * 5000
    assert render("{% for m in messages %}{{ m.role + m.content | trim }}{% endfor %}", many)
    long = [{"role": "user", "content": "x" * 1_000_000}] * 4
    grown = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ (m.content | trim)"
        " %}{% endfor %}{{ ns.t }}"
    )
    assert len(render(grown, long)) == 4_000_000


def test_the_budget_is_new_for_each_rendering() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}{{ 'x' * 3000000 }}")
    for _ in range(12):
        assert len(template.render([])) == 3_000_000


def write(folder: Path, name: str, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


def found(folder: Path, config: dict[str, Any]) -> str | None:
    template = ChatTemplate.from_dir(folder, config, {})
    return None if template is None else template.source


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert found(tmp_path, {}) is None
    write(tmp_path, "chat_template.json", {"chat_template": "packed"})
    assert found(tmp_path, {}) == "packed"
    assert found(tmp_path, {"chat_template": "inline"}) == "inline"
    write(tmp_path, "chat_template.jinja", "älone")
    assert found(tmp_path, {"chat_template": "inline"}) == "älone"


def test_named_templates(tmp_path: Path) -> None:
    tools = {"name": "tool_use", "template": "t"}
    default = {"name": "default", "template": "d"}
    assert found(tmp_path, {"chat_template": [tools, default]}) == "d"
    assert found(tmp_path, {"chat_template": [tools]}) == "t"
    with pytest.raises(TemplateError, match=r"names \['rag', 'tool_use'\], but no 'default'"):
        found(tmp_path, {"chat_template": [tools, {"name": "rag", "template": "r"}]})


@pytest.mark.parametrize(
    "bad", [5, {"a": "b"}, [{"name": "default"}, 3], [{"name": "default", "template": 7}]]
)
def test_what_is_no_template(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(TemplateError, match=r"expected text$"):
        found(tmp_path, {"chat_template": bad})


def test_unreadable_template_files(tmp_path: Path) -> None:
    write(tmp_path, "chat_template.json", "{")
    with pytest.raises(TemplateError, match=r"chat_template.json is not JSON"):
        found(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TemplateError, match=r"chat_template.jinja cannot be read"):
        found(tmp_path, {})
