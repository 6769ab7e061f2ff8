"""Tokenizers read from Hugging Face directories, against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from helpers.tiny import write_tokenizer
from helpers.tokenizers import TEXTS, byte_level_backend, byte_level_tokenizer, copy_of
from tokenmill.checkpoint.checkpoint import TokenizerData
from tokenmill.errors import CheckpointError, InvalidRequestError
from tokenmill.tokenizer import from_directory
from tokenmill.tokenizer.tokenizer import Tokenizer, load_tokenizer

SPECIAL = {
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    "pad_token": "<|endoftext|>",
}


def write(directory, config=None, **files):
    byte_level_backend().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    return load_tokenizer(TokenizerData(directory=directory))


def test_equals_transformers(tmp_path):
    ours = write(tmp_path, SPECIAL)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        skipped = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=True) == skipped
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert set(theirs.all_special_ids) <= ours.special_token_ids
    assert ours.special_tokens == {
        name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)
    }


def test_a_token_that_only_the_configuration_calls_special_is_special(tmp_path):
    tokenizer = write(tmp_path, {**SPECIAL, "eos_token": "the"})
    (end,) = tokenizer.eos_token_ids
    assert end in tokenizer.special_token_ids
    assert tokenizer.decode([end], skip_special_tokens=True) == ""


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_tokenizer_json_says_whether_bos_is_added(tmp_path, flag, in_file):
    backend = copy_of(byte_level_backend())
    if in_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {**SPECIAL, "add_bos_token": flag}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(TokenizerData(directory=tmp_path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode("hello") == theirs.encode("hello")
    assert (ours.encode("hello")[0] == 1) == in_file


def test_special_tokens_map(tmp_path):
    tokenizer = write(tmp_path, {}, special_tokens_map__json=json.dumps(SPECIAL))
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.eos_token_ids == (2,)


def test_templates_in_the_configuration_and_in_files(tmp_path):
    assert write(tmp_path, {"chat_template": "A"}).chat_template == "A"
    named = [{"name": "default", "template": "B"}, {"name": "tool_use", "template": "C"}]
    assert write(tmp_path, {"chat_template": named}).chat_templates == {
        "default": "B",
        "tool_use": "C",
    }
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("E")
    assert write(tmp_path, {"chat_template": named}, chat_template__jinja="D").chat_templates == {
        "default": "D",
        "tool_use": "C",
        "rag": "E",
    }
    assert write(tmp_path, {}, chat_template__jinja="F").chat_template == "F"


def test_templates_of_processors_win_over_the_configuration(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"chat_template": "P", "image_token": "<i>"}')
    assert write(tmp_path, {"chat_template": "A"}).chat_template == "P"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert write(tmp_path, {"chat_template": "A"}).chat_template == "J"
    assert write(tmp_path, {}, chat_template__jinja="F").chat_template == "F"


def test_no_template(tmp_path):
    assert write(tmp_path).chat_template is None


def test_vocabulary_and_merges_do_without_tokenizer_json(tmp_path):
    byte_level_backend().model.save(str(tmp_path))
    config = {**SPECIAL, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(TokenizerData(directory=tmp_path))
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *byte_level_backend().encode(text).ids]


def test_padding_and_truncation_in_the_file_are_switched_off(tmp_path):
    backend = copy_of(byte_level_backend())
    backend.enable_padding(length=64)
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(TokenizerData(directory=tmp_path))
    assert tokenizer.encode("hello world, hello") == byte_level_tokenizer().encode(
        "hello world, hello"
    )


BROKEN_MERGES = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps(BROKEN_MERGES)])
def test_a_damaged_file_is_refused(tmp_path, content):
    # In a process of its own: for some damage the library prints a backtrace.
    (tmp_path / "tokenizer.json").write_text(content)
    script = (
        "import sys, pathlib\n"
        "from tokenmill.checkpoint.checkpoint import TokenizerData\n"
        "from tokenmill.errors import CheckpointError\n"
        "from tokenmill.tokenizer.tokenizer import load_tokenizer\n"
        "try:\n"
        "    load_tokenizer(TokenizerData(directory=pathlib.Path(sys.argv[1])))\n"
        "except CheckpointError as error:\n"
        "    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused:")
    assert "tokenizer.json is damaged" in done.stdout


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_damaged_configuration_is_refused(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        write(tmp_path, tokenizer_config__json=content)


def test_a_missing_tokenizer_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"save_pretrained"):
        load_tokenizer(TokenizerData(directory=tmp_path))
    with pytest.raises(CheckpointError, match=r"--tokenizer"):
        load_tokenizer(TokenizerData())


def test_a_file_that_is_too_large_is_refused(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(from_directory.MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"limit is 268435456"):
        load_tokenizer(TokenizerData(directory=tmp_path))


def test_a_chat_template_that_is_no_text_is_damage(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is damaged"):
        load_tokenizer(TokenizerData(directory=tmp_path))


def test_lone_surrogates_are_refused():
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level_tokenizer().encode("a\ud800")


def test_b095_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = byte_level_tokenizer()
    text = "ab cd " * 100_000
    ended, num_ticks = threading.Event(), 0

    def tick():
        nonlocal num_ticks
        while not ended.wait(0.001):
            num_ticks += 1

    def ticks_meanwhile():
        before = num_ticks
        tokenizer.encode(text)
        return num_ticks - before

    thread = threading.Thread(target=tick)
    thread.start()
    # Whoever holds the interpreter lets none pass, or one at each end; a few tries, since the
    # thread may get no processor for a while.
    assert any(ticks_meanwhile() > 5 for _ in range(20))
    ended.set()
    thread.join()


def test_b093_many_threads_share_one_tokenizer():
    tokenizer = byte_level_tokenizer()
    texts = [f"{text} {i}" for i in range(150) for text in TEXTS]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(tokenizer.encode, texts))
        decoded = list(pool.map(tokenizer.decode, found))
    assert found == expected
    assert decoded == texts


def test_no_token_stands_for_more_characters_than_promised():
    tokenizer = byte_level_tokenizer()
    for text in TEXTS:
        assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_token_chars


def test_an_empty_vocabulary_is_refused():
    import tokenizers

    with pytest.raises(CheckpointError, match="empty"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
