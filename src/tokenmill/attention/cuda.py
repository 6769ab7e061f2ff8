"""What the backends for NVIDIA GPUs share: the cache's layout, its writing, and reasons to refuse.

kv_cache    [num_blocks, K and V, block_size, num_kv_heads, head_size]
"""

from __future__ import annotations

import importlib.util
import os

import torch

from tokenmill.attention.backend import AttentionSpec, Rotation
from tokenmill.errors import ConfigError


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
    """The layout of `kernels/gpu`, of FlashInfer (NHD), and of FlashAttention by half."""
    return (num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size)


def is_interpreted() -> bool:
    """Whether Triton's kernels run on the CPU, as in tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_of(spec: AttentionSpec) -> str:
    """Where the tensors of a layer lie."""
    return "cpu" if is_interpreted() else spec.device


def compute_capability() -> tuple[int, int] | None:
    """That of the GPU that torch uses; None without one, and where kernels are interpreted."""
    if is_interpreted() or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def device_reasons(spec: AttentionSpec, lowest: tuple[int, int]) -> list[str]:
    """Why Triton kernels that need a compute capability cannot run on the device of `spec`."""
    reasons = []
    if spec.device != "cuda":
        reasons.append(f"it runs on CUDA devices, not on {spec.device}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed: pip install 'tokenmill[gpu]'")
    found = compute_capability()
    if found is not None and found < lowest:
        reasons.append(
            f"the GPU's compute capability is {found[0]}.{found[1]}, below {lowest[0]}.{lowest[1]}"
        )
    return reasons


def refuse_recording(name: str) -> None:
    """Raise `ConfigError` while a graph is captured: it would repeat this step's lengths."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"attention_backend={name!r} plans each step on the host and cannot be recorded. Use"
            " graphs='off', or another backend."
        )


def write_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Store a step's keys and values, rotated as it says, and return its rotated queries."""
    # Late: whoever only asks for reasons needs no triton.
    from tokenmill.kernels.gpu.rope_kv import rotate_and_write_kv, write_kv

    if rotation is None:
        write_kv(key, value, kv_cache, slot_mapping, k_scale, v_scale)
        return query
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotate_and_write_kv(
        query,
        key,
        value,
        rotation.positions,
        rotation.cos,
        rotation.sin,
        kv_cache,
        slot_mapping,
        rotated,
        k_scale,
        v_scale,
    )
    return rotated
