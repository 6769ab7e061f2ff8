"""A head that drafts beside a model, both on caches that hold token ids: hidden states are
checksums of the text so far, so that each entry of the head shows whose state it was given.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from helpers.worker import ERROR_TOKEN, NAN_TOKEN, Host, ToyModel, generate_alone, make_worker
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.features.spec.draft_head import HeadDrafter
from tokenmill.features.spec.draft_model import DraftLimits
from tokenmill.worker.draft_head import HeadedRunner

NUM_DRAFTS = 3
Entry = tuple[int, int, int]
"""The checksum that was fed, the entry's number, its token."""


class Feed:
    """Remembers what the entries of each pass were given."""

    def __init__(self, model: ToyModel, head: ToyModel) -> None:
        self.entries: list[Entry] = []
        self.fed_back: list[list[int]] = []
        self._left = torch.empty(0, 1, dtype=torch.int64)
        self._fed: list[int] = []
        forward, enter = model.forward, head.forward

        def compute(*arguments: Any, **inputs: Any) -> torch.Tensor:
            self._left = forward(*arguments, **inputs)
            return self._left

        def pass_over(ids: torch.Tensor, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
            given = zip(self._fed, positions.tolist(), ids.tolist(), strict=True)
            self.entries += given if self._fed else ()
            self._fed = []
            return enter(ids, positions, **inputs)

        model.forward, head.forward = compute, pass_over  # type: ignore[method-assign]

    def feed_from_model(self, places: np.ndarray) -> None:
        self._fed = self._left.flatten()[torch.from_numpy(places)].tolist()

    def feed_back(self, places: np.ndarray) -> None:
        self.fed_back.append(places.tolist())


class Beside:
    """A model's worker with a head, and a host that plans for it."""

    def __init__(self, seed: int = 0, max_model_len: int = 256) -> None:
        head_worker, head = make_worker()
        limits = DraftLimits(
            max_num_seqs=8,
            max_num_batched_tokens=4096,
            max_model_len=max_model_len,
            block_size=4,
            num_blocks=200,
            kv_group=0,
            num_groups=1,
        )
        worker, model = make_worker(kind=HeadedRunner)
        self.feed = Feed(model, head)
        drafter = HeadDrafter(head_worker.runner, self.feed, limits, NUM_DRAFTS, adaptive=False)
        worker.runner._drafter, worker.runner._drafts = drafter, True
        self.host = Host(worker, np.random.default_rng(seed))
        self.num_drafts = 0

    def step(self, **kwargs: Any) -> ModelRunnerOutput:
        """Run a step, and check what the head was given and what it has drafted."""
        self.feed.entries.clear()
        output = self.host.step(**kwargs)
        texts = [request.tokens for request in self.host.requests.values()]
        for checksum, number, token in self.feed.entries:
            assert any(
                checksum_of(text[: number + 1]) == checksum and text[number + 1] == token
                for text in texts
                if len(text) > number + 1
            ), (number, token)
        for req_id, drafts in output.draft_token_ids.items():
            text = self.host.requests[req_id].tokens
            assert drafts == generate_alone(text[1:], len(drafts), temperature=0.0)
            self.num_drafts += len(drafts)
        return output


def checksum_of(text: Sequence[int]) -> int:
    return zlib.crc32(np.array(text, np.int64).tobytes())


def test_prompts_in_pieces_are_followed_and_drafts_come_behind_the_last() -> None:
    beside = Beside()
    beside.host.add("a", [3, 1, 4, 1, 5, 9, 2], temperature=0.0)
    beside.host.add("b", [2], temperature=0.0)
    assert "a" not in beside.step(num_tokens={"a": 4, "b": 1}).draft_token_ids
    assert [number for _, number, _ in beside.feed.entries] == [0, 1, 2, 3, 0]
    output = beside.step()
    assert [number for _, number, _ in beside.feed.entries] == [4, 5, 6, 1]
    # There is room in the blocks for all of a's, and b's last one needs no slot.
    assert {name: len(drafts) for name, drafts in output.draft_token_ids.items()} == {
        "a": 1, "b": 2
    }  # fmt: skip
    assert beside.feed.fed_back[-1] == [3]


def test_nothing_is_computed_behind_its_context() -> None:
    beside = Beside(max_model_len=7)
    beside.host.add("a", [3, 1, 4, 1, 5], temperature=0.0)
    assert len(beside.step().draft_token_ids["a"]) == 1
    numbers = []
    for _ in range(4):
        assert beside.step().draft_token_ids == {}
        numbers += [number for _, number, _ in beside.feed.entries]
    assert numbers == [5, 6]


def test_texts_without_usable_logits_get_no_drafts_and_harm_nobody() -> None:
    beside = Beside()
    beside.host.add("a", [3, NAN_TOKEN, 4], temperature=0.0)
    beside.host.add("b", [3, 1, 4], temperature=0.0)
    output = beside.host.step()
    assert list(output.draft_token_ids) == ["b"]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_entries_have_the_states_of_their_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    beside, number = Beside(seed), 0
    host, drafts = beside.host, {}
    for _ in range(50):
        if len(host.requests) < 5:
            name, number = f"r{number}", number + 1
            prompt = rng.integers(0, 80, rng.integers(1, 25)).tolist()
            if rng.random() < 0.1:
                prompt[-1] = ERROR_TOKEN  # the step is run again request by request
            host.add(name, prompt, temperature=0.0)
        for name in list(host.requests):
            request = host.requests[name]
            if request.error or len(request.tokens) > 60:
                host.leave_row(name)
                del host.requests[name]
            elif rng.random() < 0.1:
                host.leave_row(name)  # preempted
                drafts.pop(name, None)
        chosen = {
            name: int(rng.integers(1, host.num_pending(name) + 1))
            for name in host.requests
            if rng.random() < 0.8
        }
        if not chosen:
            continue
        sent = {
            name: drafts[name]
            for name, count in chosen.items()
            if name in drafts and count == host.num_pending(name)
        }
        output = beside.step(num_tokens=chosen, drafts=sent)
        drafts = {name: each for name, each in drafts.items() if name not in chosen}
        for name, each in output.draft_token_ids.items():
            wrong = rng.random() < 0.5
            drafts[name] = [*each[:-1], (each[-1] + 1) % 80] if wrong else each
    assert beside.num_drafts > 30
