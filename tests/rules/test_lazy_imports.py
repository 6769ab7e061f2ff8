"""What must not be loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HOST_MODULES = [
    "tokenmill",
    "tokenmill.sampling_params",
    "tokenmill.config.engine_args",
    "tokenmill.config.resolve",
    "tokenmill.core.scheduler",
    "tokenmill.core.build",
    "tokenmill.engine.async_llm",
    "tokenmill.engine.core",
    "tokenmill.engine.core_process",
    "tokenmill.engine.detokenizer",
    "tokenmill.engine.input_processor",
    "tokenmill.engine.output_processor",
    "tokenmill.features.multimodal.build",
    "tokenmill.features.multimodal.images",
    "tokenmill.tokenizer.tokenizer",
    "tokenmill.checkpoint.open",
    "tokenmill.entrypoints.cli.main",
    "tokenmill.entrypoints.simulated",
]


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", HOST_MODULES)
def test_host_modules_load_no_torch(module: str) -> None:
    assert "torch" not in loaded_after(f"import {module}")


def test_pillow_is_loaded_with_the_first_image() -> None:
    processors = ("llava", "idefics3", "pixtral", "qwen2_vl")
    package = "tokenmill.features.multimodal"
    modules = [f"{package}.images", *(f"{package}.processors.{each}" for each in processors)]
    loaded = loaded_after(f"import {', '.join(modules)}")
    assert not {"PIL", "torch"} & loaded


def test_public_names_are_lazy_and_real() -> None:
    loaded = loaded_after("import tokenmill\ntokenmill.SamplingParams\ntokenmill.RequestOutput")
    assert "tokenmill.sampling_params" in loaded
    assert "torch" not in loaded


def test_every_public_name_can_be_imported() -> None:
    import tokenmill

    for name in tokenmill.__all__:
        assert getattr(tokenmill, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = tokenmill.Nothing
