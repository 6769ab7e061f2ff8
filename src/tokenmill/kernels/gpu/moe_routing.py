"""Which experts a token uses, from its logits: one program a token.

Among equal scores the expert with the lower number is better; a NaN is better than any number, so
that it cannot get lost. A token's choice does not depend on the other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.experts import Routing, route_reference
from tokenmill.kernels.gpu.launch import CompileCase, define_op, next_power_of_2

_LOWEST = tl.constexpr(-3.0e38)
"""Below all candidates, and above experts that are chosen already."""


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    routing: Routing,
) -> None:
    """Put weights, float32, and experts, int32, both [N, num_chosen], best first, into the outputs.

    logits is float32 [N, num_experts], rows may lie apart; bias float32 [num_experts], on scores.
    Experts form one group.
    """
    num_tokens, num_experts = logits.shape
    assert logits.dtype == weights.dtype == torch.float32
    assert chosen.dtype == torch.int32
    assert weights.shape == chosen.shape == (num_tokens, routing.num_chosen)
    assert logits.stride(1) == 1
    assert weights.is_contiguous()
    assert chosen.is_contiguous()
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    assert routing.num_chosen <= num_experts
    assert routing.num_best_groups == routing.num_groups
    if num_tokens == 0:
        return
    _route_kernel[(num_tokens,)](
        logits,
        bias,
        weights,
        chosen,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=routing.num_chosen,
        BY_LOGISTIC=routing.by_logistic,
        RENORMALIZE=routing.renormalize,
        FACTOR=routing.factor,
        BLOCK=next_power_of_2(num_experts),
        BLOCK_CHOSEN=next_power_of_2(routing.num_chosen),
        num_warps=1,
    )


@triton.jit
def _route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BY_LOGISTIC: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    exists = ids < NUM_EXPERTS
    logit = tl.load(logits + token * stride + ids, mask=exists, other=float("-inf"))
    scores = tl.exp(logit - tl.max(logit, axis=0))
    if BY_LOGISTIC:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    candidates = scores
    if bias is not None:
        candidates += tl.load(bias + ids, mask=exists, other=0.0)
    keys = tl.where(candidates > _LOWEST, candidates, _LOWEST)
    keys = tl.where(candidates != candidates, float("inf"), keys)
    keys = tl.where(exists, keys, float("-inf"))
    places = tl.arange(0, BLOCK_CHOSEN)
    best_ids = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    best_scores = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        best = tl.min(tl.where(keys == tl.max(keys, axis=0), ids, BLOCK), axis=0)
        score = tl.sum(tl.where(ids == best, scores, 0.0), axis=0)
        best_ids = tl.where(places == i, best, best_ids)
        best_scores = tl.where(places == i, score, best_scores)
        keys = tl.where(ids == best, float("-inf"), keys)
    if RENORMALIZE:
        total = tl.sum(best_scores, axis=0)
        if BY_LOGISTIC:
            total += 1e-20  # they may all be zero
        best_scores = best_scores / total
    elif not BY_LOGISTIC:
        best_scores = best_scores / tl.sum(tl.where(exists, scores, 0.0), axis=0)
    outputs = token * NUM_CHOSEN + places
    tl.store(weights + outputs, best_scores * FACTOR, mask=places < NUM_CHOSEN)
    tl.store(chosen + outputs, best_ids, mask=places < NUM_CHOSEN)


def _route_op(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    by_logistic: bool,
    renormalize: bool,
    factor: float,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    routing = Routing(
        chosen.shape[1], by_logistic=by_logistic, renormalize=renormalize, factor=factor
    )
    route(logits, bias, weights, chosen, routing)


def _route_op_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    by_logistic: bool,
    renormalize: bool,
    factor: float,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    routing = Routing(
        chosen.shape[1], by_logistic=by_logistic, renormalize=renormalize, factor=factor
    )
    for out, found in zip((weights, chosen), route_reference(logits, routing, bias), strict=True):
        out.copy_(found)


define_op(
    "route(Tensor logits, Tensor? bias, bool by_logistic, bool renormalize, float factor,"
    " Tensor(a!) weights, Tensor(b!) chosen) -> ()",
    cuda=_route_op,
    cpu=_route_op_reference,
)


def compile_cases() -> list[CompileCase]:
    """8 of 128 experts by softmax, and 8 of 256 by logistic scores with a bias."""
    types = {"logits": "*fp32", "weights": "*fp32", "chosen": "*i32", "stride": "i32:16"}
    common = {"NUM_CHOSEN": 8, "RENORMALIZE": True, "BLOCK_CHOSEN": 8}
    return [
        CompileCase(
            "moe route 128",
            _route_kernel,
            types,
            {
                **common,
                "bias": None,
                "NUM_EXPERTS": 128,
                "BY_LOGISTIC": False,
                "FACTOR": 1.0,
                "BLOCK": 128,
            },
            num_warps=1,
        ),
        CompileCase(
            "moe route 256 logistic",
            _route_kernel,
            types | {"bias": "*fp32"},
            {**common, "NUM_EXPERTS": 256, "BY_LOGISTIC": True, "FACTOR": 2.5, "BLOCK": 256},
            num_warps=1,
        ),
    ]
