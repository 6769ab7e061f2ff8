"""Tokenizers built from a GGUF file's tables, against the tokenizers they were made of."""

from __future__ import annotations

import pytest
from transformers import LlamaTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from helpers.tokenizers import (
    CONTROL_TOKENS,
    TEXTS,
    byte_level_backend,
    byte_level_tokenizer,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    sentencepiece_processor,
    sentencepiece_tokenizer,
)
from tokenmill.errors import CheckpointError
from tokenmill.tokenizer.from_gguf import merges_by_rank, tokenizer_from_gguf
from tokenmill.tokenizer.pre_tokenizers import PRE_TOKENIZATIONS


def test_byte_level_equals_the_tokenizer_it_was_made_of():
    ours, theirs = byte_level_tokenizer(), byte_level_backend()
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", sorted(GGUF_PRE_TOKENIZER_SPLITS))
def test_splits_equal_transformers(pre):
    metadata = gguf_of_byte_level(pre=pre, add_bos_token=False)
    ours = tokenizer_from_gguf(metadata)
    tables = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        "tokens": metadata["tokenizer.ggml.tokens"],
        "merges": metadata["tokenizer.ggml.merges"],
        "token_type": metadata["tokenizer.ggml.token_type"],
    }
    theirs, _ = convert_gguf_tokenizer("llama", tables)
    for text in [text for text in TEXTS if "\u0301" not in text]:  # NFC, which files do not mention
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZATIONS))
def test_every_split_keeps_the_text(pre):
    tokenizer = byte_level_tokenizer(pre=pre, add_bos_token=False)
    for text in [text for text in TEXTS if "\u0301" not in text]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens_where_the_vocabulary_was_trained_so():
    def digits(pre):
        tokenizer = byte_level_tokenizer(pre=pre, add_bos_token=False)
        return [tokenizer.decode_token(i) for i in tokenizer.encode("x 12345")]

    assert digits("smollm")[-5:] == list("12345")
    assert len(digits("gpt-2")) < len(digits("smollm"))


def test_sentencepiece_equals_sentencepiece():
    ours, theirs = sentencepiece_tokenizer(add_bos_token=False), sentencepiece_processor()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_sentencepiece_equals_transformers_on_plain_text():
    metadata = gguf_of_sentencepiece()
    tokens, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    theirs = LlamaTokenizerFast(vocab=vocabulary, merges=merges)
    ours = sentencepiece_tokenizer()
    for text in TEXTS:
        if not text.startswith(" "):  # there SentencePiece itself is the reference
            assert ours.encode(text)[1:] == theirs.encode(text, add_special_tokens=False)


def test_merges_by_rank_list_every_cut_best_first():
    assert merges_by_rank(["ab", "abc", "a", "b", "c", "bc"]) == [
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
        ("b", "c"),
    ]


@pytest.mark.parametrize(
    ("make", "changes", "adds_bos"),
    [
        (byte_level_tokenizer, {}, False),
        (byte_level_tokenizer, {"pre": "llama-bpe"}, True),
        (byte_level_tokenizer, {"add_bos_token": True}, True),
        (byte_level_tokenizer, {"pre": "llama-bpe", "add_bos_token": False}, False),
        (sentencepiece_tokenizer, {}, True),
        (sentencepiece_tokenizer, {"add_bos_token": False}, False),
    ],
)
def test_bos_follows_the_file_or_else_the_kind_of_vocabulary(make, changes, adds_bos):
    tokenizer = make(**changes)
    ids = tokenizer.encode("hello")
    assert (ids[0] == tokenizer.bos_token_id) == adds_bos
    assert ids[adds_bos:] == tokenizer.encode("hello", add_special_tokens=False)


def test_eos_is_added_where_the_file_says_so():
    tokenizer = byte_level_tokenizer(add_eos_token=True)
    assert tokenizer.encode("hello")[-1] == 2


def test_no_space_is_added_where_the_file_says_so():
    tokenizer = sentencepiece_tokenizer(add_space_prefix=False, add_bos_token=False)
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert tokenizer.decode_token(tokenizer.encode("hello")[0])[0] == "h"


@pytest.mark.parametrize("spelled", [" ", "\u2581"])
def test_runs_of_spaces_that_are_defined_come_before_merges(spelled):
    """Gemma's files; their scores put them behind pieces that begin with a space."""
    tables = gguf_of_sentencepiece(add_space_prefix=False, add_bos_token=False)
    first = len(tables["tokenizer.ggml.tokens"])
    more = {"tokens": [spelled * 5, spelled * 9], "scores": [-1000.0] * 2, "token_type": [4] * 2}
    for key, values in more.items():
        tables[f"tokenizer.ggml.{key}"] = [*tables[f"tokenizer.ggml.{key}"], *values]
    tokenizer = tokenizer_from_gguf(tables)
    there = tokenizer.encode("there")
    for count, token_id in ((5, first), (9, first + 1)):
        text = " " * count + "there"
        assert tokenizer.encode(text) == [token_id, *there]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_types_of_tokens():
    byte_level = byte_level_tokenizer()
    assert byte_level.special_token_ids == {0, 1, 2}
    ids = byte_level.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert byte_level.decode(ids, skip_special_tokens=True) == "hello"
    pieces = sentencepiece_tokenizer()
    user = pieces.token_to_id("<|user|>")
    assert user in pieces.encode("x<|user|>y")
    assert pieces.decode([user], skip_special_tokens=True) == "<|user|>"
    assert pieces.special_token_ids == {0, 1, 2}


def test_ends_are_those_of_the_file_and_known_ends_of_turns():
    assert byte_level_tokenizer(eos_token_id=0).eos_token_ids == (0, 2)
    assert byte_level_tokenizer(eos_token_id=0, eot_token_id=1).eos_token_ids == (0, 1)
    assert sentencepiece_tokenizer(eos_token_id=None).eos_token_ids == (2,)


def test_special_tokens_and_templates_as_chats_see_them():
    metadata = gguf_of_byte_level()
    metadata["tokenizer.chat_template"] = "A"
    metadata["tokenizer.chat_template.tool_use"] = "B"
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.chat_template == "A"
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}
    assert tokenizer.special_tokens == {
        "bos_token": CONTROL_TOKENS[1],
        "eos_token": CONTROL_TOKENS[2],
        "unk_token": CONTROL_TOKENS[0],
        "pad_token": CONTROL_TOKENS[2],
    }


def test_missing_pre_is_taken_for_gpt2_with_a_warning(caplog):
    assert byte_level_tokenizer(pre=None).encode("a b") == byte_level_tokenizer().encode("a b")
    assert "tokenizer.ggml.pre" in caplog.text


def changed(key, change):
    """Tables with one of them changed in place."""
    metadata = gguf_of_byte_level()
    change(metadata[f"tokenizer.ggml.{key}"])
    return metadata


def set_entry(index, value):
    return lambda table: table.__setitem__(index, value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (gguf_of_byte_level(model="bert"), "supported are gpt2, llama"),
        (gguf_of_byte_level(model=None), "tokenizer.ggml.model is None"),
        (gguf_of_byte_level(model=["gpt2"]), "tokenizer.ggml.model is"),
        (gguf_of_byte_level(pre="smolm"), "Did you mean 'smollm'"),
        (gguf_of_byte_level(merges=None), "`tokenizer=`"),
        (gguf_of_byte_level(merges=3), "merges is missing, or no array"),
        (gguf_of_byte_level(tokens=None), "tokens is missing"),
        (gguf_of_byte_level(tokens=[]), "has 0 entries"),
        (gguf_of_byte_level(tokens="abc"), "tokens is missing, or no array"),
        (changed("tokens", set_entry(7, 7)), "entry 7 is no string"),
        (changed("tokens", set_entry(7, "")), "entry 7 is no string"),
        (changed("tokens", set_entry(7, "<|im_end|>")), "entries 2 and 7 are both"),
        (changed("tokens", list.pop), "token_type has 420 entries for 419 tokens"),
        (changed("token_type", list.pop), "token_type has 419 entries for 420 tokens"),
        (changed("merges", set_entry(3, "q")), "merges entry 3"),
        (changed("merges", set_entry(3, "q x y")), "merges entry 3"),
        (changed("merges", set_entry(3, "! !")), "merges entry 3"),
        (changed("merges", set_entry(3, None)), "no strings"),
        (gguf_of_byte_level(bos_token_id=420), "bos_token_id is 420"),
        (gguf_of_byte_level(eos_token_id=-1), "eos_token_id is -1"),
        (gguf_of_byte_level(eos_token_id="2"), "eos_token_id is '2'"),
        (gguf_of_sentencepiece(scores=None), "scores is missing"),
        (gguf_of_sentencepiece(scores=[0.0]), "scores has 1 entries for 500"),
        (gguf_of_sentencepiece(scores=[float("nan")] * 500), "no numbers"),
        (gguf_of_sentencepiece(remove_extra_whitespaces=True), "not supported"),
    ],
)
def test_tables_that_lie_are_refused(metadata, message):
    with pytest.raises(CheckpointError) as raised:
        tokenizer_from_gguf(metadata)
    assert message in str(raised.value)
