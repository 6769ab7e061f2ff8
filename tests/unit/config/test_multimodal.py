"""Settings of images."""

from __future__ import annotations

import pytest

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.multimodal import MultiModalConfig, resolve_multimodal
from tokenmill.errors import ConfigError


def test_what_holds_unless_somebody_sets_it():
    config = resolve_multimodal(EngineArgs())
    assert config.max_images == 16
    assert config.cache_bytes == MultiModalConfig().cache_bytes == 1 << 28
    assert config.max_image_pixels == 1 << 25
    assert (config.local_path, config.domains) == (None, ())


def test_settings(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    config = resolve_multimodal(
        EngineArgs(
            limit_mm_per_prompt={"image": 2},
            mm_processor_kwargs={"max_pixels": 5},
            mm_processor_cache_gb=0.5,
            allowed_local_media_path=str(tmp_path / "link"),
            allowed_media_domains=[" Images.example ", "*.a.example:8443", "*"],
        )
    )
    assert (config.max_images, config.cache_bytes) == (2, 1 << 29)
    assert config.processor_options == {"max_pixels": 5}
    assert config.local_path == str(tmp_path)
    assert config.domains == ("images.example", "*.a.example:8443", "*")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit_mm_per_prompt", {"images": 1}),
        ("limit_mm_per_prompt", {"image": -1}),
        ("limit_mm_per_prompt", {"image": True}),
        ("limit_mm_per_prompt", {"image": "2"}),
        ("mm_processor_cache_gb", -1),
        ("mm_processor_cache_gb", float("nan")),
        ("max_image_pixels", 0),
        ("max_image_pixels", 1 << 28),
        ("allowed_local_media_path", "/no/such/directory"),
        ("allowed_local_media_path", __file__),
        ("allowed_media_domains", ["http://a.example"]),
        ("allowed_media_domains", ["a.example/b"]),
        ("allowed_media_domains", ["a.*.example"]),
        ("allowed_media_domains", ["*example"]),
        ("allowed_media_domains", [""]),
        ("allowed_media_domains", [5]),
    ],
)
def test_b118_what_cannot_work_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        resolve_multimodal(EngineArgs(**{name: value}))
