"""Native routing and mixtures of experts against torch, and against themselves: a token has one
result, whatever the other tokens chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from helpers import isas
from helpers.blocks import random_blocks
from tokenmill import _native
from tokenmill.kernels import arena, fused, native
from tokenmill.kernels.experts import (
    ClampedGate,
    ExpertGate,
    PackedExperts,
    PackedWeight,
    Routing,
    expert_gate,
    mix_experts,
    mix_experts_reference,
    route,
    route_reference,
)
from tokenmill.kernels.gemm import (
    PackedBf16,
    PackedBlocks,
    PackedFloat32,
    QuantizedRows,
    gemm_bf16,
    gemm_blocks,
    gemm_float32,
    quantize_rows,
)

FORMATS = ["bf16", "float32", "Q8_0", "Q4_1", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4"]
GATES: list[ExpertGate] = ["silu", "gelu_tanh", ClampedGate(1.7, 1.5)]


@pytest.fixture(params=native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    with isas.active(request.param):
        yield


class PoisonedArena(arena.Arena):
    """Memory that is NaN wherever nobody has written."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().empty(shape, dtype)
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor


@dataclass
class Matrices:
    """An expert: what is packed, and what that stands for in float64."""

    gate_up: list[PackedWeight]
    down: list[PackedWeight]
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def run(self, x: torch.Tensor, gate: ExpertGate) -> torch.Tensor:
        gate_up = x @ dense(self.gate_up).t()
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias
        result = expert_gate(gate_up.float(), gate).double() @ dense(self.down).t()
        return result if self.down_bias is None else result + self.down_bias


def dense(parts: list[PackedWeight]) -> torch.Tensor:
    rows = [part.unpack_rows(torch.arange(part.out_features)) for part in parts]
    return torch.cat(rows).double()


def packed(format_: str, n: int, k: int) -> PackedWeight:
    weight = torch.randn(n, k) / k**0.5
    if format_ == "bf16":
        return PackedBf16.pack(weight.bfloat16())
    if format_ == "float32":
        return PackedFloat32.pack(weight)
    if format_ in ("Q8_0", "Q4_1"):
        return PackedBlocks.quantize(format_, weight)  # type: ignore[arg-type]
    raw, _ = random_blocks(format_, n, k)  # the same ones again, so in another order
    return PackedBlocks.pack(format_, raw, n, k, torch.randperm(n))


def made(
    format_: str, hidden: int, size: int, num_experts: int, *, bias: bool = False
) -> tuple[PackedExperts, list[Matrices]]:
    """Experts whose gates and ups are apart where panels are not whole."""
    experts, matrices = PackedExperts(hidden, size), []
    for _ in range(num_experts):
        gate_up = [packed(format_, 2 * size, hidden)]
        if size % 32:
            gate_up = [packed(format_, size, hidden) for _ in range(2)]
        biases = (0.1 * torch.randn(2 * size), 0.1 * torch.randn(hidden)) if bias else (None, None)
        matrices.append(Matrices(gate_up, [packed(format_, hidden, size)], *biases))
        experts.add(gate_up, matrices[-1].down, *biases)
    return experts, matrices


def dtype_of(format_: str) -> torch.dtype:
    return torch.float32 if format_ == "float32" else torch.bfloat16


def choices(num_rows: int, num_experts: int, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(num_rows, num_experts)
    return route_reference(logits, Routing(num_chosen, renormalize=True))


def assert_near(found: torch.Tensor, expected: torch.Tensor, format_: str) -> None:
    """Relative to the size of the whole; what rounding of each format costs, and no more."""
    tolerance = {"float32": 2e-6, "bf16": 8e-3}.get(format_, 3e-2)
    assert found.dtype == torch.float32
    scale = expected.norm() / max(expected.numel(), 1) ** 0.5
    error = (found - expected).norm() / max(expected.numel(), 1) ** 0.5
    assert error <= tolerance * scale
    assert bool((found - expected).abs().max() <= 8 * tolerance * scale)


ROUTINGS = [
    Routing(1),
    Routing(3),
    Routing(8, renormalize=True),
    Routing(4, num_groups=4, num_best_groups=2, factor=1.5),
    Routing(4, by_logistic=True, factor=2.0),
    Routing(
        4,
        by_logistic=True,
        renormalize=True,
        num_groups=4,
        num_best_groups=3,
        group_best=2,
        factor=2.5,
    ),
]


@pytest.mark.parametrize("num_experts", [8, 36, 128])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_routing(routing: Routing, num_experts: int) -> None:
    logits = 2 * torch.randn(75, num_experts + 5)[:, 5:]  # rows lie apart
    logits[:40, 3] = logits[:40, 6]  # ties
    logits[40:50] = 0.0
    bias = 0.2 * torch.randn(num_experts) if routing.by_logistic else None
    weights, chosen = route(logits, routing, bias)
    expected_weights, expected = route_reference(logits, routing, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-7)
    for num_threads in (1, 2):
        _native.set_num_threads(num_threads)
        for rows in (slice(0, 1), slice(70, 75), slice(5, 5)):
            alone = route(logits[rows], routing, bias)
            assert torch.equal(alone[0], weights[rows])
            assert torch.equal(alone[1], chosen[rows])


@pytest.mark.parametrize("by_logistic", [False, True])
def test_a_logit_that_is_no_number_is_not_lost(by_logistic: bool) -> None:
    logits = torch.randn(3, 20)
    logits[1, 7] = torch.nan
    routing = Routing(4, by_logistic=by_logistic, renormalize=True)
    weights, chosen = route(logits, routing)
    assert chosen[1, 0] == 7
    assert bool(weights[1].isnan().all())
    assert bool(weights[[0, 2]].isfinite().all())


def test_routing_that_cannot_be_is_refused() -> None:
    logits = torch.randn(2, 12)
    for routing in (
        Routing(13),
        Routing(2, num_groups=5),
        Routing(2, num_groups=4, num_best_groups=5),
        Routing(4, num_groups=4, num_best_groups=1),
        Routing(1, num_groups=12, num_best_groups=2, group_best=2),
    ):
        with pytest.raises(ValueError, match="must be"):
            route(logits, routing)


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("format_", ["bf16", "float32", "Q8_0", "Q4_1"])
def test_a_mixture_is_near_the_reference(format_: str, gate: ExpertGate) -> None:
    hidden, size = 96, 64
    experts, matrices = made(format_, hidden, size, 7, bias=True)
    for num_rows in (0, 1, 2, 45):
        x = torch.randn(num_rows, hidden).to(dtype_of(format_))
        base = torch.randn(num_rows, hidden).bfloat16()
        weights, chosen = choices(num_rows, 7, 3)
        with arena.allocate_from(PoisonedArena()):
            found = mix_experts(
                x, weights, chosen, experts, gate, dtype=dtype_of(format_), base=base
            )
        expected = mix_experts_reference(
            x.double(),
            weights.double(),
            chosen,
            lambda expert, rows: matrices[expert].run(rows, gate),
            7,
        )
        if num_rows:
            assert_near(found, expected + base, format_)
        else:
            assert found.shape == (0, hidden)


@pytest.mark.parametrize("format_", ["bf16", "float32"])
@pytest.mark.parametrize(("hidden", "size"), [(1, 1), (47, 33), (70, 31), (33, 129)])
def test_odd_sizes(format_: str, hidden: int, size: int) -> None:
    experts, matrices = made(format_, hidden, size, 5)
    x = torch.randn(19, hidden).to(dtype_of(format_))
    weights, chosen = choices(19, 5, 2)
    with arena.allocate_from(PoisonedArena()):
        found = mix_experts(x, weights, chosen, experts, "silu", dtype=x.dtype)
    expected = mix_experts_reference(
        x.double(), weights.double(), chosen, lambda e, rows: matrices[e].run(rows, "silu"), 5
    )
    assert_near(found, expected, format_)


def product(
    plain: torch.Tensor, codes: QuantizedRows | None, parts: list[PackedWeight], bias: torch.Tensor
) -> torch.Tensor:
    """The bits of the products that other layers use."""
    out, start = torch.empty(len(plain), len(bias), dtype=plain.dtype), 0
    for part in parts:
        columns = slice(start, start + part.out_features)
        if isinstance(part, PackedBlocks):
            assert codes is not None
            gemm_blocks(codes, part, bias[columns], out=out[:, columns])
        elif isinstance(part, PackedBf16):
            gemm_bf16(plain, part, bias[columns], out=out[:, columns])
        else:
            gemm_float32(plain, part, bias[columns], out=out[:, columns])
        start = columns.stop
    return out


def layer_of_its_own(x: torch.Tensor, expert: Matrices) -> torch.Tensor:
    assert expert.gate_up_bias is not None
    assert expert.down_bias is not None
    is_plain = x.dtype == torch.float32
    gate_up = product(
        x, None if is_plain else quantize_rows(x), expert.gate_up, expert.gate_up_bias
    )
    size = gate_up.shape[1] // 2
    plain = torch.empty(len(x), size, dtype=x.dtype)
    codes = fused.empty_quantized(len(x), size)
    for out in (plain, codes):
        fused.gated_activation(gate_up, "silu", out)
    return product(plain, codes, expert.down, expert.down_bias)


@pytest.mark.parametrize("other", [None, "bf16", "Q8_0"])
@pytest.mark.parametrize("format_", FORMATS)
def test_an_expert_has_the_bits_of_a_layer_of_its_own(format_: str, other: str | None) -> None:
    """With parts of an `other` format in each matrix, too."""
    hidden, size, dtype = 64, 96, dtype_of(format_)
    if other is not None and format_ == "float32":
        return  # among float32 activations there is one format
    other = other or format_
    experts, matrices = PackedExperts(hidden, size), []
    for _ in range(3):
        gate_up = [packed(format_, size, hidden), packed(other, size, hidden)]
        down = [packed(other, 20, size), packed(format_, 44, size)]
        matrices.append(Matrices(gate_up, down, torch.randn(2 * size), torch.randn(hidden)))
        experts.add(gate_up, down, matrices[-1].gate_up_bias, matrices[-1].down_bias)
    assert experts.reads_plain == bool({format_, other} & {"bf16", "float32"})
    x = torch.randn(40, hidden).to(dtype)
    chosen = torch.randint(3, (40, 1), dtype=torch.int32)
    with arena.allocate_from(PoisonedArena()):
        found = mix_experts(x, torch.ones(40, 1), chosen, experts, "silu", dtype=dtype)
    for row in range(40):
        expected = layer_of_its_own(x[row : row + 1], matrices[int(chosen[row])])
        assert torch.equal(found[row : row + 1], expected.float())


@pytest.mark.parametrize("format_", ["bf16", "float32", "Q8_0", "Q4_1", "MXFP4"])
def test_a_token_has_the_same_bits_in_any_batch(format_: str) -> None:
    """Alone, in parts, quantised before, with any number of threads, however uneven the choice."""
    hidden, size, num_experts = 160, 96, 9
    experts, _ = made(format_, hidden, size, num_experts, bias=True)
    x = torch.randn(70, hidden).to(dtype_of(format_))
    weights, chosen = choices(70, num_experts, 3)
    chosen[20:60] = torch.tensor([4, 0, 8])  # most tokens to the same experts; 5 has none
    chosen[chosen == 5] = 6

    def compute(rows: slice, *, is_quantized: bool = False) -> torch.Tensor:
        part = quantize_rows(x[rows]) if is_quantized else x[rows]
        return mix_experts(
            part, weights[rows], chosen[rows], experts, GATES[2], dtype=dtype_of(format_)
        )

    whole = compute(slice(0, 70))
    assert bool(whole.isfinite().all())
    for num_threads in (1, 2, 3):
        _native.set_num_threads(num_threads)
        for step in (1, 17, 70):
            for start in range(0, 70, step):
                rows = slice(start, min(start + step, 70))
                assert torch.equal(compute(rows), whole[rows])
    if not experts.reads_plain:
        assert torch.equal(compute(slice(3, 50), is_quantized=True), whole[3:50])


def test_a_recorded_mixture_follows_its_inputs() -> None:
    """Routing included: the replay of fewer tokens sorts its own rows."""
    hidden, num_experts = 64, 6
    experts, _ = made("Q4_1", hidden, 96, num_experts)
    x, logits = torch.empty(40, hidden).bfloat16(), torch.empty(40, num_experts)
    program, memory = _native.Program(40), arena.Arena()
    with arena.allocate_from(memory):
        program.begin()
        weights, chosen = route(logits, Routing(2))
        out = mix_experts(x, weights, chosen, experts, "silu", dtype=torch.bfloat16, base=x)
        program.end()
    for num_rows in (40, 1, 7):
        x.normal_()
        logits.normal_()
        program.replay(num_rows)
        rows = slice(0, num_rows)
        direct = mix_experts(
            x[rows],
            *route(logits[rows], Routing(2)),
            experts,
            "silu",
            dtype=torch.bfloat16,
            base=x[rows],
        )
        assert torch.equal(out[rows], direct)


def test_what_cannot_be_is_refused() -> None:
    experts, _ = made("bf16", 64, 32, 4)
    x, weights = torch.randn(2, 64).bfloat16(), torch.ones(2, 1)

    def mix(chosen: list[list[int]], rows: torch.Tensor | QuantizedRows = x) -> None:
        ids = torch.tensor(chosen, dtype=torch.int32)
        mix_experts(rows, weights, ids, experts, "silu", dtype=torch.bfloat16)

    for chosen in ([[0], [4]], [[-1], [0]]):
        with pytest.raises(ValueError, match=r"chosen must be within \[0, 4\)"):
            mix(chosen)
    for rows in (quantize_rows(x), x.float(), x[:1], torch.randn(2, 32).bfloat16()):
        with pytest.raises(ValueError, match="x must be"):
            mix([[0], [1]], rows)
    with pytest.raises(ValueError, match="spans must be"):
        experts.add([packed("bf16", 32, 64)], [packed("bf16", 64, 32)])
    with pytest.raises(ValueError, match="packed must be"):
        experts.add([packed("bf16", 64, 96)], [packed("bf16", 64, 32)])
    experts.add([packed("float32", 64, 64)], [packed("bf16", 64, 32)])
    with pytest.raises(ValueError, match="is_bf16 must be"):
        mix([[0], [1]])
