"""Settings of the encoder of a model that takes images: how much in a step, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.checkpoint.nested_config import has_vision_tower, is_of_tower
from tokenmill.config.argument_types import at_least
from tokenmill.config.dtypes import DTYPE_BYTES
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EncoderConfig, MemoryLedger
from tokenmill.config.memory import StepShape
from tokenmill.config.parameters import ModelParameters, positive_int

KEPT_EMBEDS = {"cpu": 4_096, "cuda": 16_384}
"""Of a device, unless somebody sets another number. The largest image of the usual families has
16,384; attention among the patches of such a one takes a CPU longer than anybody waits."""


_RUNS_SEEN_WHOLE = {"Gemma3ForConditionalGeneration": ("mm_tokens_per_image", 256)}
"""Architectures in which an item's tokens see all of it; the key of its length, and the default."""


def undivided_tokens(args: EngineArgs, hf_config: Mapping[str, Any]) -> int:
    """Tokens of an item that a step has to take together; 0 where prompts may be cut anywhere."""
    read = _RUNS_SEEN_WHOLE.get(hf_config["architectures"][0])
    return 0 if read is None or not takes_images(args) else positive_int(hf_config, *read)


def resolve_encoder(
    args: EngineArgs,
    hf_config: Mapping[str, Any],
    implementation: str,
    device: str,
    step: StepShape,
) -> EncoderConfig | None:
    """The settings for a model with a tower beside its decoder; None for others, and where images
    are switched off. Raises `ConfigError` that names the setting.
    """
    if implementation != "tokenmill" or not has_vision_tower(hf_config) or not takes_images(args):
        return None
    most, size = args.max_num_encoder_input_tokens, args.encoder_cache_size
    if most is None:
        most = step.max_num_batched_tokens
    if size is None:
        size = max(min(step.max_model_len, KEPT_EMBEDS[device]), step.max_num_batched_tokens)
    return EncoderConfig(
        max_num_encoder_input_tokens=at_least("max_num_encoder_input_tokens", most, 1),
        encoder_cache_size=at_least("encoder_cache_size", size, 1),
        num_levels=len(hf_config["vision_config"].get("deepstack_visual_indexes") or ()),
        is_bidirectional=hf_config["architectures"][0] in _RUNS_SEEN_WHOLE,
    )


def takes_images(args: EngineArgs) -> bool:
    """Whether prompts may hold images, if the model takes any."""
    return args.limit_mm_per_prompt.get("image") != 0


def read_tensors(
    shapes: Mapping[str, tuple[int, ...]], hf_config: Mapping[str, Any], *, takes_images: bool
) -> Mapping[str, tuple[int, ...]]:
    """Those of a checkpoint's tensors that are read: without a tower where no images come."""
    if takes_images or not has_vision_tower(hf_config):
        return shapes
    return {name: shape for name, shape in shapes.items() if not is_of_tower(name)}


def with_encoder(
    ledger: MemoryLedger, encoder: EncoderConfig | None, parameters: ModelParameters, dtype: str
) -> MemoryLedger:
    """What is left beside the embeddings that are kept."""
    if encoder is None:
        return ledger
    num_values = encoder.encoder_cache_size * parameters.hidden_size * (1 + encoder.num_levels)
    return replace(ledger, encoder_cache=num_values * DTYPE_BYTES[dtype])
