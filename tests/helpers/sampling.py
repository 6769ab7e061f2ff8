"""Sampling written down a second time: plain Python integers and float64, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tokenmill.contracts.plan import NewRequestData
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


def new_request(
    row: int = 0,
    *,
    seed: int = 0,
    token_ids: Sequence[int] = (1,),
    stop_token_ids: tuple[int, ...] = (),
    **params: Any,
) -> NewRequestData:
    return NewRequestData(
        req_id=f"r{row}",
        row=row,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=([0],),
        sampling_params=SamplingParams(**params),
        seed=seed,
        stop_token_ids=stop_token_ids,
    )


def metadata_of(
    requests: Sequence[NewRequestData],
    vocab_size: int,
    positions: Sequence[int] | None = None,
    num_output_tokens: Sequence[int] | None = None,
    grammar: GrammarMask | None = None,
) -> SamplingMetadata:
    """Metadata of one logits row for each request."""
    table = RowSamplingParams(len(requests), vocab_size)
    for row, request in enumerate(requests):
        table.set_row(row, request)
    count = len(requests)
    places = np.array([1] * count if positions is None else positions, np.int64)
    outputs = np.array([0] * count if num_output_tokens is None else num_output_tokens, np.int64)
    return table.gather(np.arange(count), places, places - outputs, grammar or GrammarMask())


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
