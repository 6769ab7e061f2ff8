"""When a backend is left alone, for how long, and what a body tells about who should get it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.router.backend import Backend, Role, make_backends
from tokenmill.entrypoints.router.policies import Picker
from tokenmill.entrypoints.router.routing_keys import BLOCK_BYTES, RoutingKeys, read_keys
from tokenmill.errors import ConfigError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def backend(clock: Clock, **args: object) -> Backend:
    made = Backend(0, "http://a", Role.ALL, RouteArgs(backend=["http://a"], **args), clock=clock)
    made.answered_check(well=True)
    return made


def test_it_is_down_after_two_questions_without_an_answer():
    fresh = Backend(0, "http://a", Role.ALL, RouteArgs(backend=["http://a"]))
    assert not fresh.is_available
    fresh.answered_check(well=True)
    assert fresh.is_available
    fresh.answered_check(well=False)
    assert fresh.is_available
    fresh.answered_check(well=False)
    assert not fresh.is_available
    fresh.answered_check(well=True)
    assert fresh.is_available


def test_each_ejection_lasts_twice_as_long_up_to_a_limit_until_an_answer_is_good():
    clock = Clock()
    made = backend(clock, max_eject_seconds=5.0)
    lengths = []
    for _ in range(5):
        made.note_unreachable()
        lengths.append(made.seconds_away)
        clock.now += made.seconds_away
        assert made.is_available
    assert lengths == [1, 2, 4, 5, 5]
    made.note_status(200, None, is_last=False)
    made.note_unreachable()
    assert made.seconds_away == 1
    assert made.num_ejections == 6


def test_failures_count_only_in_a_row_and_never_against_the_last_one():
    made = backend(Clock(), eject_after=3)
    for status in (500, 500, 200, 500, 404, 500, 500):
        made.note_status(status, None, is_last=False)
    assert made.is_available
    made.note_status(500, None, is_last=True)
    made.note_broken(is_last=True)
    assert made.is_available
    made.note_broken(is_last=False)
    assert not made.is_available


@pytest.mark.parametrize(("asked", "given"), [(None, 1), (0, 1), (7, 7), (1e9, 60)])
def test_a_backend_is_believed_that_asks_to_be_left_alone(asked, given):
    clock = Clock()
    made = backend(clock)
    made.note_status(503, asked, is_last=True)
    assert made.seconds_away == given
    clock.now += given
    made.note_status(429, asked, is_last=True)
    assert made.is_available
    assert made.is_busy
    clock.now += given
    assert not made.is_busy


def test_keys_and_roles_of_backends():
    def keys(**args: object) -> list[str | None]:
        return [each.api_key for each in make_backends(RouteArgs(**args))]

    two = ["http://a", "http://b"]
    assert keys(backend=two) == [None, None]
    assert keys(backend=two, backend_api_key=["k"]) == ["k", "k"]
    assert keys(backend=two, backend_api_key=["k", "l"]) == ["k", "l"]
    paired = make_backends(RouteArgs(prefill=["http://a"], decode=["http://b", "unix:/x"]))
    assert [each.role for each in paired] == [Role.PREFILL, Role.DECODE, Role.DECODE]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "backend is missing"),
        ({"backend": ["localhost:8000"]}, "must be http://HOST:PORT"),
        ({"backend": ["http://h:99999"]}, "must be http://HOST:PORT"),
        ({"backend": ["http://u:p@h"]}, "a key belongs to backend_api_key"),
        ({"backend": ["http://h/v1"]}, "must leave out /v1"),
        ({"backend": ["http://h", "http://h"]}, "named twice"),
        ({"backend": ["http://h"], "prefill": ["http://i"], "decode": ["http://j"]}, "either"),
        ({"prefill": ["http://h"]}, "belong together"),
        ({"backend": ["http://h"], "backend_api_key": ["a", "b"]}, "given 2 times for 1"),
        ({"backend": ["http://h"], "policy": "prefixes"}, "Did you mean 'prefix'"),
        ({"backend": ["http://h"], "retries": -1}, "retries=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_work(args, message):
    with pytest.raises(ConfigError, match=message):
        RouteArgs(**args)


def keys_of(body: object, **headers: str) -> RoutingKeys:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return read_keys(json.dumps(body).encode(), pairs, "x-session-id")


def num_common(first: RoutingKeys, second: RoutingKeys) -> int:
    return sum(a == b for a, b in zip(first.blocks, second.blocks, strict=False))


def test_what_a_body_tells():
    long = "a" * 1000
    keys = keys_of({"model": "m", "user": "u", "prompt": long})
    assert (keys.model, keys.session) == ("m", "u")
    assert len(keys.blocks) == 1002 // BLOCK_BYTES
    assert keys_of({"user": "u", "prompt_cache_key": "k"}).session == "k"
    assert keys_of({"user": "u"}, x_session_id="h").session == "h"
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        assert read_keys(body, [], "x") == RoutingKeys()
    odd = keys_of({"model": 7, "user": ["u"], "prompt": None, "messages": [{"content": long}]})
    assert (odd.model, odd.session) == (None, None)
    assert len(odd.blocks) == 1017 // BLOCK_BYTES


@pytest.mark.parametrize(
    "other",
    [{"model": "n"}, {"cache_salt": "s"}, {"tools": [{}]}, {"system": "s"}, {"instructions": "s"}],
)
def test_equal_prompts_behind_other_beginnings_have_nothing_in_common(other):
    body = {"model": "m", "messages": [{"role": "user", "content": "a" * 500}]}
    assert num_common(keys_of(body), keys_of({**body, **other})) == 0
    assert num_common(keys_of(body), keys_of({**body, "temperature": 1, "seed": 2})) == 4


@given(st.lists(st.text(max_size=200), min_size=2, max_size=6), st.data())
def test_a_longer_conversation_begins_as_the_shorter_one(contents, data):
    turns = [{"role": "user", "content": content} for content in contents]
    shorter = turns[: data.draw(st.integers(1, len(turns) - 1))]
    first, second = keys_of({"messages": shorter}), keys_of({"messages": turns})
    assert num_common(first, second) == (len(json.dumps(shorter)) - 1) // BLOCK_BYTES


def test_a_session_moves_only_when_its_backend_goes():
    urls = [f"http://{name}" for name in "abcde"]
    args = RouteArgs(backend=urls, policy="session")
    backends = make_backends(args)
    picker = Picker(args, len(backends))

    def homes(able: list[Backend]) -> dict[int, Backend]:
        return {n: picker.pick(RoutingKeys(session=f"s{n}"), able).backend for n in range(200)}

    before, after = homes(backends), homes(backends[1:])
    assert len(set(before.values())) == 5
    for number, home in before.items():
        if home is not backends[0]:
            assert after[number] is home
