"""The default backend on a tiny tokenizer: what its masks allow is what the form says."""

# ruff: noqa: E501 - a case a line

from __future__ import annotations

import itertools
import json
import random
import re
import time

import numpy as np
import pytest

from helpers.grammar_walk import (
    EOS,
    allowed,
    begin,
    llguidance_backend,
    text_of,
    walk,
    walk_tokenizer,
)
from helpers.schemas import all_cases, load, validator
from helpers.timing import in_time
from helpers.tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from tokenmill.errors import InvalidRequestError
from tokenmill.structured_output.compiler import GrammarCompiler
from tokenmill.structured_output.llguidance import LLGuidanceBackend
from tokenmill.structured_outputs import StructuredOutputsParams

TRICKY_CHOICES = [
    "A",
    "AB",
    "ABC",
    "",
    "你好",
    "🎉👨‍👩‍👧",
    "a.*b",
    "[x](y)",
    "a\\b",
    'say "hi"',
    "two\nlines",
    " lead",
]


def form(**given) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def texts(params: StructuredOutputsParams, count: int, **kwargs) -> list[str]:
    """Texts that ended, out of `count` walks."""
    found = []
    for seed in range(count):
        ids, ended = walk(begin(params), random.Random(seed), **kwargs)
        if ended:
            found.append(text_of(ids))
    return found


# ---- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_b061_every_document_validates_and_every_refusal_names_the_keyword(case):
    params = form(json=case.schema)
    if case.refused_for is not None:
        with pytest.raises(InvalidRequestError) as caught:
            llguidance_backend().compile(params)
        assert case.refused_for in str(caught.value)
        assert caught.value.parameter == "structured_outputs.json"
        return
    check = validator(case.schema)
    documents = texts(params, 4)
    for document in documents:
        check.validate(load(document))


def test_most_schemas_are_enforced():
    cases = all_cases()
    assert len(cases) >= 300
    assert sum(case.refused_for is None for case in cases) >= 270


def test_any_json_object():
    for document in texts(form(json_object=True), 30):
        assert isinstance(json.loads(document), dict)


WHITE = re.compile(r"\s+")


def outside_strings(document: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', document)


def test_no_number_is_beyond_its_bounds():
    bounds = (0, 1, -1, 0.5, -0.5, 1.25, -1.25, 10)
    lower = [{}, *({key: b} for key in ("minimum", "exclusiveMinimum") for b in bounds)]
    upper = [{}, *({key: b} for key in ("maximum", "exclusiveMaximum") for b in bounds)]
    wholes = (0, 1, 2, 9, 10, 11)
    ends = ("", ".0", ".00", ".1", ".2", ".24", ".25", ".26", ".250", ".251", ".5", ".51", ".9")
    numbers = [f"{sign}{whole}{end}" for sign in ("", "-") for whole in wholes for end in ends]
    encode = walk_tokenizer().encode
    ids = {number: encode(number, add_special_tokens=False) for number in numbers}
    for low, high in itertools.product(lower, upper):
        schema = {"type": "number", **low, **high}
        try:
            grammar = llguidance_backend().compile(form(json=schema))
        except InvalidRequestError:  # nothing is between the two
            continue
        check, taken = validator(schema), []
        for number in numbers:
            matcher = grammar.make_matcher()
            if matcher.count_valid(ids[number]) == len(ids[number]):
                assert matcher.accept(ids[number])
                taken += [number] if matcher.is_accepting() else []
        assert all(check.is_valid(float(number)) for number in taken), schema


def test_b062_white_space_is_bounded():
    seen = set()
    for document in texts(form(json={"type": "array", "items": {"type": "boolean"}}), 200):
        for run in WHITE.findall(outside_strings(document)):
            assert re.fullmatch(r" |\n {0,16}", run)
            seen.add(run[:1])
    assert seen == {" ", "\n"}


def test_compact_json_has_no_white_space():
    params = form(json={"type": "array", "items": {"type": "boolean"}}, disable_any_whitespace=True)
    for document in texts(params, 50):
        assert not WHITE.search(document)


def test_white_space_of_ones_own():
    params = form(json={"type": "array", "items": {"type": "boolean"}}, whitespace_pattern="[ ]{2}")
    runs = {run for text in texts(params, 50) for run in WHITE.findall(text)}
    assert runs == {"  "}


def test_a_schema_cannot_make_the_library_lenient():
    schema = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        llguidance_backend().compile(form(json=schema))


def test_closed_objects():
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    keys = set()
    for document in texts(form(json=schema, disable_additional_properties=True), 60):
        keys |= json.loads(document).keys()
    assert keys == {"a"}


# ---- other forms --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{3}",
        "^(yes|no)$",
        "\\d+\\.\\d{2}",
        "(ab|cd)*e",
        "[äöü]+",
        "a|b|",
        "x{2,4}",
        "\\$[0-9]",
        ".{2}",
    ],
)
def test_a_regex_is_matched_by_the_whole_text(pattern):
    found = texts(form(regex=pattern), 40, patience=6)
    assert found
    for text in found:
        assert re.fullmatch(pattern, text)


def test_b071_a_choice_is_exactly_one_of_them():
    found = texts(form(choice=TRICKY_CHOICES), 600)
    assert set(found) == set(TRICKY_CHOICES)


def test_b071_five_thousand_choices():
    choices = [f"choice number {i}" for i in range(5000)]
    found = in_time(lambda: texts(form(choice=choices), 20), 10, num_tries=2)
    assert len(found) == 20
    assert set(found) <= set(choices)


LARK = """
start: "[" item ("," item)* "]"
item: WORD | start
WORD: /[a-z]+/
"""
GBNF = r"""
# nested lists of words
root ::= "[" item ("," item)* "]"
item ::= word
       | root
word ::= [a-z]+
"""


@pytest.mark.parametrize("grammar", [LARK, GBNF])
def test_a_grammar_in_either_notation(grammar):
    found = texts(form(grammar=grammar), 60, patience=20)
    assert len(found) > 20
    for text in found:
        rest = text
        while "[" in rest:
            shorter = re.sub(r"\[[a-z]+(,[a-z]+)*\]", "x", rest)
            assert shorter != rest, text
            rest = shorter
        assert rest == "x"


TAG = {
    "triggers": ["<fn="],
    "structures": [
        {
            "begin": "<fn=add>",
            "schema": {"type": "integer", "minimum": 0, "maximum": 99},
            "end": "</fn>",
        },
        {"begin": "<fn=now>", "schema": {"const": None}, "end": "</fn>"},
    ],
}


def test_whatever_begins_like_a_tag_is_one():
    tokenizer, found = walk_tokenizer(), 0
    for seed in range(40):
        grammar = begin(form(structural_tag=TAG))
        prefix = tokenizer.encode("some text <fn=", add_special_tokens=False)
        assert grammar.accept(prefix) is None
        ids, ended = walk(grammar, random.Random(seed), longest=60, patience=0)
        if ended:
            tail = text_of([*prefix, *ids]).removeprefix("some text ")
            assert re.match(r"<fn=(add>\d{1,2}|now>null)</fn>", tail), tail
            found += 1
    assert found > 10


@pytest.mark.parametrize(
    ("tag", "pattern"),
    [
        ({"type": "const_string", "value": "a<b"}, "a<b"),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, {"type": "regex", "pattern": "[0-9/]{2}"}]}, "x[0-9/]{2}"),
        ({"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "json_schema", "json_schema": {"const": [1]}}]}, r"a|\[\s*1\s*\]"),
        ({"type": "tag", "begin": "<b>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</b>"}, "<b>(true|false)</b>"),
        ({"type": "tags_with_separator", "separator": ",", "at_least_one": True, "stop_after_first": False, "tags": [{"begin": "<", "content": {"type": "regex", "pattern": "[ab]"}, "end": ">"}]}, "<[ab]>(,<[ab]>)*"),
        ({"type": "triggered_tags", "triggers": ["<"], "at_least_one": True, "stop_after_first": True, "tags": [{"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ["!", "?"]}]}, "<a>[0-9][!?]"),
    ],
)  # fmt: skip
def test_formats_within_structural_tags(tag, pattern):
    found = texts(form(structural_tag={"type": "structural_tag", "format": tag}), 25, patience=10)
    assert found
    for text in found:
        assert re.fullmatch(pattern, text), text


# ---- ends, forced tokens, drafts ----------------------------------------------------------------


def test_the_end_is_allowed_just_where_the_text_may_end():
    grammar = begin(form(regex="ab?"))
    tokenizer = walk_tokenizer()
    assert EOS not in allowed(grammar)
    assert grammar.accept(tokenizer.encode("a", add_special_tokens=False)) is None
    assert EOS in allowed(grammar)
    assert not grammar.is_terminated
    assert grammar.accept(tokenizer.encode("b", add_special_tokens=False)) is None
    assert grammar.is_terminated


def test_a_refused_token_is_told():
    grammar = begin(form(regex="ab"))
    assert grammar.accept(walk_tokenizer().encode("x", add_special_tokens=False)) is not None


RECORD = {
    "type": "object",
    "properties": {"first name": {"enum": ["Alice", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["first name", "age"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [
        form(json=RECORD, disable_any_whitespace=True),
        form(json=RECORD),
        form(choice=["The quick brown fox", "The quick red fox"]),
        form(grammar=LARK),
        form(regex="one two three (four|five) six"),
    ],
)
def test_forced_tokens_are_the_ones_that_masks_allow_alone(params):
    """Followed one by one under masks or taken at once: the same tokens, and the same grammar."""
    num_forced = 0
    for seed in range(10):
        plain, quick = begin(params), begin(params)
        rng = random.Random(seed)
        for _ in range(60):
            forced = quick.take_forced(1000)
            num_forced += len(forced)
            for token_id in forced:
                assert allowed(plain) == [token_id]
                assert plain.accept([token_id]) is None
            assert plain.is_terminated == quick.is_terminated
            if plain.is_terminated:
                break
            choices = allowed(plain)
            assert choices == allowed(quick)
            token_id = rng.choice(choices)
            if token_id == EOS:
                break
            assert plain.accept([token_id]) is None
            assert quick.accept([token_id]) is None
    if params.grammar is None:
        assert num_forced > 0


def test_forced_tokens_are_how_the_tokenizer_writes_the_text():
    tokenizer = walk_tokenizer()
    text = "The quick brown fox jumps over the lazy dog."
    grammar = begin(form(choice=[text]))
    expected = tokenizer.encode(text, add_special_tokens=False)
    forced = grammar.take_forced(1000)
    assert forced == expected[: len(forced)]
    assert len(forced) >= len(expected) - 1


def test_walking_over_drafts_changes_nothing():
    params = form(json=RECORD)
    grammar = begin(params)
    drafts: list[int] = []
    probe, rng = begin(params), random.Random(1)
    masks = [allowed(probe)]
    for _ in range(8):
        drafts.append(rng.choice(masks[-1]))
        assert probe.accept([drafts[-1]]) is None
        masks.append(allowed(probe))
    before = allowed(grammar)
    assert grammar.cut_drafts([*drafts, EOS, EOS])[: len(drafts)] == drafts
    assert [allowed(grammar) for _ in grammar.walk(drafts)] == masks
    assert allowed(grammar) == before


def test_drafts_are_cut_at_the_first_one_that_is_refused():
    tokenizer = walk_tokenizer()
    good = tokenizer.encode("ab", add_special_tokens=False)
    bad = tokenizer.encode("x", add_special_tokens=False)
    grammar = begin(form(regex="abc"))
    assert grammar.cut_drafts([*good, *bad, *good]) == good
    assert grammar.cut_drafts(bad) == []


def test_masks_of_many_rows_are_those_of_each_alone():
    backend = llguidance_backend()
    patterns = ["a+", "[0-9]{3}", "x|y", "(foo|bar)baz"] * 8
    grammars = [begin(form(regex=pattern)) for pattern in patterns]
    num_words = -(-walk_tokenizer().vocab_size // 32)
    together = np.zeros((len(grammars), num_words), np.int32)
    backend.fill_bitmasks([each.matcher for each in grammars], together)
    for grammar, row in zip(grammars, together, strict=True):
        alone = np.zeros((1, num_words), np.int32)
        backend.fill_bitmasks([grammar.matcher], alone)
        assert (alone[0] == row).all()


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_any_tokenizer_of_bytes(make):
    """Each token has the bytes that we decode it to, and texts come out as they were meant."""
    tokenizer = make()
    backend = LLGuidanceBackend(
        tokenizer, vocab_size=tokenizer.vocab_size + 5, eos_token_ids=[2], num_threads=1
    )
    for token_id in set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids:
        if tokenizer.token_bytes(token_id) != b"\xff":  # no text has it
            assert backend._tokenizer.decode_bytes([token_id]) == tokenizer.token_bytes(token_id)
    text = "The quick brown fox, Größe 🎉!"
    matcher = backend.compile(form(choice=[text])).make_matcher()
    ids = []
    while not matcher.is_terminated():
        bitmask = np.zeros((1, -(-(tokenizer.vocab_size + 5) // 32)), np.int32)
        backend.fill_bitmasks([matcher], bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        choices = (matcher.forced_tokens() or np.flatnonzero(bits).tolist())[:1]
        assert matcher.accept(choices)
        ids += choices
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


# ---- what is malformed, deep or wild ------------------------------------------------------------

MALFORMED = [
    form(regex="("), form(regex="[a"), form(regex="a{3,1}"), form(regex="(?<=a)b"), form(regex="*a"),
    form(regex="a\\"), form(grammar="start: missing"), form(grammar="x: \"a\""),
    form(grammar="root ::= missing"), form(grammar="a ::= \"b\""), form(grammar="root ::= (\"a\""),
    form(grammar="root ::= [z-a]"), form(grammar="root ::= \"a\" root2"), form(grammar="start: /(/"),
    form(grammar="not a grammar at all"), form(structural_tag={"type": "structural_tag"}),
    form(structural_tag={"format": {"type": "no"}}), form(structural_tag={"structures": [], "triggers": []}),
    form(structural_tag={"structures": [{"begin": "x"}], "triggers": ["y"]}),
    form(json={"type": 5}), form(json={"properties": []}), form(json={"type": "object", "required": [1]}),
    form(json={"anyOf": []}), form(json={"pattern": "("}), form(json={"$ref": 7}),
    form(json={"type": "array", "items": 3}),
]  # fmt: skip


@pytest.mark.parametrize("params", MALFORMED, ids=lambda p: f"{p.kind} {p.source[:30]}")
def test_what_is_malformed_is_refused_at_once(params):
    def refused():
        with pytest.raises(InvalidRequestError) as caught:
            llguidance_backend().compile(params)
        return caught

    caught = in_time(refused, 2)
    assert caught.value.parameter == f"structured_outputs.{params.kind}"
    assert len(str(caught.value)) < 700


def deep_rules(count: int) -> str:
    rules = "".join(f'r{i}: "a" r{i + 1}?\n' for i in range(count))
    return f'start: r0\n{rules}r{count}: "b"\n'


WILD = {
    "nested stars": form(regex="(a*)*b"),
    "overlapping branches": form(regex="(a|aa)+$"),
    "many repeats": form(regex="((a{1,100}){1,100}){1,100}"),
    "long repeat": form(regex="(.{1,1000}x){1000}"),
    "wide classes": form(regex="|".join(f"[\\w{i}]+\\d" for i in range(500))),
    "doubling terminals": form(grammar="start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"\n'),
    "doubling rules": form(grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"\n'),
    "a long chain of rules": form(grammar=deep_rules(3900)),
    "left recursion": form(grammar='start: start "a" | start | "b"\n'),
    "endless": form(grammar="start: start\n"),
    "many items": form(json={"type": "array", "minItems": 100_000, "items": {"type": "string", "maxLength": 1000}}),
    "long strings": form(json={"type": "string", "minLength": 100_000, "maxLength": 200_000}),
    "allOf of anyOf": form(json={"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}, {"type": "string"}]} for i in range(30)]}),
    "references that double": form(json={"$defs": {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "items": False, "minItems": 2} for i in range(30)} | {"d30": {"const": 1}}, "$ref": "#/$defs/d0"}),
    "patterns that meet": form(json={"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 15)]}),
    "a reference to itself": form(json={"$ref": "#"}),
    "nested as deep as allowed": form(json='{"items":' * 49 + "{}" + "}" * 49),
    "many properties": form(json={"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"^{i}[a-z]+"} for i in range(2000)}}),
}  # fmt: skip


COMPILER = GrammarCompiler(llguidance_backend, timeout=1.5)


@pytest.mark.parametrize("name", WILD)
def test_wild_forms_are_compiled_or_refused_in_time(name):
    """And what is compiled gives masks, or an error of its own, within a bound as well."""
    llguidance_backend()

    def compiled():
        job = COMPILER.submit(lambda backend: begin(WILD[name], backend))
        while not job.wait(0.01):
            COMPILER.give_up_if_overdue(job)
        return job

    job = in_time(compiled, 2, clock=time.monotonic)
    try:
        grammar = job.result()
    except InvalidRequestError:
        return
    rng = random.Random(0)
    num_words = -(-walk_tokenizer().vocab_size // 32)
    for _ in range(30):
        bitmask = np.zeros((1, num_words), np.int32)
        began = time.thread_time()
        llguidance_backend().fill_bitmasks([grammar.matcher], bitmask)
        assert time.thread_time() - began < 1
        if grammar.matcher.error() or grammar.is_terminated:
            return
        choices = [i for i in allowed(grammar) if i != EOS]
        if not choices or grammar.accept([rng.choice(choices)]) is not None:
            return


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(" * 60_000 + "a" + ")" * 60_000),
        ("regex", "[" * 60_000),
        ("grammar", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
        ("grammar", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
        ("json", '{"items":' * 60_000 + "{}" + "}" * 60_000),
        ("json", '{"enum":' + "[" * 60_000 + "]" * 60_000 + "}"),
        ("structural_tag", '{"format":' * 60_000 + "{}" + "}" * 60_000),
    ],
)
def test_b065_deep_nesting_is_refused_before_anything_reads_it(kind, text):
    def refused():
        with pytest.raises(InvalidRequestError):
            StructuredOutputsParams(**{kind: text})

    in_time(refused, 2)
