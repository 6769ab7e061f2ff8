"""Whether a model generates or pools, and how it pools: `runner`, `convert`, `pooler_config`.

runner     auto, generate (tokens) or pooling (vectors and scores)
convert    auto, none, embed or classify: what a model is made into
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.sentence_transformers import SentenceModel, read_sentence_model
from tokenmill.config.argument_types import one_of
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import PoolingConfig
from tokenmill.config.parameters import ModelParameters
from tokenmill.errors import ConfigError, did_you_mean, shown

logger = logging.getLogger(__name__)

RUNNERS = ("auto", "generate", "pooling")
CONVERTS = ("auto", "none", "embed", "classify")
POOLING_TYPES = ("last", "cls", "mean")

CLASSIFIER = "ForSequenceClassification"
ENCODERS = ("Bert", "Roberta", "XLMRoberta")
"""Architectures that begin so attend in both directions."""
_BODY = "Model"
"""Ends the names of models without a head."""
_HEADED = "LMHeadModel"
_POOLER_KEYS = ("pooling_type", "seq_pooling_type", "use_activation", "normalize")
_ACTIVATIONS = ("identity", "sigmoid", "softmax")


def resolve_pooling(
    args: EngineArgs, hf_config: Mapping[str, Any], parameters: ModelParameters, path: str
) -> tuple[PoolingConfig | None, EngineArgs]:
    """How the model at `path` pools, None if it generates; and the settings that follow.

    Raises `ConfigError`, and `CheckpointError` for damaged files.
    """
    runner = one_of("runner", args.runner, RUNNERS)
    convert = one_of("convert", args.convert, CONVERTS)
    architecture = parameters.architecture
    can_generate = not architecture.endswith(CLASSIFIER) and (
        architecture.endswith(_HEADED) or not architecture.endswith(_BODY)
    )
    if runner == "generate" or (runner == "auto" and can_generate and convert == "none"):
        _check_generation(args, architecture, can_generate)
        return None, args
    sentence = read_sentence_model(Path(path))
    if runner == "auto" and can_generate and convert == "auto" and sentence is None:
        _check_generation(args, architecture, can_generate)
        return None, args
    if runner == "pooling" and can_generate and convert == "none":
        raise ConfigError(
            f"runner='pooling', but {architecture} generates, and convert='none' leaves it so; use"
            f" convert='embed' or 'classify'."
        )
    is_classifier = _is_classifier(architecture, convert)
    pooling = _pooling(args, hf_config, parameters, sentence, is_classifier)
    longest = parameters.max_context - position_offset(architecture, hf_config)
    return pooling, _settings(args, pooling, longest, sentence)


def num_labels(hf_config: Mapping[str, Any]) -> int:
    """Classes of a classifier; two, as in transformers, if its config does not say."""
    labels = hf_config.get("id2label")
    if isinstance(labels, Mapping) and labels:
        return len(labels)
    count = hf_config.get("num_labels", 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"config.json: num_labels is {shown(count)}, but must be at least 1.")
    return count


def is_encoder(architecture: str) -> bool:
    """Whether its tokens see those behind them."""
    return architecture.startswith(ENCODERS)


def position_offset(architecture: str, hf_config: Mapping[str, Any]) -> int:
    """Row of position 0 in the table of positions: RoBERTa leaves those up to its padding free."""
    if not architecture.startswith(ENCODERS[1:]):
        return 0
    padding = hf_config.get("pad_token_id")
    return 1 + (padding if isinstance(padding, int) else 1)


def _check_generation(args: EngineArgs, architecture: str, can_generate: bool) -> None:
    if not can_generate:
        raise ConfigError(
            f"runner='generate', but {architecture} has no head for tokens; use runner='pooling'."
        )
    if args.pooler_config:
        raise ConfigError(
            "pooler_config is for pooling models, and this engine generates; set runner='pooling'."
        )


def _is_classifier(architecture: str, convert: str) -> bool:
    if architecture.endswith(CLASSIFIER):
        if convert == "embed":
            raise ConfigError(
                f"convert='embed', but {architecture} is a classifier; use convert='auto'."
            )
        return True
    if convert == "classify" and is_encoder(architecture):
        raise ConfigError(
            f"convert='classify', but {architecture} has no classification head; use 'embed'."
        )
    return convert == "classify"


def _pooling(
    args: EngineArgs,
    hf_config: Mapping[str, Any],
    parameters: ModelParameters,
    sentence: SentenceModel | None,
    is_classifier: bool,
) -> PoolingConfig:
    given = _pooler_config(args.pooler_config)
    is_causal = not is_encoder(parameters.architecture)
    if hf_config.get("use_bidirectional_attention") or hf_config.get("is_causal") is False:
        raise ConfigError(
            f"config.json: {parameters.architecture} with attention in both directions is not"
            f" supported; these families have it: {', '.join(ENCODERS)}."
        )
    by_files = None if sentence is None or is_classifier else sentence.pooling_type
    pooling_type = given.get("pooling_type") or by_files or ("last" if is_causal else "cls")
    use_activation = given.get("use_activation")
    if use_activation is None:
        use_activation = is_classifier or sentence is None or sentence.is_normalized
    labels = num_labels(hf_config) if is_classifier else 0
    return PoolingConfig(
        tasks=("classify", "token_classify") if is_classifier else ("embed", "token_embed"),
        pooling_type=pooling_type,
        is_causal=is_causal,
        use_activation=use_activation,
        activation=_activation(hf_config, labels) if is_classifier else "normalize",
        size=labels or parameters.hidden_size,
        labels=_labels(hf_config, labels),
        is_matryoshka=bool(
            hf_config.get("is_matryoshka") or hf_config.get("matryoshka_dimensions")
        ),
        matryoshka_dimensions=_dimensions(hf_config, parameters.hidden_size),
    )


def _pooler_config(given: Mapping[str, Any]) -> dict[str, Any]:
    for key in given:
        if key not in _POOLER_KEYS:
            raise ConfigError(
                f"pooler_config has an unknown key {shown(key)}.{did_you_mean(key, _POOLER_KEYS)}"
                f" It takes: {', '.join(_POOLER_KEYS)}."
            )
    kind = given.get("pooling_type", given.get("seq_pooling_type"))
    if kind is not None:
        kind = one_of("pooler_config.pooling_type", str(kind).lower(), POOLING_TYPES)
    active = given.get("use_activation", given.get("normalize"))
    if active is not None and not isinstance(active, bool):
        raise ConfigError(f"pooler_config.use_activation={shown(active)} must be True or False.")
    return {"pooling_type": kind, "use_activation": active}


def _activation(hf_config: Mapping[str, Any], labels: int) -> str:
    """What a classifier's logits go through."""
    library = hf_config.get("sentence_transformers")
    named = library.get("activation_fn") if isinstance(library, Mapping) else None
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if named is not None:
        name = str(named).rpartition(".")[2].lower()
        return one_of("config.json: activation_fn", name, _ACTIVATIONS)
    problem = hf_config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def _labels(hf_config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    names = hf_config.get("id2label")
    names = names if isinstance(names, Mapping) else {}
    return tuple(str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(count))


def _dimensions(hf_config: Mapping[str, Any], hidden_size: int) -> tuple[int, ...]:
    given = hf_config.get("matryoshka_dimensions") or ()
    if not isinstance(given, list | tuple) or not all(
        isinstance(each, int) and 1 <= each <= hidden_size for each in given
    ):
        raise ConfigError(
            f"config.json: matryoshka_dimensions is {shown(given)}, but must be a list of integers"
            f" from 1 to hidden_size, {hidden_size}."
        )
    return tuple(given)


def _settings(
    args: EngineArgs,
    pooling: PoolingConfig,
    longest: int,
    sentence: SentenceModel | None,
) -> EngineArgs:
    """What pooling asks of the other settings.

    A prefix from the cache brings no hidden states, so only the last token's may do with it. An
    encoder's token sees the whole prompt, which is therefore computed in one step.
    """
    if args.kv_cache_dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype='int8' is for models that generate; use kv_cache_dtype='auto'."
        )
    changes: dict[str, Any] = {"runner": "pooling", "async_scheduling": False}
    if not pooling.is_causal:
        changes["enable_chunked_prefill"] = False
    if not pooling.is_causal or pooling.pooling_type != "last":
        changes["enable_prefix_caching"] = False
    if args.max_model_len is None:
        trained = sentence.max_seq_length if sentence is not None else None
        changes["max_model_len"] = min(trained or longest, longest)
    elif args.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={args.max_model_len} is more than the model's positions, {longest}."
        )
    chosen = [f"{k}={v}" for k, v in changes.items() if v != getattr(args, k)]
    logger.info("settings of a model that pools (%s): %s", pooling.pooling_type, ", ".join(chosen))
    return dataclasses.replace(args, **changes)
