"""KV outside the pool of the fake device: exact, and as late or as incomplete as a test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from helpers.fake_executor import FakeExecutor
from tokenmill.contracts.kv_transfer import BlockCopy, RemoteOrigin, Transferred

ROOT = b"r" * 32
Content = list[tuple[int, int]]
"""(Group, digest) of each slot of a block."""


@dataclass
class Job:
    job_id: int
    blocks: list[BlockCopy]
    delay: int
    """Looks at `has_finished` until it is done."""


@dataclass
class FakeTransfer:
    """A `KVTransfer` that copies when a job ends. While a load is under way its blocks hold what no
    row may read; that nobody writes to them is checked.
    """

    executor: FakeExecutor | None = None
    random: random.Random = field(default_factory=random.Random)
    max_delay: int = 0
    loss: float = 0.0
    """Share of the blocks that a load does not find after all."""
    fails_requests: bool = False
    keeps_blocks: bool = True
    root: bytes = ROOT
    kept: dict[bytes, Content] = field(default_factory=dict)
    remote: dict[str, dict[bytes, Content]] = field(default_factory=dict)
    """What other engines hold, by request."""
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    held: dict[int, Job] = field(default_factory=dict)
    origins: dict[int, RemoteOrigin] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    finished: list[Transferred] = field(default_factory=list)
    is_stuck: bool = False
    """Nothing ends."""
    num_loaded: int = 0
    num_saved: int = 0
    num_shutdowns: int = 0

    def has(self, key: bytes) -> bool:
        return key in self.kept

    def load(self, job_id: int, blocks: Sequence[BlockCopy], origin: RemoteOrigin | None) -> None:
        for block in blocks:
            for slot in self._slots(block):
                self.executor.slots[slot] = ("load", job_id)
        if origin is not None:
            self.origins[job_id] = origin
        self.loads.append(self._job(job_id, blocks))

    def save(self, job_id: int, blocks: Sequence[BlockCopy]) -> None:
        self.saves.append(self._job(job_id, blocks))

    def hold(self, job_id: int, request_id: str, blocks: Sequence[BlockCopy]) -> dict[str, object]:
        self.held[job_id] = self._job(job_id, blocks)
        self.remote[request_id] = {each.key: self._content(each) for each in blocks}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "other",
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        }

    def release(self, origin: RemoteOrigin) -> None:
        self.released.append(origin.remote_request_id)

    def fetched(self, job_id: int) -> None:
        """Another engine has what is held."""
        job = self.held.pop(job_id)
        for block in job.blocks:  # nobody has written to it
            assert self._content(block)
        self.finished.append(Transferred(job_id))

    def has_finished(self) -> bool:
        self._work()
        return bool(self.finished)

    def take_finished(self) -> list[Transferred]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, seconds: float) -> None:
        """Time goes by with every look."""

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def _job(self, job_id: int, blocks: Sequence[BlockCopy]) -> Job:
        return Job(job_id, list(blocks), self.random.randint(0, self.max_delay))

    def _work(self) -> None:
        for jobs, end in ((self.loads, self._end_load), (self.saves, self._end_save)):
            for job in [] if self.is_stuck else jobs[:]:
                job.delay -= 1
                if job.delay < 0:
                    jobs.remove(job)
                    self.finished.append(end(job))

    def _end_load(self, job: Job) -> Transferred:
        origin = self.origins.pop(job.job_id, None)
        remote = {} if origin is None else self.remote.get(origin.remote_request_id, {})
        copied = set()
        for block in job.blocks:
            slots = self._slots(block)
            assert all(self.executor.slots[slot] == ("load", job.job_id) for slot in slots), (
                "a step has written to a block that is being loaded"
            )
            content = self.kept.get(block.key) or remote.get(block.key)
            if content is None or self.random.random() < self.loss:
                continue
            self.executor.slots.update(zip(slots, content, strict=True))
            copied.add(block.key)
        self.num_loaded += len(copied)
        lost = len(job.blocks) - len(copied)
        return Transferred(job.job_id, frozenset(copied), f"{lost} are lost" if lost else None)

    def _end_save(self, job: Job) -> Transferred:
        for block in job.blocks:
            content = self._content(block)
            assert self.kept.setdefault(block.key, content) == content, "one key, two contents"
        self.num_saved += len(job.blocks)
        return Transferred(job.job_id, frozenset(each.key for each in job.blocks))

    def _content(self, block: BlockCopy) -> Content:
        content = [self.executor.slots[slot] for slot in self._slots(block)]
        assert {group for group, _ in content} == {block.group}, "a block of another group"
        return content

    def _slots(self, block: BlockCopy) -> list[tuple[int, int]]:
        return [(block.block_id, offset) for offset in range(self.executor.block_size)]
