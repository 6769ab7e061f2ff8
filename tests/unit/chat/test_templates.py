"""Chat templates, against transformers, and what their sandbox stops."""

from __future__ import annotations

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from helpers.chat_templates import CHATML, LLAMA_LIKE, MISTRAL_LIKE, TOOLS
from helpers.timing import in_time
from tokenmill.entrypoints.chat import templates
from tokenmill.entrypoints.chat.templates import ChatTemplate, read_template
from tokenmill.errors import ChatTemplateError, ConfigError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "user", "content": "  Hi <b>you</b> & 'me'\n"},
    {"role": "assistant", "content": 'Hello, "friend" 🎉'},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
]
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]}},
}
CONVERSATIONS = {
    "turns": TURNS,
    "system": [{"role": "system", "content": "Be brief."}, *TURNS],
    "tools": [
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sky": "blue"}'},
    ],
}


def render(source, **variables):
    return ChatTemplate(source).render({**SPECIAL, "messages": TURNS, **variables})


@pytest.mark.parametrize("source", [CHATML, LLAMA_LIKE, MISTRAL_LIKE])
@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompted", [True, False])
def test_equals_transformers(source, name, tools, prompted):
    conversation = CONVERSATIONS[name]
    ours = render(source, messages=conversation, tools=tools, add_generation_prompt=prompted)
    (theirs,), _ = render_jinja_template(
        conversations=[conversation],
        tools=tools,
        chat_template=source,
        add_generation_prompt=prompted,
        **SPECIAL,
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages[0] | tojson(indent=4) }}",
        "{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true) }}",
        "{% generation %}{{ messages[1].content }}{% endgeneration %}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ loop.index }}"
        "{{ loop.last }}{{ loop.length }}{% endfor %}",
        "{% for m in messages[::-1] %}{% break %}{% endfor %}{{ messages[-1]['content'] | trim }}",
        "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ ns.found }}",
        "{% macro show(m, n=2) %}{{ m.role }}{{ n }}{{ '=' * n }}{% endmacro %}"
        "{{ show(messages[0]) }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | length }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ 'a' ~ 1 ~ none ~ missing ~ messages[0].role }}{{ 'x' if missing is defined else 'y' }}",
        "{{ '%s-%03d' % ('a', 7) }}{{ '{}:{:>5}'.format('b', 2) }}{{ 'ab'.upper().center(6) }}",
        "{{ 'a,b'.split(',') }}{{ '  x '.strip() }}{{ messages[0].content.replace('Hi', 'Ho') }}",
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ dict(a=1) }}",
        "{% set x = messages + [1] %}{{ x | length }}{{ range(3) | list }}{{ 7 // 2 ** 2 % 5 }}",
        "  {% if true %}\n    trimmed\n  {% endif %}\n  kept\n",
        "{{ 'a\nb' | indent(4) }}{{ 'b' | center(5) }}{{ 'x-y' | replace('-', '+') }}",
        "{% for row in [1, 2, 3] | batch(2, 'x') %}{{ row }}{% endfor %}{{ '%d' | format(3) }}",
        "{%- for i in [1] recursive %}{{ i }}{% else %}none{% endfor %}",
        "{% macro wrap() %}<{{ caller() }}>{% endmacro %}"
        "{% filter upper %}{% call wrap() %}q{% endcall %}{% endfilter %}",
    ],
)
def test_dialect_equals_transformers(source):
    (theirs,), _ = render_jinja_template(
        conversations=[TURNS], chat_template=source, add_generation_prompt=False, **SPECIAL
    )
    assert render(source, add_generation_prompt=False) == theirs


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_a_refusal_carries_the_templates_words():
    with pytest.raises(ChatTemplateError, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for %}", "error in line 2"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
        ("{% include 'x' %}", "another template"),
        ("{% import 'x' as y %}", "another template"),
        ("{% from 'x' import y %}", "another template"),
        ("{% extends 'x' %}", "another template"),
        ("{{ messages.nothing.more }}", "UndefinedError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages['a'].b }}", "has no attribute"),
        ("{{ 'a'.index('b') }}", "ValueError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 10_000 + " }}", "chat template"),
        ("x" * (templates.MAX_TEMPLATE_CHARS + 1), "limit"),
    ],
)
def test_templates_that_fail(source, message):
    with pytest.raises(ChatTemplateError) as raised:
        render(source)
    assert message in str(raised.value)
    assert raised.value.parameter == "chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__class__') | string }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ('{0.__class__.__init__.__globals__}').format(messages) }}",
        "{{ '{0.__class__}'.format_map({'0': messages}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.clear() }}",
        "{{ [].__reduce__() }}",
        "{{ range.mro() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ lipsum(5) }}",
        "{{ config.items() }}",
        "{{ environment.globals() }}",
        "{{ get_flashed_messages.__globals__() }}",
    ],
)
def test_b130_attacks_are_refused(source):
    with pytest.raises(ChatTemplateError):
        render(source)


def repeated(start, change):
    """A template that applies a change sixty times."""
    turn = f"{{% set n.x = {change} %}}"
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{turn}{{% endfor %}}"


LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(10**9) %}xxxxxxxxxx{% endfor %}",
        f"{LOOP}{{% endfor %}}{{% endfor %}}",
        f"{LOOP}{'x' * 1000}{{% endfor %}}{{% endfor %}}",
        f"{{% set x %}}{LOOP}{'x' * 100}{{% endfor %}}{{% endfor %}}{{% endset %}}{{{{ x }}}}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**(10**10) }}",
        "{{ 2**(2**30) }}",
        repeated("9**99", "n.x * n.x"),
        repeated("'ab'", "n.x + n.x"),
        repeated("'ab'", "n.x ~ n.x"),
        repeated("'ab'", "n.x.replace('a', n.x)"),
        repeated("'ab'", "n.x | replace('a', n.x)"),
        repeated("'ab'", "n.x.join(n.x)"),
        repeated("'ab'", "[n.x, n.x] | join"),
        repeated("'ab'", "'%s%s' % (n.x, n.x)"),
        repeated("'ab'", "'{0}{0}'.format(n.x)"),
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'a\nb' | indent(10**10) }}",
        "{{ [1] | batch(10**10, 'x') | list }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=9999999999) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ strftime_now('%999999999Y') }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ '\t'.expandtabs(10**10) }}",
        "{{ '1'.zfill(10**10) }}",
    ],
)
def test_b129_bombs_are_stopped(source):
    def stopped():
        with pytest.raises(ChatTemplateError):
            render(source)

    in_time(stopped, 3)


def test_a_template_is_compiled_once():
    before = templates._compiled.cache_info()
    for _ in range(200):
        render(LLAMA_LIKE, tools=TOOLS, add_generation_prompt=True)
    after = templates._compiled.cache_info()
    assert after.misses - before.misses <= 1
    assert after.hits - before.hits >= 199


def test_the_engines_setting_may_be_a_path(tmp_path, monkeypatch):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }} größer", encoding="utf-8")
    assert read_template(str(path)) == "{{ messages }} größer"
    monkeypatch.chdir(tmp_path)
    assert read_template("mine.jinja") == "{{ messages }} größer"
    for as_it_is in (None, "tool_use", "{{ messages }}/mine.jinja"):
        assert read_template(as_it_is) == as_it_is


@pytest.mark.parametrize("setting", ["none.jinja", "no/where", "/", "x/" * 5000, "~nobody/x"])
def test_a_path_that_cannot_be_read_is_named(setting):
    with pytest.raises(ConfigError, match=r"^chat_template='.*cannot be read"):
        read_template(setting)


def test_a_template_that_is_no_text_is_named(tmp_path):
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="utf-8"):
        read_template(str(tmp_path / "bytes.jinja"))
