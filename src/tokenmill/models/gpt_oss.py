"""gpt-oss: attention with sinks, windows in every second layer, experts in every layer.

    x -> norm -> attention -> + -> norm -> mixture of experts -> +

A sink is a score of each head that has no value. An expert computes
(up + 1) * gate * logistic(1.702 * gate) of clamped halves. The published checkpoints hold experts
in MXFP4 (Open Compute Project, 2023): codes of four bits, 32 on one power of two. Where the kernels
know the type, the codes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.config.parameters import number
from tokenmill.config.windows import layer_windows
from tokenmill.errors import CheckpointError, ConfigError, shown
from tokenmill.kernels.experts import ClampedGate, Routing
from tokenmill.layers.experts import ExpertShape
from tokenmill.layers.linear_method import Activations, StreamReader, WeightPlace
from tokenmill.layers.moe import ExpertBlock, Router, divided_expert_slots
from tokenmill.layers.parallel_linear import columns_slot
from tokenmill.layers.weights import WeightSlot, parameter_slot, plain_raw
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer
from tokenmill.models.mixtral import expert_counts
from tokenmill.parallel.shares import Share, even_share
from tokenmill.quantization.dequantize import plain_values

_GROUP_VALUES = 32
"""Values of MXFP4 that share a scale."""
_GROUP_BYTES = 16


class ExpertMatrices:
    """How the checkpoint has the matrices of one name, of all experts; of each, a rank has some
    rows or some columns.

    One tensor [experts, in_features, out_features]; or, as MXFP4, `_blocks`
    [experts, out_features, groups, 16] and `_scales` [experts, out_features, groups].
    """

    def __init__(
        self,
        methods: Sequence[WeightPlace],
        bias: torch.Tensor,
        rows: Sequence[range],
        out_features: int,
        columns: Share,
        *,
        adds_bias: bool = True,
    ) -> None:
        """`methods` are the experts' places, and bias [experts, rows here] theirs.

        `rows` of `out_features` in the checkpoint are here, one range behind the other. Without
        `adds_bias`, another rank adds it.
        """
        self.methods = methods
        self.bias = bias
        self.rows = torch.cat([torch.tensor(each) for each in rows])
        self.out_features = out_features
        self.columns = columns
        self.adds_bias = adds_bias
        self._mxfp4: dict[str, torch.Tensor] = {}

    def weight_slots(self, name: str, *, is_mxfp4: bool) -> Iterator[WeightSlot]:
        """Where the tensors that begin with `name` go."""
        experts, out_features = len(self.methods), self.out_features
        if is_mxfp4:
            self._check_groups(name)
            groups = self.columns.total // _GROUP_VALUES
            for part, shape in (("blocks", (groups, _GROUP_BYTES)), ("scales", (groups,))):
                yield WeightSlot(
                    f"{name}_{part}",
                    (experts, out_features, *shape),
                    lambda raw, part=part: self._load_mxfp4(part, raw),  # type: ignore[misc]
                    memory=self._memory,
                )
        else:
            whole = experts, self.columns.total, out_features
            yield WeightSlot(name, whole, self._load_plain, memory=self._memory)
        yield WeightSlot(f"{name}_bias", (experts, out_features), self.load_bias)

    def _memory(self) -> Iterator[torch.Tensor]:
        for method in self.methods:
            yield from method.slot("", slice(0, len(self.rows))).memory()

    def _check_groups(self, name: str) -> None:
        start, stop = self.columns.start, self.columns.stop
        if start % _GROUP_VALUES or stop % _GROUP_VALUES:
            raise CheckpointError(
                f"{name} of {self.columns.total} columns in MXFP4 cannot be divided at columns"
                f" {start} and {stop}: {_GROUP_VALUES} values share a scale. Take another"
                f" tensor_parallel_size."
            )

    def load_bias(self, raw: RawTensor) -> None:
        """Take in the biases of all experts."""
        if self.adds_bias:
            self.bias.copy_(plain_values(raw)[:, self.rows])
        else:
            self.bias.zero_()

    def _load_plain(self, raw: RawTensor) -> None:
        columns = slice(self.columns.start, self.columns.stop)
        for expert, values in enumerate(plain_values(raw)):
            self._load(expert, plain_raw(values[columns].t()[self.rows]))

    def _load_mxfp4(self, part: str, raw: RawTensor) -> None:
        self._mxfp4[part] = raw.data.view(raw.shape)
        if len(self._mxfp4) < 2:
            return
        groups = slice(self.columns.start // _GROUP_VALUES, self.columns.stop // _GROUP_VALUES)
        for expert in range(len(self.methods)):
            codes, scales = (
                self._mxfp4[name][expert][self.rows, groups] for name in ("blocks", "scales")
            )
            blocks = torch.cat([scales[..., None], _in_halves(codes)], dim=-1)
            shape = (len(self.rows), self.columns.size)
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
        gate = ClampedGate(
            alpha=number(hf_config, "swiglu_alpha", 1.702),
            limit=number(hf_config, "swiglu_limit", 7.0),
        )
        self.group = group = parts.kernels.group
        self.share = share = even_share(size, group.rank, group.size)
        self.is_mxfp4 = _is_mxfp4(hf_config)
        self.shape = ExpertShape(
            num_experts,
            hidden,
            share.size,
            parts.dtype,
            gate,
            has_bias=True,
            is_mxfp4=self.is_mxfp4,
        )
        self.method = method = parts.kernels.experts_method(self.shape)
        assert method.gate_up_bias is not None
        assert method.down_bias is not None
        # In the checkpoint, gates and ups take turns; here gates come first.
        first, stop = 2 * share.start, 2 * share.stop
        self.gate_up = ExpertMatrices(
            method.gate_up,
            method.gate_up_bias,
            [range(first, stop, 2), range(first + 1, stop, 2)],
            2 * size,
            Share(hidden, 0, hidden),
        )
        self.down = ExpertMatrices(
            method.down,
            method.down_bias,
            [range(hidden)],
            hidden,
            share,
            adds_bias=group.rank == 0,
        )
        self.are_separate = bool(hf_config.get("separate_experts", False))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self.are_separate:
            yield from self._separate_slots(prefix)
            return
        yield from self.gate_up.weight_slots(f"{prefix}.gate_up_proj", is_mxfp4=self.is_mxfp4)
        yield from self.down.weight_slots(f"{prefix}.down_proj", is_mxfp4=self.is_mxfp4)

    def _separate_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """As GGUF files have them: see checkpoint/gguf_experts.py."""
        method, size = self.method, self.shape.intermediate_size
        yield from divided_expert_slots(method, self.shape, prefix, self.share)
        assert method.gate_up_bias is not None
        gates, ups = method.gate_up_bias[:, :size], method.gate_up_bias[:, size:]
        for name, bias in (("gate_proj", gates), ("up_proj", ups)):
            yield columns_slot(parameter_slot(f"{prefix}.{name}_bias", bias), self.share)
        yield WeightSlot(
            f"{prefix}.down_proj_bias", tuple(self.down.bias.shape), self.down.load_bias
        )

    def forward(self, x: Activations, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The weighted sum over the chosen ones of x [N, hidden_size], in float32."""
        return self.group.all_reduce(self.method.mix(x, weights, chosen, None))


class GptOssMoE(ExpertBlock):
    """Router and experts."""

    def __init__(self, parts: LayerParts, hf_config: Mapping[str, Any]) -> None:
        hidden, dtype, kernels = parts.config.hidden_size, parts.dtype, parts.kernels
        super().__init__(hidden, dtype, kernels)
        counts = expert_counts(hf_config)
        # The same as the softmax of the best.
        routing = Routing(counts["num_experts_per_tok"], renormalize=True)
        self.router = Router(
            hidden, counts["num_experts"], routing, dtype=dtype, kernels=kernels, bias=True
        )
        self.experts = GptOssExperts(parts, hf_config, counts["num_experts"])

    def readers(self) -> list[StreamReader]:
        return [self.router, self.experts.method]

    def forward(self, x: Activations) -> torch.Tensor:
        """Map x [N, hidden_size] to float32 of the same shape."""
        weights, chosen = self.router(x)
        return self.experts(x, weights, chosen)  # type: ignore[no-any-return]


class GptOssForCausalLM(Decoder):
    """A gpt-oss with its output head."""

    config_defaults = {"attention_bias": True, "sliding_window": 128, "head_dim": 64}

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_hf(hf_config, windows=layer_windows(hf_config, "GptOss"))

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
