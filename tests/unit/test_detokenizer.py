"""The incremental detokenizer, against decoding the whole output at once."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from helpers.tokenizers import (
    byte_level_backend,
    byte_level_tokenizer,
    sentencepiece_processor,
    sentencepiece_tokenizer,
)
from tokenmill.engine.detokenizer import make_detokenizer
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.tokenizer import Tokenizer

BYTE_LEVEL = byte_level_tokenizer()
PIECES = sentencepiece_tokenizer()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["bytes", "pieces"])

texts = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("ab \n🎉👩‍👧é語한\u200d\ufe0f\u0301"),
        st.just(" "),
    ),
    max_size=30,
)


def stream(detokenizer, token_ids, group=1, stop_token=False):
    """Deltas of a request that streams; ends at a stop string. Returns (deltas, stop string)."""
    deltas, stop = [], None
    for start in range(0, len(token_ids), group):
        some = token_ids[start : start + group]
        last = start + group >= len(token_ids)
        stop = detokenizer.update(some, stop_token=stop_token and last)
        if stop is not None or last:
            break
        deltas.append(detokenizer.next_text(finished=False, delta=True))
    deltas.append(detokenizer.next_text(finished=True, delta=True))
    return deltas, stop


@TOKENIZERS
@settings(max_examples=200, deadline=None)
@given(prompt=texts, output=texts, group=st.integers(1, 4))
def test_b008_joined_deltas_equal_a_full_decode(tokenizer, prompt, output, group):
    prompt_ids = tokenizer.encode(prompt)
    output_ids = tokenizer.encode(output, add_special_tokens=False)
    detokenizer = make_detokenizer(tokenizer, prompt_ids, SamplingParams(max_tokens=None))
    deltas, _ = stream(detokenizer, output_ids, group)
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=True)
    assert "".join(deltas) == detokenizer.text == whole[len(before) :]
    if "\ufffd" not in whole:
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 200))
def test_byte_level_output_cut_anywhere_equals_the_librarys_decode(text, cut):
    ids = byte_level_backend().encode(text).ids[:cut]
    detokenizer = make_detokenizer(BYTE_LEVEL, [], SamplingParams())
    deltas, _ = stream(detokenizer, ids)
    assert "".join(deltas) == byte_level_backend().decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(3, 419), max_size=40), st.lists(st.integers(3, 419), max_size=5))
def test_any_byte_level_ids_equal_the_librarys_decode(ids, prompt):
    library = byte_level_backend()
    detokenizer = make_detokenizer(BYTE_LEVEL, prompt, SamplingParams())
    deltas, _ = stream(detokenizer, ids)
    before, whole = library.decode(prompt), library.decode(prompt + ids)
    if whole.startswith(before):  # else the output completes the prompt's last character
        assert "".join(deltas) == whole[len(before) :]
    assert BYTE_LEVEL.decode(ids) == library.decode(ids, skip_special_tokens=False)


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 200))
def test_byte_fallback_output_cut_anywhere_equals_sentencepieces_decode(text, cut):
    processor = sentencepiece_processor()
    ids = processor.encode(text)[:cut]
    detokenizer = make_detokenizer(PIECES, [], SamplingParams())
    deltas, _ = stream(detokenizer, ids)
    assert "".join(deltas) == processor.decode(ids)
    assert PIECES.decode(ids) == processor.decode(ids)


def test_output_completes_the_prompts_last_character():
    ids = BYTE_LEVEL.encode("é🎉")
    for cut in range(len(ids)):
        detokenizer = make_detokenizer(BYTE_LEVEL, ids[:cut], SamplingParams())
        deltas, _ = stream(detokenizer, ids[cut:])
        complete = BYTE_LEVEL.decode(ids[:cut]).rstrip("\ufffd")
        assert complete + "".join(deltas) == "é🎉"


def test_output_that_leaves_the_prompts_last_character_broken():
    ids = BYTE_LEVEL.encode("🎉")[:-1]
    detokenizer = make_detokenizer(BYTE_LEVEL, ids, SamplingParams())
    assert "".join(stream(detokenizer, BYTE_LEVEL.encode("ab"))[0]) == "ab"
    nothing = make_detokenizer(BYTE_LEVEL, ids, SamplingParams())
    assert nothing.next_text(finished=True, delta=True) == ""


def test_b008_the_end_inside_a_character_is_told_once():
    ids = BYTE_LEVEL.encode("a🎉")[:-1]
    detokenizer = make_detokenizer(BYTE_LEVEL, [], SamplingParams())
    deltas, _ = stream(detokenizer, ids)
    assert "".join(deltas) == "a\ufffd"
    assert deltas[-1] == "\ufffd"
    assert detokenizer.next_text(finished=True, delta=True) == ""
    assert detokenizer.text == "a\ufffd"


def test_leading_space_of_pieces():
    hello = PIECES.encode("hello", add_special_tokens=False)
    assert PIECES.decode(hello) == "hello"
    first = make_detokenizer(PIECES, [PIECES.bos_token_id], SamplingParams())
    assert "".join(stream(first, hello)[0]) == "hello"
    later = make_detokenizer(PIECES, PIECES.encode("say"), SamplingParams())
    assert "".join(stream(later, hello)[0]) == " hello"


@TOKENIZERS
def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    ids = tokenizer.encode("hello", add_special_tokens=False)
    strange = [-1, tokenizer.vocab_size, 2**31, 2**63, -(2**70)]
    detokenizer = make_detokenizer(tokenizer, [*strange, *ids], SamplingParams())
    deltas, _ = stream(detokenizer, [*strange, *ids, *strange])
    assert "".join(deltas).strip() == "hello"
    assert detokenizer.token_ids == [*strange, *ids, *strange]
    assert tokenizer.decode(strange) == ""
    assert [tokenizer.decode_token(i) for i in strange] == [""] * len(strange)


@TOKENIZERS
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(tokenizer, skip):
    (end,) = tokenizer.eos_token_ids
    ids = [*tokenizer.encode("a", add_special_tokens=False), end]
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = make_detokenizer(tokenizer, tokenizer.encode("x"), params)
    text = "".join(stream(detokenizer, ids)[0])
    assert text.endswith(tokenizer.decode_token(end)) != skip


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_b004_text_of_a_stop_token(skip, include):
    params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=include)
    ids = BYTE_LEVEL.encode("hi<|im_end|>")
    detokenizer = make_detokenizer(BYTE_LEVEL, [], params)
    deltas, stop = stream(detokenizer, ids, stop_token=True)
    assert stop is None
    assert "".join(deltas) == ("hi<|im_end|>" if include and not skip else "hi")
    assert detokenizer.token_ids == ids


@TOKENIZERS
@pytest.mark.parametrize("include", [True, False])
@settings(max_examples=150, deadline=None)
@given(output=texts, data=st.data())
def test_b001_stop_strings_in_a_stream(tokenizer, include, output, data):
    """Any part of the output as stop: deltas joined are the text up to its first match."""
    ids = tokenizer.encode(output, add_special_tokens=False)
    full = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(len(full) - 1, 0)))
    stop = full[start : start + data.draw(st.integers(2, 12))] or "nothing"
    other = data.draw(st.sampled_from(["\u2603\u2603", stop + "\u2603", "zz"]))
    params = SamplingParams(stop=[other, stop], include_stop_str_in_output=include)
    detokenizer = make_detokenizer(tokenizer, [], params)
    deltas, found = stream(detokenizer, ids, group=data.draw(st.integers(1, 3)))
    end = min(
        (full.find(s) + (len(s) if include else 0) for s in (other, stop) if s in full),
        default=len(full),
    )
    assert "".join(deltas) == detokenizer.text == full[:end]
    if not include:
        assert stop not in "".join(deltas)
    if found is not None:
        assert found in full
    assert detokenizer.token_ids == ids[: len(detokenizer.token_ids)]


def test_tokens_behind_a_stop_string_are_dropped():
    ids = [BYTE_LEVEL.token_to_id(char) for char in "abcdef"]
    detokenizer = make_detokenizer(BYTE_LEVEL, [], SamplingParams(stop=["bc"]))
    assert detokenizer.update(ids, stop_token=True) == "bc"
    assert detokenizer.token_ids == ids[:3]
    assert detokenizer.next_text(finished=True, delta=False) == "a"


def test_what_is_held_is_no_more_than_may_become_a_stop_string():
    detokenizer = make_detokenizer(BYTE_LEVEL, [], SamplingParams(stop=["<end of text>"]))
    shown = []
    for char in "hi <e, hi <end":
        detokenizer.update([BYTE_LEVEL.encode(char)[0]], stop_token=False)
        shown.append(detokenizer.next_text(finished=False, delta=True))
    assert shown == ["h", "i", " ", "", "", "<e,", " ", "h", "i", " ", "", "", "", ""]
    assert detokenizer.next_text(finished=False, delta=False) == "hi <e, hi "
    assert detokenizer.next_text(finished=True, delta=True) == "<end"
    assert detokenizer.text == "hi <e, hi <end"


def test_nothing_is_held_of_a_stop_string_that_is_shown():
    params = SamplingParams(stop=["<end>"], include_stop_str_in_output=True)
    detokenizer = make_detokenizer(BYTE_LEVEL, [], params)
    ids = [BYTE_LEVEL.token_to_id(char) for char in "a<end>b"]
    assert stream(detokenizer, ids) == (["a", "<", "e", "n", "d", ">"], "<end>")


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (3, "a"), (4, "axybxya"), (10, "axybxyaxyb")]
)
def test_b030_stop_strings_are_not_honoured_among_the_first_tokens(min_tokens, text):
    params = SamplingParams(stop=["xyb"], min_tokens=min_tokens)
    detokenizer = make_detokenizer(BYTE_LEVEL, [], params)
    ids = [BYTE_LEVEL.token_to_id(char) for char in "axybxyaxyb"]
    assert "".join(stream(detokenizer, ids)[0]) == text


def test_cumulative_text_grows_by_the_deltas():
    output = BYTE_LEVEL.encode("naïve 🎉 families")
    whole, parts = (make_detokenizer(BYTE_LEVEL, [], SamplingParams(stop=["x"])) for _ in "ab")
    joined = ""
    for token_id in output:
        whole.update([token_id], stop_token=False)
        parts.update([token_id], stop_token=False)
        joined += parts.next_text(finished=False, delta=True)
        assert whole.next_text(finished=False, delta=False) == joined


@pytest.mark.parametrize(
    ("tokenizer", "params"),
    [(None, SamplingParams()), (BYTE_LEVEL, SamplingParams(detokenize=False))],
)
def test_without_text_ids_are_kept(tokenizer, params):
    detokenizer = make_detokenizer(tokenizer, [1, 2], params)
    assert detokenizer.update([5, 6], stop_token=True) is None
    assert detokenizer.next_text(finished=True, delta=True) == detokenizer.text == ""
    assert detokenizer.token_ids == [5, 6]


def word_tokenizer(decoder):
    backend = tokenizers.Tokenizer(
        models.WordLevel({"[S]": 0, "a": 1, "##b": 2, "c": 3, ".": 4, "é": 5}, unk_token="[S]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[S]"])
    return Tokenizer(backend)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder("c")])
@given(ids=st.lists(st.integers(0, 6), max_size=12), skip=st.booleans())
def test_other_decoders_are_followed(decoder, ids, skip):
    tokenizer = word_tokenizer(decoder)
    detokenizer = make_detokenizer(tokenizer, [1, 3], SamplingParams(skip_special_tokens=skip))
    text = "".join(stream(detokenizer, ids)[0])
    whole = tokenizer.decode([1, 3, *ids], skip_special_tokens=skip)
    before = tokenizer.decode([1, 3])
    if whole.startswith(before):
        assert text == whole[len(before) :]


def test_blanks_between_special_tokens_can_be_left_out():
    tokenizer = word_tokenizer(None)
    assert tokenizer.decode([1, 0, 0, 3]) == "a [S] [S] c"
    without = tokenizer.decode([1, 0, 0, 3], spaces_between_special_tokens=False)
    assert without == "a [S][S] c"


def seconds_for(detokenizer, token_ids):
    started = time.thread_time()
    for token_id in token_ids:
        detokenizer.update([token_id], stop_token=False)
        detokenizer.next_text(finished=False, delta=True)
    return time.thread_time() - started


@TOKENIZERS
@pytest.mark.parametrize("kind", ["text", "incomplete"])
def test_b044_cost_per_token_is_constant(tokenizer, kind):
    incomplete = tokenizer.token_to_id("<0xE4>") or tokenizer.token_to_id("ä")
    words = tokenizer.encode("some words 🎉 of text", add_special_tokens=False)
    ids = [incomplete] * 20_000 if kind == "incomplete" else (words * 20_000)[:20_000]
    params = SamplingParams(stop=["\n\nUser:", "wordsome"], max_tokens=None)
    make = lambda: make_detokenizer(tokenizer, [], params)  # noqa: E731
    # In pairs, since the machine's speed moves; a cost that grew would quadruple in each of them.
    pairs = [(seconds_for(make(), ids[:10_000]), seconds_for(make(), ids)) for _ in range(5)]
    assert min(whole / half for half, whole in pairs) < 3
    assert min(whole for _, whole in pairs) / len(ids) < 100e-6


@TOKENIZERS
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_have_the_text_of_a_full_decode(tokenizer, data):
    """Whole characters, parts of them, and bytes that belong to none, in any order."""
    known = st.integers(-2, tokenizer.vocab_size + 2)
    ids = data.draw(st.lists(known, min_size=1, max_size=40))
    detokenizer = make_detokenizer(tokenizer, [], SamplingParams())
    deltas, _ = stream(detokenizer, ids)
    valid = [i for i in ids if 0 <= i < tokenizer.vocab_size]
    assert "".join(deltas) == tokenizer.decode(valid, skip_special_tokens=True)


def test_b044_incomplete_bytes_are_held_for_no_more_than_a_character():
    incomplete = BYTE_LEVEL.token_to_id("ä")  # the byte 0xE4
    detokenizer = make_detokenizer(BYTE_LEVEL, [], SamplingParams())
    deltas, _ = stream(detokenizer, [incomplete] * 100)
    assert deltas[0] == ""
    assert deltas[1:] == ["\ufffd"] * 98 + ["\ufffd\ufffd"]
    assert "".join(deltas) == byte_level_backend().decode([incomplete] * 100)
