"""Images of prompts: names of contents, what is kept, limits, and their places among the ids."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import (
    END,
    MARK_ID,
    PLACEHOLDER,
    TinyProcessor,
    as_file,
    data_url,
    picture,
    tiny_images,
)
from tokenmill.errors import ContextLengthExceededError, InvalidRequestError
from tokenmill.features.multimodal.decoding import MAX_FILE_BYTES
from tokenmill.features.multimodal.hashing import image_digest, typed_digest
from tokenmill.features.multimodal.images import ImagePart
from tokenmill.features.multimodal.limits import MAX_PROMPT_BYTES


def prepare(images, *sources, **options):
    return images.prepare_all(sources, images.options(options), "multi_modal_data['image']")


def test_every_kind_of_source_is_the_same_image(tmp_path):
    image = picture()
    data = as_file(image)
    (tmp_path / "a.png").write_bytes(data)
    images = tiny_images(local_path=str(tmp_path))
    sources = [
        image,
        np.asarray(image),
        data,
        bytearray(data),
        tmp_path / "a.png",
        data_url(data),
        data_url(data).replace("data:", "DATA:"),
        f"file://{tmp_path}/a.png",
    ]
    prepared = prepare(images, *sources)
    assert len({each.content_hash for each in prepared}) == 1
    (first, *_) = prepared
    assert first.token_ids == [PLACEHOLDER] * 2 + [END]
    assert first.embed_spans == [(0, 2)]
    pixels = first.inputs["pixels"]
    assert (pixels.dtype, pixels.shape) == ("float32", (8, 16))
    expected = np.asarray(image).mean(axis=2, dtype=np.float32)
    assert pixels.data == expected.tobytes()


def test_b117_fields_of_a_digest_cannot_be_shifted():
    lists = [
        ("asb",),  # like the next two, were there no lengths
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        (b"ab", b"c"),
        (b"ab", "c"),
        (1, 2),
        (12,),
        ("1", "2"),
        ("1", 2),
        (),
        ("",),
    ]
    assert len({typed_digest(*each) for each in lists}) == len(lists)


def test_b117_the_same_bytes_of_another_shape_mode_or_palette():
    pixels = bytes(range(48))
    red, blue = [255, 0, 0] * 256, [0, 0, 255] * 256
    images = [
        Image.frombytes("RGB", (4, 4), pixels),
        Image.frombytes("RGB", (8, 2), pixels),
        Image.frombytes("RGB", (2, 8), pixels),
        Image.frombytes("L", (12, 4), pixels),
        Image.frombytes("L", (4, 12), pixels),
        Image.frombytes("CMYK", (4, 3), pixels),
        Image.frombytes("YCbCr", (4, 4), pixels),
        Image.frombytes("RGBA", (4, 3), pixels),
    ]
    for palette in (red, blue):
        images.append(Image.frombytes("P", (12, 4), pixels))
        images[-1].putpalette(palette)
    assert len({image_digest(each, "tiny", {}) for each in images}) == len(images)
    prepared = prepare(tiny_images(), *images)
    assert len({each.content_hash for each in prepared}) == len(images)


def test_b117_options_and_the_processor_are_part_of_the_name():
    image = picture()
    images = tiny_images()
    (plain,), (fine,) = prepare(images, image), prepare(images, image, patch=4)
    assert plain.content_hash != fine.content_hash
    assert len(fine.token_ids) == 9
    digests = {image_digest(image, who, {}) for who in ("tiny", "other")}
    assert len(digests) == 2
    assert image_digest(image, "a", {"b": 1, "c": 2}) == image_digest(image, "a", {"c": 2, "b": 1})
    assert image_digest(image, "a", {"b": 1}) != image_digest(image, "a", {"b": "1"})


def test_options_of_the_engine_hold_unless_a_request_has_its_own():
    images = tiny_images(processor_options={"patch": 4})
    assert len(prepare(images, picture())[0].token_ids) == 9
    assert len(prepare(images, picture(), patch=8)[0].token_ids) == 3


@pytest.mark.parametrize("options", [{"size": 4}, {"Patch": 4}])
def test_unknown_options_are_refused(options):
    with pytest.raises(InvalidRequestError, match="unknown option") as caught:
        prepare(tiny_images(), picture(), **options)
    assert caught.value.parameter == "mm_processor_kwargs"


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "options",
    [[1], "patch", {"patch": object()}, {1: 2, "a": 3}, {"a": float("nan")}, nested(100_000)],
    ids=["list", "text", "object", "keys", "nan", "deep"],
)
def test_options_that_are_no_object_of_json_are_refused(options):
    with pytest.raises(InvalidRequestError) as caught:
        tiny_images().options(options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_what_was_prepared_is_not_prepared_again():
    processor = TinyProcessor()
    images = tiny_images(processor=processor)
    data = as_file(picture())
    for source in (data, data, data_url(data), picture(), as_file(picture(), "BMP")):
        prepare(images, source)
    assert processor.num_processed == 1
    assert (images.num_queries, images.num_hits) == (5, 4)
    prepare(images, data, patch=4)
    assert processor.num_processed == 2
    prepared = prepare(images, data)
    assert prepare(images, *prepared) == prepared
    assert (images.num_queries, images.num_hits) == (7, 5)


def test_the_oldest_goes_when_the_room_is_used_up():
    processor = TinyProcessor()
    size = prepare(tiny_images(), picture())[0].num_bytes
    images = tiny_images(processor=processor, cache_bytes=2 * size)
    first, second, third = (as_file(picture(seed=seed)) for seed in range(3))
    prepare(images, first, second, first, third)  # the second is the oldest
    assert processor.num_processed == 3
    prepare(images, first, third)
    assert processor.num_processed == 3
    prepare(images, second)
    assert processor.num_processed == 4


def test_nothing_is_kept_without_room():
    processor = TinyProcessor()
    images = tiny_images(processor=processor, cache_bytes=0)
    prepare(images, picture(), picture())
    assert (processor.num_processed, images.num_hits) == (2, 0)


def test_b116_items_of_a_prompt_are_counted():
    images = tiny_images(max_images=2)
    assert len(prepare(images, picture(), picture())) == 2
    with pytest.raises(InvalidRequestError, match="3 images, but a prompt takes 2") as caught:
        prepare(images, picture(), picture(), picture())
    assert "limit_mm_per_prompt" in str(caught.value)
    with pytest.raises(InvalidRequestError, match="takes 0"):
        prepare(tiny_images(max_images=0), picture())


def test_b116_bytes_of_a_prompt_are_counted(monkeypatch):
    monkeypatch.setattr("tokenmill.features.multimodal.limits.MAX_PROMPT_BYTES", 1000)
    data = as_file(picture(8, 8))
    assert 200 < len(data) < 333
    prepare(tiny_images(), data, data, data)
    with pytest.raises(InvalidRequestError, match=r"\[.*\]\[\d\]: .* 1000 bytes"):
        prepare(tiny_images(), *[data] * 5)


def test_b116_of_a_prompt_s_last_file_no_more_is_fetched_than_is_left():
    limits = tiny_images().limits()
    assert limits.file_bytes == MAX_FILE_BYTES
    limits.take_file(MAX_PROMPT_BYTES - 10)
    assert limits.file_bytes == 10


def test_b114_sizes_out_of_range_name_the_image():
    with pytest.raises(InvalidRequestError) as caught:
        prepare(tiny_images(), picture(), picture(1, 2000))
    assert caught.value.parameter == "multi_modal_data['image'][1]"
    assert str(caught.value) == "multi_modal_data['image'][1]: 1 x 2000 is too narrow."
    part = ImagePart(b"?", "messages[0].content[1].image_url")
    with pytest.raises(InvalidRequestError) as caught:
        prepare(tiny_images(), part)
    assert caught.value.parameter == part.where


def test_b114_an_image_that_cannot_fit_is_refused_before_it_is_processed():
    processor = TinyProcessor()
    images = tiny_images(processor=processor, max_model_len=100)
    with pytest.raises(ContextLengthExceededError, match="101 tokens"):
        prepare(images, picture(80, 80))
    assert processor.num_processed == 0
    with pytest.raises(ContextLengthExceededError, match="130 tokens"):
        prepare(images, picture(64, 64), picture(64, 64))


def test_b114_an_image_that_the_engine_never_has_room_for():
    images = tiny_images(max_embeds=3)
    assert len(prepare(images, picture(24, 8))[0].token_ids) == 4
    with pytest.raises(InvalidRequestError, match=r"\[0\]: the image has 4 embeddings.*_size=3"):
        prepare(images, picture(32, 8))


@pytest.mark.parametrize("source", [None, 3, ["a"], {"url": "a"}])
def test_other_types_are_refused(source):
    with pytest.raises(InvalidRequestError, match=f"type {type(source).__name__}"):
        prepare(tiny_images(), source)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        prepare(tiny_images(), tmp_path / "none.png")
    with pytest.raises(InvalidRequestError, match="no plain file"):
        prepare(tiny_images(), tmp_path)


def test_marks_become_placeholders_in_their_places():
    images = tiny_images()
    small, large = prepare(images, picture(8, 8), picture(24, 8))
    ids, features = images.expand([9, MARK_ID, MARK_ID, 9, 9], [large, small])
    assert ids == [9, 5, 5, 5, 6, 5, 6, 9, 9]
    assert [(each.offset, each.length) for each in features] == [(1, 4), (5, 2)]
    assert [each.embed_spans for each in features] == [[(0, 3)], [(0, 1)]]
    assert [each.content_hash for each in features] == [large.content_hash, small.content_hash]
    assert images.expand([9, 8], []) == ([9, 8], [])


@pytest.mark.parametrize("marks", [0, 1, 3])
def test_b058_marks_and_images_must_be_as_many(marks):
    images = tiny_images()
    prepared = prepare(images, picture(), picture())
    with pytest.raises(InvalidRequestError, match=f"{marks} image marks .* but 2 images"):
        images.expand([MARK_ID] * marks, prepared)


def test_several_threads_at_once():
    images = tiny_images(cache_bytes=2000)
    sources = [as_file(picture(seed=seed)) for seed in range(6)]
    expected = [each.content_hash for each in prepare(tiny_images(), *sources)]
    found = [None] * 8

    def work(number):
        found[number] = [each.content_hash for _ in range(5) for each in prepare(images, *sources)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected * 5] * 8
    assert images.num_queries == 8 * 5 * 6
