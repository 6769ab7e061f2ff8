"""Settings of several processes for one model: what they may be, and what the largest rank has."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from tokenmill.checkpoint.nested_config import (
    DECODER_ARCHITECTURE,
    VISION_ARCHITECTURES,
    is_of_tower,
)
from tokenmill.config.argument_types import at_least, one_of
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.machine import Machine
from tokenmill.config.parallel import ParallelConfig, stage_layers
from tokenmill.config.parameters import ModelParameters
from tokenmill.errors import ConfigError, shown

logger = logging.getLogger(__name__)

BACKENDS = ("uni", "mp", "ray")
"""What `distributed_executor_backend` may be."""
VOCAB_ALIGNMENT = 32
"""Tokens of a vocabulary that stay together (`parallel/shares.py`)."""
GROUP_SIZE = 32
"""Values that share a scale (`kernels/gemm.py`)."""

DIVIDED = frozenset(
    (
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
        "Olmo2ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM",
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    )
)  # fmt: skip
"""Architectures whose layers can be divided among ranks."""
UNDIVIDED: Mapping[str, str] = {
    "GPT2LMHeadModel": "its queries, keys and values are one matrix that is not divided yet",
    "BambaForCausalLM": "its states are not divided yet",
    "Mamba2ForCausalLM": "its states are not divided yet",
}
"""Other decoders, which run in one process, and why. So do encoders."""
_OTHER_ENDINGS = (
    "TextForSequenceClassification",
    "ForSequenceClassification",
    "TextModel",
    "Model",
)
"""Of names that end in `ForCausalLM` where there is a head for tokens."""


def resolve_parallel(
    args: EngineArgs,
    hf_config: Mapping[str, Any],
    parameters: ModelParameters,
    implementation: str,
    device: str,
) -> ParallelConfig:
    """How the model is divided. Raises `ConfigError` that names the setting for what cannot be."""
    parallel = parallel_config(args)
    if parallel.node_rank:
        raise ConfigError(
            f"node_rank={parallel.node_rank}: the server is on machine 0; start this machine's"
            f" ranks with `tokenmill serve --headless`."
        )
    if parallel.world_size == 1:
        return parallel
    _check_features(args, device)
    _check_family(hf_config, parameters.architecture, implementation, parallel)
    _check_sizes(hf_config, parameters, parallel)
    return parallel


def parallel_config(args: EngineArgs) -> ParallelConfig:
    """How any model would be divided. Raises `ConfigError` for settings that contradict each
    other.
    """
    parallel = ParallelConfig(
        tensor_parallel_size=at_least("tensor_parallel_size", args.tensor_parallel_size, 1),
        pipeline_parallel_size=at_least("pipeline_parallel_size", args.pipeline_parallel_size, 1),
        num_nodes=at_least("nnodes", args.nnodes, 1),
        node_rank=at_least("node_rank", args.node_rank, 0),
        master_addr=args.master_addr,
        master_port=at_least("master_port", args.master_port, 1),
    )
    _check_places(args, parallel)
    return parallel


def _check_places(args: EngineArgs, parallel: ParallelConfig) -> None:
    """Where the ranks run."""
    world_size, num_nodes = parallel.world_size, parallel.num_nodes
    ranks = (
        f"tensor_parallel_size={parallel.tensor_parallel_size} and"
        f" pipeline_parallel_size={parallel.pipeline_parallel_size}"
    )
    if args.distributed_executor_backend is not None:
        backend = one_of(
            "distributed_executor_backend", args.distributed_executor_backend, BACKENDS
        )
        if backend == "ray":
            _check_ray(args, ranks, world_size)
        if backend == "uni" and world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend='uni' is one process, but {ranks} need"
                f" {world_size}; leave it out, or take 'mp'."
            )
    if world_size % num_nodes:
        raise ConfigError(
            f"nnodes={num_nodes} machines cannot have equal parts of the {world_size} ranks of"
            f" {ranks}; take a number of machines that divides them."
        )
    if parallel.node_rank >= num_nodes:
        raise ConfigError(
            f"node_rank={parallel.node_rank} must be less than nnodes={num_nodes}; machines are"
            f" counted from 0."
        )
    if parallel.master_port > 65_535:
        raise ConfigError(f"master_port={parallel.master_port} must be at most 65535.")
    if num_nodes > 1 and args.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={args.data_parallel_size} with nnodes={num_nodes} is not"
            f" supported; start a server on each set of machines, and route among them."
        )


def _check_ray(args: EngineArgs, ranks: str, world_size: int) -> None:
    """What Ray has no part in."""
    given = "distributed_executor_backend='ray'"
    if world_size == 1:
        raise ConfigError(
            f"{given} places several processes, but {ranks} need one only; leave it out."
        )
    if args.node_rank:
        raise ConfigError(
            f"{given} starts the ranks of all machines, but node_rank={args.node_rank}; start the"
            f" server only, and leave node_rank out."
        )
    if args.data_parallel_size > 1:
        raise ConfigError(
            f"{given} with data_parallel_size={args.data_parallel_size} is not supported; start"
            f" several servers, and route among them."
        )


def _check_features(args: EngineArgs, device: str) -> None:
    """What one process can do and several cannot yet."""
    given = f"tensor_parallel_size={args.tensor_parallel_size}"
    if args.tensor_parallel_size == 1:
        given = f"pipeline_parallel_size={args.pipeline_parallel_size}"
    if device != "cpu":
        raise ConfigError(
            f"{given} runs on a CPU only so far: sums over NCCL would depend on the batch, and"
            f" nobody has run it. Use device='cpu', or data_parallel_size for several GPUs."
        )
    if args.kv_transfer_config or args.kv_offload_dir or args.kv_offload_gb:
        raise ConfigError(
            f"{given} with KV offload or KV transfer is not supported: blocks are divided among"
            f" ranks. Leave kv_transfer_config, kv_offload_gb and kv_offload_dir out."
        )
    has_draft = args.spec_model or (args.speculative_config or {}).get("model")
    if has_draft and args.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={args.pipeline_parallel_size} with a model that drafts is not"
            f" supported: the other stages would wait for it. Use tensor_parallel_size, or take"
            f" speculative_config.method='ngram' or 'suffix'."
        )


def _check_family(
    hf_config: Mapping[str, Any], architecture: str, implementation: str, parallel: ParallelConfig
) -> None:
    """Whether the model's code can be divided."""
    sizes = {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
    }
    setting = next(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if implementation != "tokenmill":
        raise ConfigError(
            f"{setting}: {architecture} runs on the code of {implementation}, which is not divided"
            f" here. Set {setting.partition('=')[0]}=1."
        )
    decoder = _decoder(hf_config, architecture)
    if decoder in DIVIDED:
        return
    why = UNDIVIDED.get(decoder, "it is not among the families that are")
    remedy = f"Set {setting.partition('=')[0]}=1, or use data_parallel_size."
    raise ConfigError(f"{setting}: {architecture} cannot be divided: {why}. {remedy}")


def _decoder(hf_config: Mapping[str, Any], architecture: str) -> str:
    """What a model without a head for tokens, or with one for classes, or beside a tower, is
    otherwise.
    """
    if architecture in VISION_ARCHITECTURES:
        return str(hf_config.get(DECODER_ARCHITECTURE))
    for ending in _OTHER_ENDINGS:
        if architecture.endswith(ending) and architecture not in UNDIVIDED:
            return architecture.removesuffix(ending) + "ForCausalLM"
    return architecture


def _check_sizes(
    hf_config: Mapping[str, Any], parameters: ModelParameters, parallel: ParallelConfig
) -> None:
    """Whether the model's numbers can be divided."""
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if pp_size > parameters.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={pp_size} is more than the model's {parameters.num_layers}"
            f" layers; a stage needs one at least."
        )
    sizes = {
        "num_attention_heads": parameters.num_heads,
        "intermediate_size": parameters.intermediate_size,
    }
    if hf_config.get("moe_intermediate_size") is not None:
        sizes["moe_intermediate_size"] = int(hf_config["moe_intermediate_size"])
    for name, size in sizes.items():
        if size % tp_size:
            common = gcd(*sizes.values())
            fitting = ", ".join(str(n) for n in range(1, common + 1) if not common % n)
            raise ConfigError(
                f"tensor_parallel_size={tp_size} must divide the model's {name}={size}; those that"
                f" divide all of its sizes: {fitting}."
            )
    num_kv_heads = parameters.num_kv_heads
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={tp_size} must divide the model's"
            f" num_key_value_heads={num_kv_heads}, or be a multiple of it."
        )
    if -(-parameters.vocab_size // VOCAB_ALIGNMENT) < tp_size:
        raise ConfigError(
            f"tensor_parallel_size={tp_size} is more than a vocabulary of"
            f" {parameters.vocab_size} tokens has parts of {VOCAB_ALIGNMENT}."
        )


def check_quantized_parts(
    quantization: str | None, parameters: ModelParameters, parallel: ParallelConfig
) -> None:
    """Raise `ConfigError` if a rank's part of a quantised matrix is not whole groups; `parameters`
    are a rank's own.
    """
    if quantization is None or parallel.tensor_parallel_size == 1:
        return
    inputs = {
        "attention": parameters.num_heads * parameters.head_size,
        "intermediate_size": parameters.intermediate_size,
    }
    for name, size in inputs.items():
        if size % GROUP_SIZE:
            raise ConfigError(
                f"quantization={shown(quantization)} has a scale for {GROUP_SIZE} values, but with"
                f" tensor_parallel_size={parallel.tensor_parallel_size} a rank has {size} values of"
                f" {name}; take a smaller tensor_parallel_size, or no quantization."
            )


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_BY_ROWS = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj",
    "gate_up_proj", "w1", "w3", "embed_tokens", "lm_head",
)  # fmt: skip
"""Modules of whose weights a rank has some rows; of the embedding and the head, some tokens."""
_BY_COLUMNS = ("o_proj", "down_proj", "w2")


@dataclass(frozen=True, slots=True)
class RankShare:
    """What the rank with most has of a model and its machine: every setting must suit it."""

    machine: Machine
    parameters: ModelParameters
    tensor_shapes: Mapping[str, tuple[int, ...]]


def rank_share(
    parallel: ParallelConfig,
    machine: Machine,
    parameters: ModelParameters,
    tensor_shapes: Mapping[str, tuple[int, ...]],
) -> RankShare:
    """Of a model whose sizes can be divided. Logs a warning for more ranks than processors."""
    if parallel.world_size == 1:
        return RankShare(machine, parameters, tensor_shapes)
    if parallel.num_local > machine.num_cpus:
        logger.warning(
            "%d ranks on this machine, but it has %d processors to use: they wait for each other."
            " Lower tensor_parallel_size=%d or pipeline_parallel_size=%d.",
            parallel.num_local,
            machine.num_cpus,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
        )
    return RankShare(
        machine.shared_by(parallel.num_local), *model_share(parallel, parameters, tensor_shapes)
    )


def model_share(
    parallel: ParallelConfig,
    parameters: ModelParameters,
    tensor_shapes: Mapping[str, tuple[int, ...]],
) -> tuple[ModelParameters, Mapping[str, tuple[int, ...]]]:
    """Sizes and tensors of the rank with most of a model."""
    if parallel.world_size == 1:
        return parameters, tensor_shapes
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    num_layers = parameters.num_layers
    shapes = max(
        (_of_stage(tensor_shapes, num_layers, stage, pp_size) for stage in range(pp_size)),
        key=lambda stage_shapes: sum(map(prod, stage_shapes.values())),
    )
    own = replace(
        parameters,
        num_layers=max(len(stage_layers(num_layers, i, pp_size)) for i in range(pp_size)),
        num_heads=parameters.num_heads // tp_size,
        num_kv_heads=max(parameters.num_kv_heads // tp_size, 1),
        intermediate_size=parameters.intermediate_size // tp_size,
    )
    return own, {name: _divided(name, shape, tp_size, parameters) for name, shape in shapes.items()}


def check_divided(
    hf_config: Mapping[str, Any], parameters: ModelParameters, parallel: ParallelConfig
) -> None:
    """Raise `ConfigError` if the ranks cannot have parts of a native model."""
    if parallel.world_size > 1:
        _check_family(hf_config, parameters.architecture, "tokenmill", parallel)
        _check_sizes(hf_config, parameters, parallel)


def _of_stage(
    shapes: Mapping[str, tuple[int, ...]], num_layers: int, stage: int, num_stages: int
) -> dict[str, tuple[int, ...]]:
    """Tensors of one stage. The embedding may be the head, too: the last stage counts it. A tower
    is in the first.
    """
    layers = stage_layers(num_layers, stage, num_stages)

    def is_here(name: str) -> bool:
        found = _LAYER.search(name)
        if is_of_tower(name):
            return stage == 0
        return stage in (0, num_stages - 1) if found is None else int(found[1]) in layers

    return {name: shape for name, shape in shapes.items() if is_here(name)}


def _divided(
    name: str, shape: tuple[int, ...], tp_size: int, parameters: ModelParameters
) -> tuple[int, ...]:
    """What one rank of a stage has of a tensor; of a tower, all."""
    if is_of_tower(name):
        return shape
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module in _BY_ROWS:
        # Of keys and values a rank has one head at least.
        most = parameters.num_kv_heads if module in ("k_proj", "v_proj") else tp_size
        return (-(-shape[0] // min(tp_size, most)), *shape[1:])
    if module == "experts":  # all of a layer in one tensor: their features, in whichever order
        return (shape[0], -(-shape[1] // tp_size), *shape[2:])
    if module in _BY_COLUMNS and len(shape) == 2:
        return (shape[0], -(-shape[1] // tp_size))
    return shape
