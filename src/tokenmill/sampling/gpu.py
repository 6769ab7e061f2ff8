"""The sampler of a GPU: the order of `sampler.py`, without waiting for the device.

All columns of a step go there in one copy; the sampled ids stay, for the next step to read, and a
copy of them travels to the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.request import TokenLogprobs
from tokenmill.kernels.gpu.bitmask import apply_bitmask, ban_tokens
from tokenmill.kernels.gpu.sampling import SamplingWorkspace, sample
from tokenmill.sampling.logprobs import raw_logprobs
from tokenmill.sampling.metadata import IntArray, SamplingMetadata
from tokenmill.sampling.sampler import SamplerOutput

Stage = Callable[[Sequence[npt.NDArray[np.generic]]], list[torch.Tensor]]
"""Host arrays to the device, in one copy."""
ToHost = Callable[[Sequence[torch.Tensor]], Callable[[], list[npt.NDArray[np.generic]]]]
"""Orders a copy of tensors to the host; what it returns waits for the copy."""


@dataclass(slots=True)
class GpuSamples:
    """Sampled tokens on the device, and on their way to the host."""

    token_ids: torch.Tensor
    """int64 [n]"""
    arrive: Callable[[], list[npt.NDArray[np.generic]]]
    """Waits for ids, validity, and the listed log-probabilities."""
    asked: IntArray
    """Rows that asked for log-probabilities."""
    num_best: IntArray
    _on_host: SamplerOutput | None = field(default=None)

    def to_host(self) -> SamplerOutput:
        if self._on_host is None:
            token_ids, is_valid, *listed = self.arrive()
            logprobs = _read_listed(listed, self.num_best) if listed else []
            self._on_host = SamplerOutput(
                token_ids=token_ids.astype(np.int64),
                is_valid=is_valid.astype(np.bool_),
                logprobs=dict(zip(self.asked.tolist(), logprobs, strict=True)),
            )
        return self._on_host


class GpuSampler:
    """Chooses tokens on the device."""

    def __init__(
        self,
        stage: Stage,
        to_host: ToHost,
        *,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`max_num_rows` is the most logits rows of a step that are sampled from."""
        self._stage = stage
        self._to_host = to_host
        self._workspace = SamplingWorkspace.allocate(max_num_rows, vocab_size, device)

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> GpuSamples:
        """Sample one token from each row of float32 logits [n, vocab_size], which are edited."""
        num_rows = len(logits)
        columns = metadata.random
        is_greedy, temperature, min_p, top_k, top_p, seed, position = self._stage(
            [
                metadata.is_greedy, columns.temperature, columns.min_p, columns.top_k,
                columns.top_p, columns.seed, columns.position,
            ]
        )  # fmt: skip
        if metadata.grammar.logits_rows.size:
            rows, bitmask = self._stage([metadata.grammar.logits_rows, metadata.grammar.bitmask])
            apply_bitmask(logits, bitmask, rows)
        asked = np.flatnonzero(metadata.wants_logprobs)
        raw = logits[self._stage([asked])[0]] if asked.size else None
        if metadata.banned_token_ids:
            rows, ids = self._stage(_pairs(metadata.banned_token_ids))
            ban_tokens(logits, rows, ids)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        is_valid = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
        is_random = ~metadata.is_greedy
        sample(
            logits,
            is_greedy=is_greedy,
            temperature=temperature,
            min_p=min_p,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            position=position,
            token_ids=token_ids,
            is_valid=is_valid,
            workspace=self._workspace,
            any_random=bool(is_random.any()),
            any_filter=bool(
                ((columns.top_k > 0) | (columns.top_p < 1) | (columns.min_p > 0))[is_random].any()
            ),
        )
        num_best = metadata.num_logprobs[asked]
        listed: list[torch.Tensor] = []
        if raw is not None:
            chosen = token_ids[self._stage([asked])[0]]
            listed = _list_logprobs(raw_logprobs(raw), chosen, int(num_best.max()))
        return GpuSamples(
            token_ids=token_ids,
            arrive=self._to_host([token_ids, is_valid, *listed]),
            asked=asked,
            num_best=num_best,
        )

    def score(
        self, logits: torch.Tensor, token_ids: IntArray, num_best: IntArray
    ) -> tuple[list[TokenLogprobs], list[bool]]:
        """Raw log-probabilities of given tokens; waits for the device."""
        chosen = self._stage([token_ids])[0]
        listed = _list_logprobs(raw_logprobs(logits), chosen, int(num_best.max(initial=0)))
        is_finite, *arrived = self._to_host([logits.amax(-1).isfinite(), *listed])()
        return _read_listed(arrived, num_best), is_finite.tolist()


def _pairs(by_row: dict[int, IntArray]) -> list[npt.NDArray[np.generic]]:
    rows = np.repeat(np.array(list(by_row), np.int64), [len(ids) for ids in by_row.values()])
    return [rows, np.concatenate(list(by_row.values()))]


def _list_logprobs(
    logprobs: torch.Tensor, chosen: torch.Tensor, num_best: int
) -> list[torch.Tensor]:
    """Of each row of log-probabilities [n, vocab_size]: the chosen token's, its rank, and the ids
    and values of the best, in falling order, equal ones by their ids.
    """
    own = logprobs.gather(1, chosen.unsqueeze(1))
    rank = (logprobs >= own).sum(-1)
    if num_best:
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        values, ids = values[:, :num_best].contiguous(), ids[:, :num_best].contiguous()
    else:
        values, ids = own[:, :0], chosen.unsqueeze(1)[:, :0]
    return [chosen, own.squeeze(1), rank, ids, values]


def _read_listed(
    listed: Sequence[npt.NDArray[np.generic]], num_best: IntArray
) -> list[TokenLogprobs]:
    chosen, own, rank, ids, values = (array.tolist() for array in listed)
    return [
        TokenLogprobs(
            token_ids=[chosen[i], *ids[i][:count]],
            logprobs=[own[i], *values[i][:count]],
            rank=rank[i],
        )
        for i, count in enumerate(num_best.tolist())
    ]
