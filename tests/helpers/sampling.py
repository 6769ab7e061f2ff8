"""Sampling written down a second time: plain Python integers and float64, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tokenmill.contracts.plan import NewRequestData
from tokenmill.contracts.request import TokenRules
from tokenmill.kernels import native
from tokenmill.sampling.choosers import NativeChooser, TorchChooser
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.metadata import SamplingMetadata
from tokenmill.sampling.row_params import RowSamplingParams
from tokenmill.sampling.sampler import Sampler, SamplerOutput
from tokenmill.sampling_params import SamplingParams

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def gumbel(seed: int, position: int, token_id: int) -> float:
    key = mix64((mix64((seed + GOLDEN) & MASK) + (position + 1) * GOLDEN) & MASK)
    bits = mix64((key + (token_id + 1) * GOLDEN) & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def filtered(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """Float64 logits after temperature, min_p, top-k and top-p; dropped tokens are -inf."""
    scaled = np.array(logits, np.float64) / params.temperature
    scaled -= scaled.max()
    if params.min_p:
        scaled[np.exp(scaled) < params.min_p] = -np.inf
    if params.top_k and params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        probabilities = np.exp(scaled) / np.exp(scaled).sum()
        mass = 0.0
        for token_id in sorted(range(len(scaled)), key=lambda i: (-scaled[i], i)):
            if mass >= params.top_p:
                scaled[token_id] = -np.inf
            mass += probabilities[token_id]
    return scaled


def sample(logits: Sequence[float], params: SamplingParams, seed: int, position: int) -> int:
    """The token for one place of the sequence."""
    if params.greedy:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    scores = filtered(logits, params)
    noisy = [score + gumbel(seed % 2**64, position, i) for i, score in enumerate(scores)]
    return int(np.argmax(noisy))


def edited(logits: Sequence[float], request: NewRequestData, tokens: Sequence[int]) -> np.ndarray:
    """Float64 logits behind all edits, of the token that follows `tokens`, prompt and output."""
    params, num_prompt = request.sampling_params, request.num_prompt_tokens
    out = np.array(logits, np.float64)
    output = list(tokens[num_prompt:])
    if params.allowed_token_ids is not None:
        out[[i for i in range(len(out)) if i not in params.allowed_token_ids]] = -np.inf
    rules = request.token_rules
    for *before, last in rules.bad_words if rules else []:
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            out[last] = -np.inf
    if len(output) < params.min_tokens:
        out[[i for i in request.stop_token_ids if i < len(out)]] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        out[token_id] += bias
    for token_id in set(tokens) if params.repetition_penalty != 1 else ():
        scale = params.repetition_penalty
        out[token_id] = out[token_id] / scale if out[token_id] > 0 else out[token_id] * scale
    for token_id in set(output):
        out[token_id] -= params.frequency_penalty * output.count(token_id)
        out[token_id] -= params.presence_penalty
    forced = forced_token(request, output)
    if forced is not None:
        out[:] = -np.inf
        out[forced] = 0.0
    return out


def forced_token(request: NewRequestData, output: list[int]) -> int | None:
    """What has to come now that reasoning has gone on for long enough."""
    budget, rules = request.sampling_params.thinking_token_budget, request.token_rules
    if budget is None or rules is None or rules.reasoning is None:
        return None
    marks = rules.reasoning
    thought = 0 if marks.open_after(request.token_ids[: request.num_prompt_tokens]) else None
    for place in range(1, len(output) + 1):
        seen = tuple(output[:place])
        if seen[-len(marks.end_ids) :] == marks.end_ids:
            thought = None
        elif seen[-len(marks.start_ids) :] == marks.start_ids:
            thought = 0
        elif thought is not None:
            thought += 1
    if thought is None or thought < budget:
        return None
    return marks.end_ids[min(thought - budget, len(marks.end_ids) - 1)]


def new_request(
    row: int = 0,
    *,
    seed: int = 0,
    token_ids: Sequence[int] = (1,),
    num_prompt_tokens: int | None = None,
    stop_token_ids: tuple[int, ...] = (),
    token_rules: TokenRules | None = None,
    **params: Any,
) -> NewRequestData:
    """A request in a row; its tokens are all prompt unless something else is said."""
    return NewRequestData(
        req_id=f"r{row}",
        row=row,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=0,
        block_ids=([0],),
        sampling_params=SamplingParams(**params),
        seed=seed,
        stop_token_ids=stop_token_ids,
        token_rules=token_rules,
    )


def metadata_of(
    requests: Sequence[NewRequestData],
    vocab_size: int,
    positions: Sequence[int] | None = None,
    num_output_tokens: Sequence[int] | None = None,
    grammar: GrammarMask | None = None,
    device: torch.device | None = None,
) -> SamplingMetadata:
    """Metadata of one logits row for each request.

    By default each samples what follows its tokens. `positions` says where that is, and
    `num_output_tokens` how many of those before are the output's, for requests whose tokens
    nobody looks at.
    """
    count = len(requests)
    table = RowSamplingParams(count, vocab_size)
    token_ids = np.zeros((count, max((len(r.token_ids) for r in requests), default=0)), np.int32)
    for row, request in enumerate(requests):
        table.set_row(row, request)
        token_ids[row, : len(request.token_ids)] = request.token_ids
    prompts = np.array([request.num_prompt_tokens for request in requests], np.int64)
    places = np.array([len(request.token_ids) for request in requests], np.int64)
    if positions is not None:
        places = np.array(positions, np.int64)
    if num_output_tokens is not None:
        prompts = places - np.array(num_output_tokens, np.int64)
    return table.gather(
        np.arange(count),
        places,
        prompts,
        torch.from_numpy(token_ids).to(device or "cpu"),
        grammar or GrammarMask(),
    )


def run_sampler(
    logits: torch.Tensor, requests: Sequence[NewRequestData], **kwargs: Any
) -> SamplerOutput:
    """Sample one token for each request; `logits` is left as it is."""
    metadata = metadata_of(requests, logits.shape[1], **kwargs)
    plain = Sampler(chooser=TorchChooser()).forward(logits.clone(), metadata)
    if native.is_available():
        found = Sampler(chooser=NativeChooser()).forward(logits.clone(), metadata)
        assert np.array_equal(found.is_valid, plain.is_valid)
        assert np.array_equal(found.token_ids[plain.is_valid], plain.token_ids[plain.is_valid])
    return plain
