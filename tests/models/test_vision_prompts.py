"""Every family that takes images keeps to what prompts need of its processor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from helpers.pictures import as_file, picture
from helpers.tiny_text import CHATML, tiny_tokenizer
from helpers.vision_families import VISION_FAMILIES, VisionFamily
from helpers.vision_models import reference_processor, saved, tokenizer_of
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.engine_args import EngineArgs
from tokenmill.engine import build
from tokenmill.engine.input_processor import InputProcessor
from tokenmill.entrypoints.chat.render import render_chat
from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.sampling_params import SamplingParams

SIZES = [(1, 1), (2, 3), (40, 30), (33, 70), (97, 41), (1, 400), (400, 1), (150, 150)]


@pytest.fixture(scope="module", params=VISION_FAMILIES, ids=lambda family: family.name)
def front(request: pytest.FixtureRequest) -> InputProcessor:
    family: VisionFamily = request.param
    return front_end(family.name)


def front_end(model: str | Path, **settings: Any) -> InputProcessor:
    path = model if isinstance(model, Path) else saved(model)
    args = EngineArgs(model=str(path), num_kv_blocks=64, device="cpu", **settings)
    checkpoint = open_checkpoint(path)
    config = build.settle_config(args, checkpoint)
    tokenizer = build.read_tokenizer(args, checkpoint)
    return build.build_front_end(args, checkpoint, config, tokenizer).input_processor


def test_marks(front: InputProcessor) -> None:
    images, tokenizer = front.images, front._tokenizer
    assert images is not None
    assert tokenizer is not None
    assert tokenizer.token_to_id(images.mark_token) == images.mark_token_id
    ids = tokenizer.encode(images.mark_text, add_special_tokens=False)
    assert ids.count(images.mark_token_id) == 1


@pytest.mark.parametrize("size", SIZES)
def test_b114_every_size_is_taken_or_refused(front: InputProcessor, size: tuple[int, int]) -> None:
    images = front.images
    assert images is not None
    processor = images._processor
    image = picture(*size)
    try:
        count = processor.num_tokens(*size, {})
    except InvalidRequestError:
        with pytest.raises(InvalidRequestError):
            processor.process(image, {})
        with pytest.raises(InvalidRequestError, match=r"\['image'\]\[0\]"):
            images.prepare_all([image], {}, "multi_modal_data['image']")
        return
    processed = processor.process(image, {})
    assert len(processed.token_ids) == count > 0
    assert max(processed.token_ids) < front._vocab_size
    end = 0
    for start, length in processed.embed_spans:
        assert start >= end
        assert length > 0
        end = start + length
    assert 0 < end <= count
    assert all(array.flags.c_contiguous for array in processed.inputs.values())


@pytest.mark.parametrize("text", ["a{}b", "a\n{}\n\nb {}", "{}{}", "\n\n {} \n{}\n", "<s>{}"])
def test_line_breaks_around_images_of_gemma_3_are_tokens_of_the_text(text: str) -> None:
    """transformers' ids of a prompt, by the same tokenizer."""
    boi, eoi, soft = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("gemma3"),
        extra_special_tokens={"boi_token": boi, "eoi_token": eoi, "image_token": soft},
    )
    processor = transformers.Gemma3Processor(
        reference_processor("gemma3"), tokenizer, image_seq_length=9
    )
    prompt = text.format(*[boi] * text.count("{}"))
    images = [picture(40, 30, seed=seed) for seed in range(text.count("{}"))]
    wanted = processor(text=prompt, images=[images])
    given = {"prompt": prompt, "multi_modal_data": {"image": images}}
    found = front_end("gemma3").process("id", given, SamplingParams())
    assert found.prompt_token_ids == wanted["input_ids"][0]
    is_image = [
        any(
            begin <= place < end
            for each in found.children[0].mm_features
            for begin, end in each.runs
        )
        for place in range(len(found.prompt_token_ids))
    ]
    assert is_image == [bool(kind) for kind in wanted["token_type_ids"][0]]


def test_a_chat_of_strings_with_images_and_marks_of_users(front: InputProcessor) -> None:
    images, tokenizer = front.images, front._tokenizer
    assert images is not None
    assert tokenizer is not None
    sources = [as_file(picture(40, 30, seed=seed)) for seed in range(2)]
    first, second = ({"type": "image", "image": source} for source in sources)
    text = {"type": "text", "text": f"a {images.mark_token} b"}
    messages = [{"role": "user", "content": [first, text, second]}]
    rendered = render_chat(tokenizer, messages, chat_template=CHATML, images=images)
    prompt = {
        "prompt_token_ids": rendered.token_ids,
        "multi_modal_data": {"image": rendered.images},
    }
    source = front.process("id", prompt, SamplingParams())
    features = source.children[0].mm_features
    alone = images.prepare_all(sources, {}, "images")
    assert [each.content_hash for each in features] == [each.content_hash for each in alone]
    lengths = sum(each.length for each in features)
    assert len(source.prompt_token_ids) == len(rendered.token_ids) - 2 + lengths
    for feature, image in zip(features, alone, strict=True):
        begin, end = feature.offset, feature.offset + feature.length
        assert source.prompt_token_ids[begin:end] == image.token_ids


@pytest.mark.parametrize("options", [{"colour": 1}, {"size": object()}])
def test_options_of_an_engine_are_checked_when_it_is_built(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="mm_processor_kwargs"):
        front_end("smolvlm", mm_processor_kwargs=options)
    built = front_end("smolvlm", mm_processor_kwargs={"do_image_splitting": False})
    assert built.images is not None
    (whole,) = built.images.prepare_all([picture(150, 90)], built.images.options(None), "images")
    (tiles,) = built.images.prepare_all(
        [picture(150, 90)], built.images.options({"do_image_splitting": True}), "images"
    )
    assert len(whole.token_ids) < len(tiles.token_ids)


@pytest.mark.parametrize("missing", ["special", "preprocessor"])
def test_a_model_without_what_images_need_answers_texts(
    missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved("llava"), tmp_path, dirs_exist_ok=True)
    if missing == "preprocessor":
        (tmp_path / "preprocessor_config.json").write_text("[]")
    else:
        tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    built = front_end(tmp_path)
    assert built.images is None
    assert "takes no images" in caplog.text
    assert built.process("id", "One two", SamplingParams()).prompt_token_ids
    with pytest.raises(InvalidRequestError, match="takes no images"):
        built.process(
            "id", {"prompt": "a", "multi_modal_data": {"image": picture()}}, SamplingParams()
        )


def test_unknown_options_are_refused(front: InputProcessor) -> None:
    images = front.images
    assert images is not None
    with pytest.raises(InvalidRequestError) as caught:
        images.prepare_all([picture(40, 30)], images.options({"colour": 1}), "images")
    assert caught.value.parameter == "mm_processor_kwargs"
