"""What is asked of all replicas at once, with some of them down."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from helpers.core import create_request
from tokenmill.config.engine_config import CacheConfig
from tokenmill.contracts.request import AdapterInfo
from tokenmill.engine.replica import Replica
from tokenmill.engine.replicas import Replicas
from tokenmill.errors import AdapterError, EngineDeadError, InvalidRequestError

INFO = AdapterInfo("id", 8, 3)


def settled(result):
    done = Future()
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
    return done


@dataclass
class Client:
    answer: object
    asked: list = field(default_factory=list)

    def load_adapter(self, directory):
        self.asked.append(directory)
        return settled(self.answer)

    def reset_prefix_cache(self):
        return settled(self.answer)


@dataclass
class Supervisor:
    client: Client | None
    is_serving: bool = True
    has_given_up: bool = False

    def after_send(self):
        """Nothing hides behind what was sent."""


def replicas(*answers):
    """One for each answer to whatever it is asked; None is being started again."""
    supervisors = [
        Supervisor(None if each is None else Client(each), is_serving=each is not None)
        for each in answers
    ]
    made = [Replica(rank, each, max_running=4) for rank, each in enumerate(supervisors)]
    return Replicas(made, CacheConfig(16, 64, True, "float32"))


DEAD = EngineDeadError("dead")
BAD = AdapterError("bad")


@pytest.mark.parametrize("answers", [(INFO, INFO), (INFO, None), (DEAD, INFO)])
def test_an_adapter_is_read_by_all_that_can(answers):
    all_ = replicas(*answers)
    assert asyncio.run(all_.read_adapter("/x")) == INFO
    for replica in all_:
        assert replica.client is None or replica.client.asked == ["/x"]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((INFO, BAD), BAD),
        ((BAD, DEAD), BAD),
        ((DEAD, DEAD), DEAD),
        ((DEAD, None), DEAD),
    ],
)
def test_what_one_has_against_an_adapter_counts(answers, error):
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(replicas(*answers).read_adapter("/x"))


def test_nobody_can_read_an_adapter_while_all_are_down():
    with pytest.raises(EngineDeadError, match="being started again"):
        asyncio.run(replicas(None, None).read_adapter("/x"))


@pytest.mark.parametrize(
    ("answers", "done"),
    [((True, True), True), ((True, False), False), ((True, None), True), ((None, None), True)],
)
def test_caches_are_empty_when_all_are(answers, done):
    assert asyncio.run(replicas(*answers).reset_prefix_caches()) is done


def test_who_is_asked_for_has_it_unless_it_is_gone():
    all_ = replicas(True, None, True)
    request = create_request(list(range(40)))

    def rank(*among):
        return all_.choose(request, [all_[each] for each in among] or None).rank

    assert rank() == rank() == 0  # where its prefix is
    assert rank(1) == 1  # it waits there
    assert rank(1, 2) == 2
    all_[1].supervisor.has_given_up = True
    assert rank(1) != 1
    all_[1].supervisor.has_given_up = False
    all_[0].supervisor.is_serving = all_[2].supervisor.is_serving = False
    assert {rank() for _ in range(6)} == {0, 1, 2}  # all have the prefix by now, and all wait


def test_what_was_in_an_empty_cache_is_forgotten():
    all_ = replicas(True, True)
    request = create_request(list(range(40)))
    assert [all_.choose(request).rank for _ in range(3)] == [0, 0, 0]
    assert asyncio.run(all_.reset_prefix_caches())
    assert all_.choose(request).rank == 1  # who has waited longest
    all_.forget_prefixes(all_[1])
    assert all_.choose(request).rank == 0


def test_a_sequence_that_cannot_be_sent_ends_those_beside_it():
    """Before the core has them."""
    (replica,) = replicas(INFO)
    sent, failed = [], []

    class Keeper:
        def fail_sequence(self, request_id, error):
            failed.append(request_id)
            for each in ("0", "1"):
                replica.roster.remove(each)

    def add_requests(requests):
        if not failed:
            raise InvalidRequestError("this text has no bytes")
        sent.extend(each.request_id for each in requests)

    replica.client.add_requests = add_requests
    replica.serve(Keeper())
    for number in range(3):
        replica.roster.add(create_request(4, request_id=str(number)))
    replica.submit_due()
    assert (failed, sent) == (["0"], ["2"])
