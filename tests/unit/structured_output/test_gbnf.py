"""GBNF to Lark; what the texts are is tested with the backend."""

from __future__ import annotations

import random
import re

import pytest

from helpers.grammar_walk import begin, text_of, walk
from tokenmill.structured_output.gbnf import gbnf_to_lark, is_gbnf
from tokenmill.structured_outputs import StructuredOutputsParams


def texts(grammar: str, count: int = 40, **kwargs) -> list[str]:
    found = []
    for seed in range(count):
        params = StructuredOutputsParams(grammar=grammar)
        ids, ended = walk(begin(params), random.Random(seed), **kwargs)
        if ended:
            found.append(text_of(ids))
    return found


def test_which_notation_a_grammar_is_in():
    assert is_gbnf('root ::= "a"')
    assert is_gbnf('# text: with colons\n  a-b ::= "x"\nroot ::= a-b')
    assert not is_gbnf('start: "::=" A')


def test_rules_that_lead_to_no_recursion_become_terminals():
    lark = gbnf_to_lark(
        'root ::= list\nlist ::= "(" list? ")" word\nword ::= letter+\nletter ::= [a-z]\n'
    )
    names = dict(line.split(": ", 1) for line in lark.splitlines())
    assert set(names) == {"start", "r0", "r1", "T2", "T3"}


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "a" | "b"', "a|b"),
        ('root ::= "a"{2} "b"{1,3} "c"{2,}', "aab{1,3}c{2,}"),
        ('root ::= ("x" | "y")+ "!"?', "[xy]+!?"),
        ("root ::= [a-c] [^\\n\\r-z] [\\]\\\\-]", "(?s)[a-c][^\\n\\r-z][\\]\\\\-]"),
        (r'root ::= "\"" "\\" "\n" "\x41" "\u00e9" "/"', '"\\\\\nAé/'),
        ("root ::= . .", "(?s).."),
        ('root ::= a-rule # a comment\n# another\na-rule ::=\n  "one"\n  | "two"\n', "one|two"),
        ('root ::= "" | "z"', "z?"),
        ('root ::= ( "a" | ) "b"', "a?b"),
        ('ws ::= [ \\t]*\nroot ::= ws "end"', "[ \\t]*end"),
        ("root ::= [一-龥] [-a]", "[一-龥][-a]"),
    ],
)
def test_texts_are_those_that_the_grammar_means(grammar, pattern):
    found = texts(grammar, patience=6)
    assert found
    for text in found:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('a ::= "b"', "rule named root"),
        ("root ::= missing", "missing, which is not there"),
        ('root ::= "a"\nroot ::= "b"', "line 2: 'root ::= \"b\"' is defined twice"),
        ('root ::= "a', "cannot be read"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "empty class"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "closes what nothing has opened"),
        ("root ::= * ", "repeats nothing"),
        ('root ::= "a"{}', "gives no number"),
        ('root ::= "a"{99999}', "more than"),
        (r'root ::= "\ud800"', "no character"),
        ('"a" root ::= "b"', "outside of a rule"),
        ('root ::= "a" ::= "b"', "outside of a rule"),
    ],
)
def test_what_is_malformed_is_told(grammar, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gbnf_to_lark(grammar)


def test_time_grows_with_length_only():
    gbnf_to_lark(
        "root ::= r0\n"
        + "".join(f'r{i} ::= r{i + 1} "a"\n' for i in range(3000))
        + 'r3000 ::= "b"\n'
    )
