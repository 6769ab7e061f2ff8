"""How a checkpoint keeps the experts of a layer.

    separate            a tensor for each matrix of each expert
    fused               gate_up_proj [experts, 2 * size, hidden], down_proj [experts, hidden, size]
    fused_transposed    gate_up_proj [experts, hidden, 2 * size], down_proj [experts, size, hidden]

Hubs have Qwen3-VL's experts transposed; the library that trains them saves them as its modules have
them. A config.json does not say which, so the tensors do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPERT_LAYOUT = "expert_layout"
"""Key in a config made here."""
SEPARATE, FUSED, FUSED_TRANSPOSED = "separate", "fused", "fused_transposed"


def with_expert_layout(
    config: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Any]:
    """`config` with the layout that the tensors have, where it is of a model with fused experts."""
    if config.get(EXPERT_LAYOUT) != FUSED_TRANSPOSED:
        return config
    size = config["hidden_size"], config.get("moe_intermediate_size")
    as_modules = any(
        name.endswith(".experts.down_proj") and shape[1:] == size
        for name, shape in tensor_shapes.items()
    )
    return {**config, EXPERT_LAYOUT: FUSED} if as_modules else config
