"""gpt-oss: attention with sinks, windows in every second layer, experts in every layer.

    x -> norm -> attention -> + -> norm -> mixture of experts -> +

A sink is a score of each head that has no value. An expert computes
(up + 1) * gate * logistic(1.702 * gate) of clamped halves. The published checkpoints hold experts
in MXFP4 (Open Compute Project, 2023): codes of four bits, 32 on one power of two. Where the kernels
know the type, the codes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.config.parameters import number, read_parameters
from tokenmill.errors import ConfigError, shown
from tokenmill.layers.linear_method import LinearMethod
from tokenmill.layers.moe import ExpertBlock, Router, mixed
from tokenmill.layers.weights import WeightSlot, empty_parameter, plain_raw
from tokenmill.models.config import DecoderConfig, layer_windows
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer
from tokenmill.models.mixtral import expert_counts
from tokenmill.quantization.dequantize import plain_values

_GROUP_VALUES = 32
"""Values of MXFP4 that share a scale."""
_GROUP_BYTES = 16


class ExpertMatrices:
    """The matrices and biases of one name, of all experts.

    In the checkpoint, one tensor [experts, in_features, out_features]; or, as MXFP4, `_blocks`
    [experts, out_features, groups, 16] and `_scales` [experts, out_features, groups].
    """

    def __init__(
        self,
        parts: LayerParts,
        num_experts: int,
        out_features: int,
        in_features: int,
        *,
        alternates: bool,
    ) -> None:
        """With `alternates`, gates and ups take turns in the checkpoint; here gates come first."""
        rows = torch.arange(out_features)
        self.rows = torch.cat([rows[0::2], rows[1::2]]) if alternates else rows
        self.in_features = in_features
        self.dtype = parts.dtype
        self.methods: list[LinearMethod] = [
            parts.kernels.linear_method(out_features, in_features, parts.dtype)
            for _ in range(num_experts)
        ]
        self.bias = empty_parameter(num_experts, out_features, dtype=self.methods[0].bias_dtype)
        self._mxfp4: dict[str, torch.Tensor] = {}

    def project(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Rows x [N, in_features] through one expert's matrix: [N, out_features]."""
        return self.methods[expert].project(x, self.bias[expert], self.dtype)

    def weight_slots(self, name: str, *, is_mxfp4: bool) -> Iterator[WeightSlot]:
        """Where the tensors that begin with `name` go."""
        experts, out_features = self.bias.shape
        if is_mxfp4:
            groups = self.in_features // _GROUP_VALUES
            for part, shape in (("blocks", (groups, _GROUP_BYTES)), ("scales", (groups,))):
                yield WeightSlot(
                    f"{name}_{part}",
                    (experts, out_features, *shape),
                    lambda raw, part=part: self._load_mxfp4(part, raw),  # type: ignore[misc]
                )
        else:
            yield WeightSlot(name, (experts, self.in_features, out_features), self._load_plain)
        yield WeightSlot(f"{name}_bias", (experts, out_features), self._load_bias)

    def _load_bias(self, raw: RawTensor) -> None:
        self.bias.copy_(plain_values(raw)[:, self.rows])

    def _load_plain(self, raw: RawTensor) -> None:
        for expert, values in enumerate(plain_values(raw)):
            self._load(expert, plain_raw(values.t()[self.rows]))

    def _load_mxfp4(self, part: str, raw: RawTensor) -> None:
        self._mxfp4[part] = raw.data.view(raw.shape)
        if len(self._mxfp4) < 2:
            return
        for expert in range(len(self.methods)):
            codes, scales = (self._mxfp4[name][expert][self.rows] for name in ("blocks", "scales"))
            blocks = torch.cat([scales[..., None], _in_halves(codes)], dim=-1)
            shape = (len(self.rows), self.in_features)
            self._load(expert, RawTensor(shape, "MXFP4", blocks.view(-1)))
        self._mxfp4.clear()

    def _load(self, expert: int, raw: RawTensor) -> None:
        self.methods[expert].slot("", slice(0, len(self.rows))).load(raw)


def _in_halves(codes: torch.Tensor) -> torch.Tensor:
    """Codes of neighbours in one byte -> codes of values i and i + 16, as GGUF blocks have them.

    uint8 [..., 16]; in both forms the low half of a byte comes first.
    """
    in_order = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return in_order[..., :_GROUP_BYTES] | in_order[..., _GROUP_BYTES:] << 4


class GptOssExperts(nn.Module):
    """All experts of a layer."""

    def __init__(self, parts: LayerParts, hf_config: Mapping[str, Any], num_experts: int) -> None:
        super().__init__()
        hidden, size = parts.config.hidden_size, parts.config.intermediate_size
        self.gate_up = ExpertMatrices(parts, num_experts, 2 * size, hidden, alternates=True)
        self.down = ExpertMatrices(parts, num_experts, hidden, size, alternates=False)
        self.num_experts = num_experts
        self.is_mxfp4 = _is_mxfp4(hf_config)
        self.alpha = number(hf_config, "swiglu_alpha", 1.702)
        self.limit = number(hf_config, "swiglu_limit", 7.0)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up.weight_slots(f"{prefix}.gate_up_proj", is_mxfp4=self.is_mxfp4)
        yield from self.down.weight_slots(f"{prefix}.down_proj", is_mxfp4=self.is_mxfp4)

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Map rows x [N, hidden_size] to the same shape."""
        gate, up = self.gate_up.project(expert, x).float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        activated = (up + 1.0) * (gate / (torch.exp(-self.alpha * gate) + 1.0))
        return self.down.project(expert, activated.to(x.dtype))


class GptOssMoE(ExpertBlock):
    """Router and experts."""

    def __init__(self, parts: LayerParts, hf_config: Mapping[str, Any]) -> None:
        super().__init__(parts.config.hidden_size, parts.dtype, parts.kernels)
        counts = expert_counts(hf_config)
        self.router = Router(
            parts.config.hidden_size,
            **counts,
            renormalize=True,  # the same as the softmax of the best
            dtype=parts.dtype,
            kernels=parts.kernels,
            bias=True,
        )
        self.experts = GptOssExperts(parts, hf_config, counts["num_experts"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden_size] to float32 of the same shape."""
        weights, chosen = self.router(x)
        return mixed(x, weights, chosen, self.experts.run, self.experts.num_experts)


class GptOssForCausalLM(Decoder):
    """A gpt-oss with its output head."""

    config_defaults = {"attention_bias": True, "sliding_window": 128, "head_dim": 64}

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        num_layers = read_parameters(hf_config).num_layers
        return DecoderConfig.from_hf(
            hf_config, windows=layer_windows(hf_config, num_layers, lambda layer: layer % 2 == 0)
        )

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        return PreNormLayer(parts, parts.attention(has_sinks=True), GptOssMoE(parts, hf_config))


def _is_mxfp4(hf_config: Mapping[str, Any]) -> bool:
    """Whether experts are stored so; raises `ConfigError` for another quantisation."""
    settings = hf_config.get("quantization_config")
    if settings is None:
        return False
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "mxfp4":
        raise ConfigError(
            f"config.json: quantization_config is {shown(settings)}; only quant_method 'mxfp4' is"
            f" supported here."
        )
    return True
