"""Prompts with images, from their forms to core requests."""

from __future__ import annotations

import pytest

from helpers.fake_engine import engine_config, tiny_tokenizer
from helpers.pictures import END, MARK, MARK_ID, PLACEHOLDER, as_file, picture, tiny_images
from tokenmill.engine.input_processor import InputProcessor
from tokenmill.engine.pooling_processor import PoolingProcessor
from tokenmill.errors import ContextLengthExceededError, InvalidRequestError
from tokenmill.pooling_params import PoolingParams
from tokenmill.sampling_params import SamplingParams

TWO = [PLACEHOLDER] * 2 + [END]
"""The placeholders of a picture of 16 x 8."""


def processor(**settings):
    return InputProcessor(engine_config(), tiny_tokenizer(), (2,), tiny_images(**settings))


def process(prompt, by=None, **params):
    return (by or processor()).process("id", prompt, SamplingParams(**params))


def with_images(*images, prompt=MARK, **more):
    return {"prompt": prompt, "multi_modal_data": {"image": list(images)}, **more}


def test_a_text_with_marks():
    text = f"One {MARK} two {MARK}{MARK}"
    source = process(
        with_images(picture(), picture(8, 8), picture(seed=1), prompt=text), max_tokens=None
    )
    one, two = (tiny_tokenizer().encode(each) for each in ("One ", " two "))
    expected = [*one, *TWO, *two, PLACEHOLDER, END, *TWO]
    assert source.prompt_token_ids == expected
    assert source.prompt == text
    (request,) = source.children
    assert request.prompt_token_ids == expected
    offsets = [(each.offset, each.length, each.embed_spans) for each in request.mm_features]
    begin = len(one)
    second = begin + 3 + len(two)
    assert offsets == [(begin, 3, [(0, 2)]), (second, 2, [(0, 1)]), (second + 2, 3, [(0, 2)])]
    assert {each.modality for each in request.mm_features} == {"image"}
    assert len({each.content_hash for each in request.mm_features}) == 3
    assert request.max_tokens == 512 - len(expected)


def test_ids_with_marks_and_one_image_without_a_list():
    prompt = {"prompt_token_ids": [9, MARK_ID, 9], "multi_modal_data": {"image": picture()}}
    assert process(prompt).prompt_token_ids == [9, *TWO, 9]
    wide = {**prompt, "mm_processor_kwargs": {"patch": 4}}
    assert process(wide).prompt_token_ids == [9, *[PLACEHOLDER] * 8, END, 9]


def test_sequences_of_a_request_share_what_was_made_of_its_images():
    source = process(with_images(picture()), n=3, temperature=1.0)
    first, *others = (child.mm_features for child in source.children)
    assert len(others) == 2
    assert all(each[0].inputs is first[0].inputs for each in others)


@pytest.mark.parametrize("data", [None, {}, {"image": None}, {"image": []}])
def test_prompts_without_images(data):
    source = process({"prompt": "One", "multi_modal_data": data})
    assert source.prompt_token_ids == tiny_tokenizer().encode("One")
    assert source.children[0].mm_features == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([1], "type list"),
        ({"images": []}, "Did you mean 'image'"),
        ({"video": []}, "unknown kind 'video'"),
        ({"image": ["?"]}, r"\['image'\]\[0\]: '\?' is no URL"),
    ],
)
def test_other_data_is_refused(data, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        process({"prompt": MARK, "multi_modal_data": data})
    assert caught.value.parameter.startswith("multi_modal_data")


@pytest.mark.parametrize(("marks", "count"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_b058_marks_and_images_are_counted_before_images_are_read(marks, count):
    with pytest.raises(InvalidRequestError, match=f"{marks} image marks .* {count} images"):
        process(with_images(*[b"?"] * count, prompt="a" + MARK * marks))


def test_the_length_counts_placeholders():
    by = processor(max_model_len=10_000)
    large = picture(8 * 22, 8 * 23)
    assert len(process(with_images(large), by).prompt_token_ids) == 507
    with pytest.raises(ContextLengthExceededError, match="512 tokens"):
        process({"prompt_token_ids": [9] * 5 + [MARK_ID], "multi_modal_data": {"image": large}}, by)


def test_a_prompt_with_images_is_not_cut():
    with pytest.raises(InvalidRequestError) as caught:
        process(with_images(picture()), truncate_prompt_tokens=5)
    assert caught.value.parameter == "truncate_prompt_tokens"
    assert len(process("One two three", truncate_prompt_tokens=2).prompt_token_ids) == 2


def test_a_model_without_images_refuses_them():
    plain = InputProcessor(engine_config(), tiny_tokenizer(), (2,))
    with pytest.raises(InvalidRequestError, match="takes no images"):
        process(with_images(as_file(picture())), plain)
    assert process({"prompt": MARK}, plain).prompt_token_ids == [MARK_ID]  # an id like any


def test_a_model_that_pools_refuses_them():
    config = engine_config(runner="pooling")
    pooling = PoolingProcessor(config, tiny_tokenizer(), (2,))
    with pytest.raises(InvalidRequestError, match="takes no images"):
        pooling.process("id", with_images(picture()), PoolingParams())
