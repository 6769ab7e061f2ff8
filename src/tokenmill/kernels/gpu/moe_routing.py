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
    Where only experts of some groups can be chosen, neighbours form a group.
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
    assert num_experts % routing.num_groups == 0
    assert routing.num_best_groups <= routing.num_groups
    assert routing.group_best in (1, 2)
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
        # All groups may be chosen from, or there is one: the experts themselves are enough.
        NUM_GROUPS=routing.num_groups if routing.num_best_groups < routing.num_groups else 1,
        NUM_BEST_GROUPS=routing.num_best_groups,
        GROUP_BEST=routing.group_best,
        BLOCK_GROUPS=next_power_of_2(routing.num_groups),
        BLOCK=next_power_of_2(num_experts),
        BLOCK_CHOSEN=next_power_of_2(routing.num_chosen),
        num_warps=1,
    )


@triton.jit
def _within_best_groups(
    keys: tl.tensor,
    ids: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_BEST_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Keys of experts [BLOCK], -inf for those of other groups than the best.

    A group is as good as the sum of its best GROUP_BEST keys.
    """
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    groups = tl.arange(0, BLOCK_GROUPS)
    strengths = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own = tl.where(ids // GROUP_SIZE == group, keys, float("-inf"))
        strength = tl.max(own, axis=0)
        if GROUP_BEST == 2:
            first = tl.min(tl.where(own == strength, ids, BLOCK), axis=0)
            strength += tl.max(tl.where(ids == first, float("-inf"), own), axis=0)
        # Above groups that are taken already, however low its experts are.
        strengths = tl.where(groups == group, tl.maximum(strength, _LOWEST), strengths)
    kept = ids < 0
    for _ in tl.static_range(NUM_BEST_GROUPS):
        best = tl.min(tl.where(strengths == tl.max(strengths, axis=0), groups, BLOCK_GROUPS), 0)
        kept = kept | (ids // GROUP_SIZE == best)
        strengths = tl.where(groups == best, float("-inf"), strengths)
    return tl.where(kept, keys, float("-inf"))


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
    NUM_GROUPS: tl.constexpr,
    NUM_BEST_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
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
    if NUM_GROUPS > 1:
        keys = _within_best_groups(
            keys, ids, NUM_EXPERTS, NUM_GROUPS, NUM_BEST_GROUPS, GROUP_BEST, BLOCK, BLOCK_GROUPS
        )
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


def _routing(
    num_chosen: int, by_logistic: bool, renormalize: bool, groups: list[int], factor: float
) -> Routing:
    num_groups, best_groups, group_best = groups
    return Routing(
        num_chosen, by_logistic, renormalize, num_groups, best_groups, group_best, factor
    )


def _route_op(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    by_logistic: bool,
    renormalize: bool,
    groups: list[int],
    factor: float,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    routing = _routing(chosen.shape[1], by_logistic, renormalize, groups, factor)
    route(logits, bias, weights, chosen, routing)


def _route_op_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    by_logistic: bool,
    renormalize: bool,
    groups: list[int],
    factor: float,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    routing = _routing(chosen.shape[1], by_logistic, renormalize, groups, factor)
    for out, found in zip((weights, chosen), route_reference(logits, routing, bias), strict=True):
        out.copy_(found)


define_op(
    "route(Tensor logits, Tensor? bias, bool by_logistic, bool renormalize, int[3] groups,"
    " float factor, Tensor(a!) weights, Tensor(b!) chosen) -> ()",
    cuda=_route_op,
    cpu=_route_op_reference,
)


def compile_cases() -> list[CompileCase]:
    """8 of 128 experts by softmax; 8 of 256 by logistic scores with a bias, in groups or not."""
    types = {"logits": "*fp32", "weights": "*fp32", "chosen": "*i32", "stride": "i32:16"}
    common = {"NUM_CHOSEN": 8, "RENORMALIZE": True, "BLOCK_CHOSEN": 8}
    no_groups = {"NUM_GROUPS": 1, "NUM_BEST_GROUPS": 1, "GROUP_BEST": 1, "BLOCK_GROUPS": 1}
    groups = {"NUM_GROUPS": 8, "NUM_BEST_GROUPS": 4, "GROUP_BEST": 2, "BLOCK_GROUPS": 8}
    logistic = {**common, "NUM_EXPERTS": 256, "BY_LOGISTIC": True, "FACTOR": 2.5, "BLOCK": 256}
    return [
        CompileCase(
            "moe route 128",
            _route_kernel,
            types,
            {
                **common,
                **no_groups,
                "bias": None,
                "NUM_EXPERTS": 128,
                "BY_LOGISTIC": False,
                "FACTOR": 1.0,
                "BLOCK": 128,
            },
            num_warps=1,
        ),
        *(
            CompileCase(
                f"moe route 256 logistic{name}",
                _route_kernel,
                types | {"bias": "*fp32"},
                logistic | some,
                num_warps=1,
            )
            for name, some in (("", no_groups), (" in groups", groups))
        ),
    ]
