"""Our processors against transformers' own on numpy and pillow: the same pixels, bit by bit, and
the same run of tokens.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import transformers

from helpers.vision_families import VISION_FAMILIES, VisionFamily
from helpers.vision_models import (
    family_of,
    files_of,
    picture,
    processor_of,
    reference,
    reference_pixels,
    reference_processor,
    tokenizer_of,
)
from tokenmill.checkpoint.nested_config import flat_config
from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.features.multimodal.processing import make_image_processor, takes_images

SIZES = [(64, 48), (48, 64), (30, 30), (33, 97), (300, 20), (7, 5), (131, 77), (1, 1)]

over_families = pytest.mark.parametrize("family", VISION_FAMILIES, ids=lambda family: family.name)
over_tiled = pytest.mark.parametrize("name", ["smolvlm", "idefics3"])


def pixels_of(inputs: dict[str, np.ndarray]) -> np.ndarray:
    """What the model makes of the bytes: float32 [images, 3, height, width]."""
    levels, values = inputs["pixels"], inputs["channel_values"]
    return np.stack([values[channel][levels[..., channel]] for channel in range(3)], axis=1)


@over_families
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_are_transformers(family: VisionFamily, size: tuple[int, int]) -> None:
    image = picture(*size)
    processor = processor_of(family.name)
    processed = processor.process(image, {})
    np.testing.assert_array_equal(pixels_of(processed.inputs), reference_pixels(family.name, image))
    assert len(processed.token_ids) == processor.num_tokens(*size, {})
    assert all(array.flags.c_contiguous for array in processed.inputs.values())
    assert processed.inputs["pixels"].dtype == np.uint8


@over_families
def test_the_image_s_token(family: VisionFamily) -> None:
    processor = processor_of(family.name)
    assert takes_images(family.architecture)
    image_token_id = reference(family.name).config.image_token_id
    assert (processor.mark_token_id == image_token_id) == (not family.mark)
    assert processor.mark_token == (family.mark or family.special_tokens[0])
    assert processor.mark_token_id == tokenizer_of(family.name).token_to_id(processor.mark_token)
    assert processor.mark_text.count(processor.mark_token) == 1
    processed = processor.process(picture(40, 30), {})
    for start, count in processed.embed_spans:
        assert set(processed.token_ids[start : start + count]) == {image_token_id}


@over_tiled
@pytest.mark.parametrize("options", [{}, {"do_image_splitting": False}], ids=str)
@pytest.mark.parametrize("size", SIZES[:-1], ids=str)
def test_tiles_and_the_tokens_between_them(
    name: str, size: tuple[int, int], options: dict[str, Any]
) -> None:
    """The text that transformers writes for an image, by the same tokenizer."""
    image = picture(*size)
    theirs = reference_processor(name)(
        image, return_tensors="np", return_row_col_info=True, **options
    )
    processed = processor_of(name).process(image, options)
    module = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    text = module.get_image_prompt_string(
        theirs["rows"][0][0],
        theirs["cols"][0][0],
        image_seq_len=4,
        fake_token_around_image="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
    )
    assert processed.token_ids == tokenizer_of(name).encode(text).ids
    np.testing.assert_array_equal(pixels_of(processed.inputs), theirs["pixel_values"][0])
    mark = processor_of(name).mark_token_id
    found = [i for span in processed.embed_spans for i in range(span[0], sum(span))]
    assert found == [i for i, each in enumerate(processed.token_ids) if each == mark]


def test_a_size_of_a_request() -> None:
    processor = processor_of("smolvlm")
    image = picture(64, 48)
    small = {"size": {"longest_edge": 28}}
    wanted = reference_processor("smolvlm")(image, return_tensors="np", **small)
    np.testing.assert_array_equal(
        pixels_of(processor.process(image, small).inputs), wanted["pixel_values"][0]
    )
    assert processor.num_tokens(64, 48, small) < processor.num_tokens(64, 48, {})


@pytest.mark.parametrize(
    ("class_name", "kind", "settings"),
    [
        ("clip.image_processing_pil_clip:CLIPImageProcessorPil", "clip", {"size": 41}),
        (
            "clip.image_processing_pil_clip:CLIPImageProcessorPil",
            "clip",
            {"size": {"height": 36, "width": 33}, "resample": 2, "image_std": [0.5, 0.4, 0.3]},
        ),
        (
            "clip.image_processing_pil_clip:CLIPImageProcessorPil",
            "clip",
            {"size": {"shortest_edge": 21}, "do_normalize": False},  # smaller than the middle
        ),
        (
            "llava.image_processing_pil_llava:LlavaImageProcessorPil",
            "clip",
            {"size": {"shortest_edge": 30}, "do_pad": True, "rescale_factor": 0.002},
        ),
        (
            "siglip.image_processing_pil_siglip:SiglipImageProcessorPil",
            "siglip",
            {"size": {"height": 30, "width": 30}, "do_rescale": False},
        ),
    ],
)
def test_other_settings_of_llava(class_name: str, kind: str, settings: dict[str, Any]) -> None:
    module, _, name = class_name.partition(":")
    found = importlib.import_module(f"transformers.models.{module}")
    crop = {"crop_size": {"height": 30, "width": 30}} if kind == "clip" else {}
    theirs = getattr(found, name)(**settings, **crop)
    ours = processor_of(
        "llava" if kind == "clip" else "llava-siglip",
        **{**theirs.to_dict(), **settings, **crop, "image_processor_type": name},
    )
    for size in SIZES:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np")["pixel_values"]
        np.testing.assert_allclose(
            pixels_of(ours.process(image, {}).inputs), wanted, atol=1e-6, rtol=1e-6
        )


@over_families
def test_a_directory_without_settings_goes_by_the_tower(family: VisionFamily) -> None:
    files = files_of(family.name)
    bare = type(files)(files.hf_config, {}, {}, files.token_id, files.encode)
    processor = make_image_processor(family.architecture, bare)
    processed = processor.process(picture(64, 48), {})
    assert sum(count for _, count in processed.embed_spans) > 0


@over_families
def test_what_is_refused(family: VisionFamily) -> None:
    processor = processor_of(family.name)
    with pytest.raises(InvalidRequestError, match="unknown option 'do_image_spliting'"):
        processor.num_tokens(30, 30, {"do_image_spliting": True})
    for refused in (lambda: processor.num_tokens(1000, 4, {}), narrow_image(processor)):
        with pytest.raises(InvalidRequestError, match="at most 200 times as long"):
            refused()


def narrow_image(processor: Any) -> Any:
    return lambda: processor.process(picture(3, 700), {})


@pytest.mark.parametrize(
    "options",
    [{}, {"crop_to_patches": False}, {"max_patches": 3}, {"min_patches": 3, "max_patches": 4}],
    ids=str,
)
@pytest.mark.parametrize("size", [*SIZES[:-1], (56, 28), (28, 28), (90, 30), (500, 490)], ids=str)
def test_grids_of_tiles(size: tuple[int, int], options: dict[str, Any]) -> None:
    image = picture(*size)
    processor, tokenizer = processor_of("internvl"), tokenizer_of("internvl")
    processed = processor.process(image, options)
    theirs = reference_processor("internvl")(image, return_tensors="np", **options)
    np.testing.assert_array_equal(pixels_of(processed.inputs), theirs["pixel_values"])
    marks = "<IMG_CONTEXT>" * (4 * int(theirs["num_patches"][0]))
    assert processed.token_ids == tokenizer.encode(f"<img>{marks}</img>").ids
    assert processor.num_tokens(*size, options) == len(processed.token_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_to_patches": 1}, "crop_to_patches is 1, but must be true or false"),
        ({"max_patches": 7}, "max_patches is 7, but must be from 1 to 6"),
        ({"max_patches": True}, "max_patches is True"),
        ({"min_patches": 3, "max_patches": 2}, "min_patches is 3, but must be from 1 to 2"),
    ],
)
def test_numbers_of_tiles_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        processor_of("internvl").num_tokens(30, 30, options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize("settings", [{"size": {"height": 28, "width": 29}}, {"do_resize": False}])
def test_tiles_of_internvl_are_the_tower_s(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tower takes 28 x 28 pixels"):
        processor_of("internvl", **settings)


over_anyres = pytest.mark.parametrize("name", ["llava-next", "llava-onevision"])


@over_anyres
def test_how_many_tokens_images_of_any_shape_have(name: str) -> None:
    """transformers' arithmetic, with the resolutions that real models have."""
    is_next = name == "llava-next"
    config = transformers.LlavaNextConfig() if is_next else transformers.LlavaOnevisionConfig()
    kind = transformers.LlavaNextProcessor if is_next else transformers.LlavaOnevisionProcessor
    theirs = kind.__new__(kind)  # whose parts need packages that are of no use here
    theirs.image_processor = config  # has the resolutions
    if is_next:
        theirs.patch_size, theirs.num_additional_image_tokens = 14, 0
    else:
        theirs.num_image_tokens, theirs.vision_aspect_ratio = 729, config.vision_aspect_ratio
    side = config.vision_config.image_size
    settings = {"size": {"shortest_edge": side}}
    files = files_of(name)
    architecture = family_of(name).architecture
    flat = flat_config({**config.to_dict(), "architectures": [architecture]})
    ours = make_image_processor(
        architecture,
        type(files)(flat, settings, {}, files.token_id, files.encode),
    )
    generator = np.random.default_rng(5)
    for height, width in [(1, 1), (30, 2000), *generator.integers(20, 3000, (300, 2)).tolist()]:
        wanted = theirs._get_number_of_features(height, width, side, side)
        assert ours.num_tokens(width, height, {}) == wanted, (height, width)


@over_anyres
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"shortest_edge": 29}}, "tower takes 30 x 30"),
        ({"size": {"height": 30, "width": 31}}, "tower takes 30 x 30"),
        ({"do_center_crop": True, "crop_size": {"height": 30, "width": 29}}, "cut to"),
        ({"do_resize": False}, "tower takes 30 x 30"),
        ({"image_grid_pinpoints": [[30, 61]]}, "multiples of the tower's 30"),
        ({"image_grid_pinpoints": [[30, 60], 3]}, "must list heights and widths"),
        ({"image_grid_pinpoints": [[30, -60]]}, "must list heights and widths"),
        ({"image_grid_pinpoints": 30}, "must list heights and widths"),
    ],
    ids=str,
)
def test_tiles_are_the_tower_s(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_of(name, **settings)


def test_how_many_tiles_there_may_be() -> None:
    files = files_of("llava-onevision")
    config = {**files.hf_config, "vision_aspect_ratio": "square"}
    with pytest.raises(ConfigError, match="'square' is not supported; such as 'anyres_max_9'"):
        make_image_processor(
            "LlavaOnevisionForConditionalGeneration",
            type(files)(config, files.preprocessor_config, {}, files.token_id, files.encode),
        )


@over_anyres
def test_an_image_of_which_no_pixel_would_be_left_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="3 x 500 pixels, too narrow for the tiles"):
        processor_of(name).num_tokens(3, 500, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 42, "width": 40}}, "takes 42 x 42 pixels"),
        ({"do_resize": False}, "takes 42 x 42 pixels"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan is on"),
    ],
)
def test_gemma_3_takes_one_square(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_of("gemma3", **settings)


@pytest.mark.parametrize(("name", "square"), [("pixtral", 7), ("mistral3", 14)])
@pytest.mark.parametrize("options", [{}, {"size": {"longest_edge": 28}}], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_end_in_a_token(
    name: str, square: int, options: dict[str, Any], size: tuple[int, int]
) -> None:
    image = picture(*size)
    processor, tokenizer = processor_of(name), tokenizer_of(name)
    processed = processor.process(image, options)
    wanted = reference_pixels(name, image, **options)
    np.testing.assert_array_equal(pixels_of(processed.inputs), wanted)
    rows, columns = (edge // square for edge in wanted.shape[2:])
    text = (("[IMG]" * columns + "[IMG_BREAK]") * rows).removesuffix("[IMG_BREAK]") + "[IMG_END]"
    assert processed.token_ids == tokenizer.encode(text).ids
    assert processed.embed_spans == [(row * (columns + 1), columns) for row in range(rows)]
    assert processor.num_tokens(*size, options) == len(processed.token_ids)


@pytest.mark.parametrize("size", [28, {"longest_edge": 41}, {"longest_edge": 14, "height": 14}])
def test_sizes_that_cannot_be(size: object) -> None:
    with pytest.raises(InvalidRequestError, match="longest_edge': pixels}, at most 40") as caught:
        processor_of("pixtral").num_tokens(30, 30, {"size": size})
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"max_pixels": 512}, {"shortest_edge": 256, "longest_edge": 512}),
        ({"min_pixels": 1500}, {"shortest_edge": 1500, "longest_edge": 2048}),
        ({"size": {"longest_edge": 300}}, {"shortest_edge": 256, "longest_edge": 300}),
    ],
    ids=str,
)
def test_bounds_of_a_request(options: dict[str, Any], theirs: dict[str, int]) -> None:
    processor = processor_of("qwen2-vl")
    for size in SIZES:
        image = picture(*size)
        processed = processor.process(image, options)
        wanted = reference_pixels("qwen2-vl", image, size=theirs)
        np.testing.assert_array_equal(pixels_of(processed.inputs), wanted)
        assert len(processed.token_ids) == processor.num_tokens(*size, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixels": 0}, "max_pixels is 0, but must be pixels from 1 to 2048"),
        ({"max_pixels": 4096}, "from 1 to 2048"),
        ({"min_pixels": True}, "min_pixels is True"),
        ({"min_pixels": 1000, "max_pixels": 500}, "must be at most max_pixels, 500"),
        ({"size": 7}, "an object with shortest_edge"),
        ({"size": {"height": 7}}, "an object with shortest_edge"),
    ],
)
def test_bounds_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        processor_of("qwen2-vl").num_tokens(30, 30, options)
    assert caught.value.parameter == "mm_processor_kwargs"


@over_tiled
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_image_splitting": 1}, "do_image_splitting is 1, but must be true or false"),
        ({"size": 512}, "size is 512, but must be an object"),
        ({"size": {"longest_edge": 5000}}, "at most 4096"),
        ({"size": {"longest_edge": 0}}, "longest_edge"),
        ({"size": {"height": 56, "width": 56}}, "longest_edge"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        processor_of(name).process(picture(30, 30), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llava", {"crop_size": 28}, "makes images of 28 x 28 pixels .* tower takes 30 x 30"),
        ("llava", {"do_resize": False}, "tower takes 30 x 30"),
        ("llava", {"do_center_crop": False}, "tower takes 30 x 30"),
        ("llava", {"size": {"longest_edge": 30}}, "size is"),
        ("llava", {"image_mean": [0.5, 0.5]}, "image_mean is .* a list of 3"),
        ("llava", {"image_std": 0}, "image_std must not be 0"),
        ("llava", {"rescale_factor": "1/255"}, "rescale_factor is '1/255'"),
        ("llava", {"resample": 9}, "resample is 9"),
        ("llava-siglip", {"size": {"height": 28, "width": 28}}, "images of 28 x 28"),
        ("qwen2-vl", {"patch_size": 6}, "patch_size is 6, but the model's tower has patch_size=4"),
        ("smolvlm", {"max_image_size": {"longest_edge": 21}}, "max_image_size=21 makes 3 patches"),
    ],
)
def test_settings_that_cannot_be(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_of(name, **settings)


@pytest.mark.parametrize(
    ("name", "token"), [("smolvlm", "<fake_token_around_image>"), ("mistral3", "\\[IMG_BREAK]")]
)
def test_a_vocabulary_without_the_mark(name: str, token: str) -> None:
    files = files_of(name)
    bare = type(files)(
        files.hf_config, files.preprocessor_config, {}, lambda token: None, files.encode
    )
    with pytest.raises(ConfigError, match=f"no token '{token}'"):
        make_image_processor(family_of(name).architecture, bare)
