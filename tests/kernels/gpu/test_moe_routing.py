"""The choice of experts."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.experts import Routing, route_reference
from tokenmill.kernels.gpu.moe_routing import route

ROUTINGS = [
    Routing(1),
    Routing(3, renormalize=True, factor=2.5),
    Routing(4, by_logistic=True, factor=2.0),
    Routing(2, by_logistic=True, renormalize=True),
    Routing(3, num_groups=4, num_best_groups=3, factor=1.5),
    Routing(2, by_logistic=True, renormalize=True, num_groups=2, num_best_groups=1, group_best=2),
]


def routed(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(logits), routing.num_chosen
    weights = torch.full(shape, torch.nan, device=logits.device)
    chosen = torch.full(shape, -77, dtype=torch.int32, device=logits.device)
    route(logits, bias, weights, chosen, routing)
    return weights, chosen


@pytest.mark.parametrize("num_experts", [4, 60, 128])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_choices(routing: Routing, num_experts: int, device: str) -> None:
    logits = 2 * torch.randn(11, num_experts + 3, device=device)[:, 3:]  # rows lie apart
    logits[:5, 1] = logits[:5, 3]  # ties
    logits[5] = 0.0
    logits[6] = -1000.0  # all scores are tiny, or zero
    bias = 0.3 * torch.randn(num_experts, device=device) if routing.by_logistic else None
    weights, chosen = routed(logits, routing, bias)
    expected_weights, expected = route_reference(logits, routing, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    for rows in (slice(0, 0), slice(4, 5), slice(2, 9)):
        alone = routed(logits[rows], routing, bias)
        assert torch.equal(alone[0], weights[rows])
        assert torch.equal(alone[1], chosen[rows])


@pytest.mark.parametrize("by_logistic", [False, True])
def test_a_logit_that_is_no_number_is_not_lost(by_logistic: bool, device: str) -> None:
    logits = torch.randn(3, 20, device=device)
    logits[1, 7] = torch.nan
    weights, chosen = routed(
        logits, Routing(4, by_logistic=by_logistic, renormalize=True), bias=None
    )
    assert chosen[1, 0] == 7
    assert len(set(chosen[1].tolist())) == 4
    assert bool(weights[1].isnan().all())
    assert bool(weights[[0, 2]].isfinite().all())


def test_torch_op(device: str) -> None:
    logits, bias = torch.randn(5, 24, device=device), torch.randn(24, device=device)
    weights = torch.full((5, 3), torch.nan, device=device)
    chosen = torch.full((5, 3), -77, dtype=torch.int32, device=device)
    torch.ops.tokenmill.route(logits, bias, True, True, [6, 2, 2], 1.5, weights, chosen)
    routing = Routing(
        3,
        by_logistic=True,
        renormalize=True,
        num_groups=6,
        num_best_groups=2,
        group_best=2,
        factor=1.5,
    )
    expected_weights, expected = route_reference(logits, routing, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)
