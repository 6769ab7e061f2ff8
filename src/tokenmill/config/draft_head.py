"""The head that drafts (EAGLE, EAGLE-3): whether it can for a model, and what memory it takes.

    EAGLE      Li et al., 2024, arXiv:2401.15077
    EAGLE-3    Li et al., 2025, arXiv:2503.01840

Names of tensors, as files have them and as they are here:

    midlayer.*    layers.0.*    model.layers.0.*    ->  layers.0.*
    embed_tokens.weight  fc.weight  norm.weight  lm_head.weight  d2t  t2d
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.nested_config import VISION_ARCHITECTURES
from tokenmill.config.dtypes import DTYPE_BYTES
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.memory import StepShape, kv_bytes_per_token, workspace_bytes
from tokenmill.config.parameters import ModelParameters, read_parameters
from tokenmill.config.quantization import held_weights
from tokenmill.config.speculation import DraftModel, SpeculativeConfig
from tokenmill.errors import ConfigError, shown

if TYPE_CHECKING:
    from tokenmill.config.draft_model import DraftFiles

TARGETS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "Phi3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
)
"""Architectures whose hidden states are handed out."""
_EMBEDDING = "embed_tokens.weight"
_MAPS = ("d2t", "t2d")
"""Tensors of integers and booleans: distances from a head's tokens to the model's, and which of the
model's tokens the head has."""
NUM_AUX_LAYERS = 3
_NOT_SERVED = ("norm_before_fc", "fc_norm", "norm_output", "add_para_norm")
"""Settings of variants that compute something else."""


def canonical_name(name: str) -> str:
    """The name here of a head's tensor."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def without_weights(method: str) -> tuple[str, ...]:
    """Tensors that are no weights of a head of this method: those of EAGLE come with a copy of the
    model's embedding, which they share here.
    """
    return (*_MAPS, _EMBEDDING) if method == "eagle" else _MAPS


def check_target(
    args: EngineArgs,
    speculation: SpeculativeConfig | None,
    target: ModelParameters,
    implementation: str,
) -> None:
    """Raise `ConfigError` if the engine's model or settings are not for a draft head."""
    if speculation is None or not speculation.reads_hidden_states:
        return
    method = f"speculative_config.method={speculation.method!r}"
    other = "take method='ngram' or 'suffix'"
    if target.architecture in VISION_ARCHITECTURES:
        raise ConfigError(
            f"{method} drafts for models of text alone, and {target.architecture} takes images:"
            f" {other}."
        )
    if implementation != "tokenmill" or target.architecture not in TARGETS:
        code = "" if implementation == "tokenmill" else f" on the code of {implementation}"
        raise ConfigError(
            f"{method} reads hidden states, which {target.architecture}{code} does not hand out:"
            f" {other}. These do: {', '.join(TARGETS)}."
        )
    if args.enable_lora:
        raise ConfigError(
            f"{method} drafts for the model without adapters, and enable_lora is on: {other}."
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(args, name) > 1:
            raise ConfigError(
                f"{method} runs beside a model in one process, and {name}={getattr(args, name)}:"
                f" {other}."
            )


def resolve_head(
    speculation: SpeculativeConfig,
    files: DraftFiles,
    target: ModelParameters,
    step: StepShape,
    *,
    dtype: str,
    kernels: str,
) -> SpeculativeConfig:
    """The settings of speculation with the head that drafts.

    Raises `ConfigError` for one that cannot draft for `target`.
    """
    assert speculation.model is not None
    if kernels == "triton":
        raise ConfigError(
            f"speculative_config.method={speculation.method!r}: heads draft on a CPU only so far;"
            f" on a GPU take method='draft_model' or 'ngram', or device='cpu'."
        )
    config = {"max_position_embeddings": target.max_context, **head_config(files.config)}
    try:
        parameters = read_parameters(config)
    except ConfigError as error:
        raise ConfigError(f"speculative_config.model={speculation.model!r}: {error}") from error
    shapes = {canonical_name(name): shape for name, shape in files.tensor_shapes.items()}
    formats = {canonical_name(name): format_ for name, format_ in files.tensor_formats.items()}
    _check_layout(speculation, config, shapes, target)
    aux_layers: tuple[int, ...] = ()
    if speculation.method == "eagle3":
        aux_layers = _aux_layers(speculation.model, config, target.num_layers)
    for name in without_weights(speculation.method):
        shapes.pop(name, None)
    weights = held_weights(shapes, formats, speculation.quantization, "cpu", dtype, kernels)
    states = max(len(aux_layers), 1) * target.hidden_size + 2 * parameters.hidden_size
    draft = DraftModel(
        path=files.path,
        architecture=parameters.architecture,
        hf_config=config,
        dtype=dtype,
        quantization=weights.quantization,
        max_model_len=min(parameters.max_context, step.max_model_len),
        vocab_size=parameters.vocab_size,
        num_bytes=weights.num_bytes
        + workspace_bytes(parameters, replace(step, max_num_drafts=0))
        + step.max_num_batched_tokens * states * DTYPE_BYTES[dtype],
        kv_bytes_per_token=kv_bytes_per_token(parameters, dtype),
        aux_layers=aux_layers,
    )
    return replace(speculation, draft=draft)


def is_head(tensor_shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether these are tensors of a draft head."""
    return any(canonical_name(name) == "fc.weight" for name in tensor_shapes)


def head_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A head's config.json with all that describes its layer at the top, as of a Llama.

    Some files have that in `transformer_layer_config` or `model`, and have then, if they do not
    say, `norm_before_residual`.
    """
    nested: dict[str, Any] = {}
    if isinstance(config.get("transformer_layer_config"), Mapping):
        nested = {"norm_before_residual": True, **config["transformer_layer_config"]}
    elif isinstance(config.get("model"), Mapping):
        nested = dict(config["model"])
    merged = {**nested, **config}
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if key in nested:
            merged[key] = nested[key]
    return merged | {"architectures": ["LlamaForCausalLM"]}


def _check_layout(
    speculation: SpeculativeConfig,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    target: ModelParameters,
) -> None:
    """Whether config and tensors are those of the method, for this target."""
    given = f"speculative_config.model={speculation.model!r}"
    if "fc.weight" not in shapes:
        raise ConfigError(
            f"{given} is no draft head: it has no tensor fc.weight. A whole model drafts with"
            f" speculative_config.method='draft_model'."
        )
    found = "eagle3" if "layers.0.hidden_norm.weight" in shapes else "eagle"
    if found != speculation.method:
        raise ConfigError(
            f"{given} is a head for speculative_config.method={found!r}, not"
            f" {speculation.method!r}."
        )
    if config.get("num_hidden_layers") != 1:
        raise ConfigError(
            f"{given} has num_hidden_layers={config.get('num_hidden_layers')!r}; heads of one layer"
            f" are served."
        )
    strange = [key for key in _NOT_SERVED if config.get(key)]
    if strange:
        raise ConfigError(f"{given} has {strange[0]}=true, a variant that is not served.")
    if config.get("vocab_size") != target.vocab_size:
        raise ConfigError(
            f"{given} drafts for a vocabulary of {config.get('vocab_size')} tokens, but the model"
            f" has {target.vocab_size}: it is a head of another model."
        )
    is_shared = found == "eagle" or _EMBEDDING not in shapes or "lm_head.weight" not in shapes
    if is_shared and config.get("hidden_size") != target.hidden_size:
        raise ConfigError(
            f"{given} has hidden states of {config.get('hidden_size')} values and shares the"
            f" model's vocabulary, whose rows have {target.hidden_size}: it is a head of another"
            f" model."
        )
    num_states = NUM_AUX_LAYERS if found == "eagle3" else 2
    due = (config.get("hidden_size"), num_states * target.hidden_size)
    if tuple(shapes["fc.weight"]) != due:
        raise ConfigError(
            f"{given} has fc.weight {tuple(shapes['fc.weight'])}, which must be {due} for hidden"
            f" states of {target.hidden_size} values: it is a head of another model."
        )
    rows = shapes.get("lm_head.weight", (target.vocab_size,))[:1]
    if not rows or not 0 < rows[0] <= target.vocab_size:
        raise ConfigError(
            f"{given} has lm_head.weight {tuple(shapes['lm_head.weight'])}, which must have a row"
            f" for each of its tokens, 1 to {target.vocab_size}."
        )


def _aux_layers(name: str, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of the target whose inputs are read: those that the config names, or else one near
    the beginning, one in the middle, and one near the end.
    """
    eagle_config = config.get("eagle_config")
    nested = eagle_config if isinstance(eagle_config, Mapping) else {}
    if nested.get("use_aux_hidden_state", True) is False:
        raise ConfigError(
            f"speculative_config.model={name!r} has use_aux_hidden_state=false, a variant that is"
            f" not served."
        )
    key = "eagle_aux_hidden_state_layer_ids"
    chosen = config.get(key, nested.get(key))
    if chosen is None:
        chosen = (2, num_layers // 2, num_layers - 3)
    if (
        not isinstance(chosen, Sequence)
        or len(chosen) != NUM_AUX_LAYERS
        or not all(type(each) is int and 0 <= each < num_layers for each in chosen)
    ):
        raise ConfigError(
            f"speculative_config.model={name!r} reads the inputs of the layers {shown(chosen)};"
            f" they must be {NUM_AUX_LAYERS} of 0 to {num_layers - 1}, the model's own. Set {key}"
            f" in the head's config.json."
        )
    return tuple(chosen)
