"""The sampler of a GPU: the order of `sampler.py`, without waiting for the device.

All that a step's rows ask for goes there in one copy; the sampled ids stay, for the next step to
read, and a copy of them travels to the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.request import TokenLogprobs
from tokenmill.kernels.gpu.bitmask import apply_bitmask
from tokenmill.kernels.gpu.logprobs import row_logprobs
from tokenmill.kernels.gpu.sampling import SamplingWorkspace, num_rows_of_variants, sample
from tokenmill.sampling.edits import BannedTokens, BeforeSample, BiasedTokens, LogitsEdit, Penalties
from tokenmill.sampling.gpu_columns import COLUMNS, ColumnsOnDevice
from tokenmill.sampling.gpu_edits import PenaltyCounts, apply_edit
from tokenmill.sampling.gpu_filter import filtered
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.logprobs import LogprobsMode
from tokenmill.sampling.metadata import IntArray, RandomColumns, SamplingMetadata
from tokenmill.sampling.sampler import SamplerOutput

HostArray = npt.NDArray[np.generic]
Stage = Callable[[Sequence[HostArray]], list[torch.Tensor]]
"""Host arrays to the device, in one copy."""
ToHost = Callable[[Sequence[torch.Tensor]], Callable[[], list[HostArray]]]
"""Orders a copy of tensors to the host; what it returns waits for the copy."""

_ROWS_LISTED_AT_ONCE = 32
"""Rows whose best tokens are sought at once: each takes 16 bytes a token of the vocabulary."""


@dataclass(slots=True)
class GpuSamples:
    """Sampled tokens on the device, and on their way to the host."""

    token_ids: torch.Tensor
    """int64 [n]; where a row has no best logit, some id of the vocabulary"""
    arrive: Callable[[], list[HostArray]]
    """Waits for ids, validity, and the scores of rows that asked."""
    asked: IntArray
    """Rows that asked for log-probabilities."""
    num_best: IntArray
    """How many of the best tokens each of them lists."""
    named: Sequence[IntArray | None] = ()
    """Or the ids that they have named."""
    _on_host: SamplerOutput | None = field(default=None)

    def to_host(self) -> SamplerOutput:
        """Wait for them."""
        if self._on_host is None:
            token_ids, is_valid, *scores = self.arrive()
            logprobs = _read_scores(scores, self.num_best, self.named) if scores else []
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
        mode: LogprobsMode | None = None,
    ) -> None:
        """`max_num_rows` is the most logits rows that a step samples from."""
        self._mode = mode or LogprobsMode()
        self._penalty_counts = PenaltyCounts(vocab_size, device)
        self._columns = ColumnsOnDevice()
        self._stage = stage
        self._to_host = to_host
        self._vocab_size = vocab_size
        self._device = device
        self._allocate(max_num_rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what a step may need, so that no request waits for it."""
        for num_rows in num_rows_of_variants(len(self._workspace.state), self._vocab_size):
            for num_wishes in range(3):
                logits = torch.zeros((num_rows, self._vocab_size), device=self._device)
                metadata = _blank_metadata(num_rows, self._vocab_size, num_wishes, self._device)
                self.forward(logits, metadata).to_host()

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> GpuSamples:
        """Sample one token from each row of float32 logits [n, vocab_size], which are edited."""
        asked = np.flatnonzero(metadata.wants_logprobs)
        num_best = metadata.num_logprobs[asked]
        arrays = self._columns.arrays(metadata) | _mask_of(metadata)
        if asked.size:
            arrays |= {"asked": asked, "listed": _order(num_best)}
            arrays |= _named_ids(metadata, asked)
        of_edits = [edit.arrays() for edit in metadata.edits]
        for number, given in enumerate(of_edits):
            arrays |= {f"{number}.{name}": array for name, array in given.items()}
        tensors = self._stage(list(arrays.values())) if arrays else []
        staged = self._columns.complete(dict(zip(arrays, tensors, strict=True)))
        if "bitmask" in staged:
            apply_bitmask(logits, staged["bitmask"], staged["masked_rows"])
        raw = logits
        are_all_asked = asked.size == len(logits)
        if asked.size and not self._mode.is_processed and (metadata.edits or not are_all_asked):
            raw = logits[staged["asked"]]
        for number, (edit, given) in enumerate(zip(metadata.edits, of_edits, strict=True)):
            there = {name: staged[f"{number}.{name}"] for name in given}
            apply_edit(edit, logits, there, metadata.token_ids, self._penalty_counts)
        token_ids, is_valid = self._choose(logits, staged)
        found = [token_ids, is_valid]
        if asked.size:
            chosen = token_ids if are_all_asked else token_ids[staged["asked"]]
            if self._mode.is_processed:
                raw = _processed(logits, chosen, staged)
            found += _score(raw, chosen, num_best, staged["listed"], self._mode)
            if "named_ids" in staged:
                found += _score_named(raw, found[3], staged, self._mode)
        named = [metadata.listed_ids.get(row) for row in asked.tolist()]
        return GpuSamples(token_ids, self._to_host(found), asked, num_best, named)

    def score(
        self, logits: torch.Tensor, token_ids: IntArray, num_best: IntArray
    ) -> tuple[list[TokenLogprobs], list[bool]]:
        """Raw log-probabilities of given tokens; waits for the device."""
        chosen, listed = self._stage([token_ids, _order(num_best)])
        scores = self._to_host(_score(logits, chosen, num_best, listed, self._mode))()
        return _read_scores(scores, num_best), np.isfinite(_best_logits(scores)).tolist()

    def _choose(
        self, logits: torch.Tensor, staged: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token_ids, is_valid), each [n]."""
        num_rows = len(logits)
        if num_rows > len(self._workspace.state):
            self._allocate(num_rows)
        any_random = "seed" in staged
        columns = staged if any_random else self._unused_columns
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        is_valid = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
        sample(
            logits,
            **{name: columns[name][:num_rows] for name in COLUMNS},
            token_ids=token_ids,
            is_valid=is_valid,
            workspace=self._workspace,
            any_random=any_random,
            any_filter=any_random and self._columns.any_filter,
        )
        return token_ids, is_valid

    def _allocate(self, max_num_rows: int) -> None:
        self._workspace = SamplingWorkspace.allocate(max_num_rows, self._vocab_size, self._device)
        blank = _blank_metadata(max_num_rows, self._vocab_size, 1, self._device)
        unused = ColumnsOnDevice().arrays(blank)
        self._unused_columns = {
            name: torch.from_numpy(unused[name]).to(self._device) for name in COLUMNS
        }
        """For steps whose rows are all greedy: nothing reads them."""


def _mask_of(metadata: SamplingMetadata) -> dict[str, HostArray]:
    """The grammar's masks, and the rows that they are of."""
    grammar = metadata.grammar
    if not grammar.logits_rows.size:
        return {}
    return {"masked_rows": grammar.logits_rows, "bitmask": grammar.bitmask}


def _named_ids(metadata: SamplingMetadata, asked: IntArray) -> dict[str, HostArray]:
    """Pairs of rows that ask for log-probabilities, and ids that they have named."""
    if not metadata.listed_ids:
        return {}
    pairs = [(i, metadata.listed_ids.get(row)) for i, row in enumerate(asked.tolist())]
    found = [(i, ids) for i, ids in pairs if ids is not None]
    rows = np.array([i for i, _ in found], np.int64)
    return {
        "named_rows": np.repeat(rows, [len(ids) for _, ids in found]),
        "named_ids": np.concatenate([ids for _, ids in found]),
    }


def _blank_metadata(
    num_rows: int, vocab_size: int, num_wishes: int, device: torch.device
) -> SamplingMetadata:
    """Rows that are greedy, that draw at random, or that ask for all there is."""
    asks_all = num_wishes == 2
    return SamplingMetadata(
        is_greedy=np.full(num_rows, num_wishes == 0),
        random=RandomColumns(
            temperature=np.ones(num_rows, np.float32),
            top_k=np.full(num_rows, asks_all, np.int64),
            top_p=np.ones(num_rows, np.float64),
            min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros(num_rows, np.uint64),
            position=np.zeros(num_rows, np.int64),
        ),
        wants_logprobs=np.full(num_rows, asks_all),
        num_logprobs=np.ones(num_rows, np.int64),
        edits=_blank_edits() if asks_all else (),
        token_ids=torch.zeros((1, 1), dtype=torch.int32, device=device),
        grammar=GrammarMask(np.zeros(1, np.int64), np.full((1, -(-vocab_size // 32)), -1, np.int32))
        if asks_all
        else GrammarMask(),
    )


def _blank_edits() -> tuple[LogitsEdit, ...]:
    """Edits of the first row, one for each kernel; they read a token."""
    first, zeros = np.zeros(1, np.int64), np.zeros(1, np.float32)
    before = BeforeSample(
        logits_rows=first, table_rows=first, positions=first + 1, num_prompt_tokens=first
    )
    return (
        BannedTokens(first, first),
        BiasedTokens(first, first, zeros),
        Penalties(before, zeros + 1, zeros, zeros),
    )


# ---- log-probabilities --------------------------------------------------------------------------


def _order(num_best: IntArray) -> IntArray:
    """Rows in the order in which their best tokens are listed: those that list as many together."""
    return np.argsort(num_best, kind="stable")


def _groups(num_best: IntArray) -> Iterator[tuple[int, int, int]]:
    """(how many each lists, begin, end) of the groups of `_order`, none of them large."""
    counts, starts = np.unique(np.sort(num_best), return_index=True)
    ends = [*starts[1:].tolist(), len(num_best)]
    for count, start, end in zip(counts.tolist(), starts.tolist(), ends, strict=True):
        if count == 0:
            continue
        for begin in range(start, end, _ROWS_LISTED_AT_ONCE):
            yield count, begin, min(begin + _ROWS_LISTED_AT_ONCE, end)


def _score(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    num_best: IntArray,
    order: torch.Tensor,
    mode: LogprobsMode,
) -> list[torch.Tensor]:
    """Chosen ids, what normalises the rows, the ids' log-probabilities and ranks, each [m]; then
    (ids, log-probabilities) of the best tokens of each group.
    """
    num_rows = len(logits)
    normalizer = torch.empty((num_rows, 2), device=logits.device)
    logprob = torch.empty(num_rows, device=logits.device)
    rank = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    row_logprobs(logits, chosen, normalizer, logprob, rank)
    if mode.are_logits:
        logprob = logits.gather(1, chosen.long().unsqueeze(1)).squeeze(1)
    scores = [chosen, normalizer, logprob, rank]
    for count, begin, end in _groups(num_best):
        rows = order[begin:end]
        ids, values = _best_tokens(logits[rows], normalizer[rows], count)
        scores += [ids, logits[rows.unsqueeze(1), ids] if mode.are_logits else values]
    return scores


def _score_named(
    logits: torch.Tensor,
    normalizer: torch.Tensor,
    staged: dict[str, torch.Tensor],
    mode: LogprobsMode,
) -> list[torch.Tensor]:
    """(values, ranks) of the ids that rows have named, each [pairs]."""
    rows, ids = staged["named_rows"], staged["named_ids"]
    values = logits[rows, ids]
    ranks = [(logits[rows[part]] >= values[part].unsqueeze(1)).sum(1) for part in _parts(len(rows))]
    if not mode.are_logits:
        values = values - normalizer[rows, 0] - normalizer[rows, 1]
    return [values, torch.cat(ranks)]


def _processed(
    logits: torch.Tensor, chosen: torch.Tensor, staged: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What tokens were drawn from: the rows that ask, [m, vocab_size]."""
    asked = staged["asked"]
    if "seed" not in staged:  # all are greedy
        return logits[asked]
    columns = {name: staged[name][asked] for name in COLUMNS}
    parts = [
        filtered(
            logits[asked[part]],
            chosen[part],
            {name: column[part] for name, column in columns.items()},
        )
        for part in _parts(len(asked))
    ]
    return torch.cat(parts)


def _parts(count: int) -> list[slice]:
    """So many rows, some of them at once."""
    starts = range(0, count, _ROWS_LISTED_AT_ONCE)
    return [slice(start, start + _ROWS_LISTED_AT_ONCE) for start in starts]


def _best_tokens(
    logits: torch.Tensor, normalizer: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 ids, log-probabilities) of the best of each row, in falling order, equal ones by id.

    The logits are overwritten.
    """
    logprobs = logits.sub_(normalizer[:, :1]).sub_(normalizer[:, 1:])
    # No log-probability is above 0, so its bits without the sign grow as it falls. In front of the
    # id they make keys of which no two are equal, so it is clear which ones topk takes.
    keys = logprobs.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    keys.mul_(-(1 << 32)).sub_(torch.arange(logits.shape[1], device=logits.device))
    ids = keys.topk(count).values.neg_().bitwise_and_(0xFFFFFFFF)
    return ids.int(), logprobs.gather(1, ids)


def _best_logits(scores: Sequence[HostArray]) -> npt.NDArray[np.float32]:
    """Of each row; not finite where the row has a NaN, an infinity, or no finite logit at all."""
    return scores[1][:, 0].astype(np.float32)


def _read_scores(
    scores: Sequence[HostArray], num_best: IntArray, named: Sequence[IntArray | None] = ()
) -> list[TokenLogprobs]:
    """What `_score` and, of rows that have named ids, `_score_named` have found; by row."""
    if any(ids is not None for ids in named):
        *scores, named_values, named_ranks = scores
    chosen, _, logprob, rank, *best = scores
    ids = [[token] for token in chosen.tolist()]
    values = [[value] for value in logprob.tolist()]
    order = _order(num_best).tolist()
    pairs = zip(best[::2], best[1::2], strict=True)
    for (_, begin, end), (best_ids, best_values) in zip(_groups(num_best), pairs, strict=True):
        listed = zip(order[begin:end], best_ids.tolist(), best_values.tolist(), strict=True)
        for row, row_ids, row_values in listed:
            ids[row] += row_ids
            values[row] += row_values
    entries = [TokenLogprobs(*row) for row in zip(ids, values, rank.tolist(), strict=True)]
    begin = 0
    for entry, its_ids in zip(entries, named, strict=bool(named)):
        if its_ids is not None:
            end = begin + len(its_ids)
            entry.token_ids += its_ids.tolist()
            entry.logprobs += named_values[begin:end].tolist()
            entry.ranks = named_ranks[begin:end].tolist()
            begin = end
    return entries
