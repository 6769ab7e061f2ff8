"""Stages measured with a clock that the test turns."""

from __future__ import annotations

import types

import pytest

from tokenmill.observe.stage_times import StageTimes


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Engine:
    """Steps of 1 s by itself, with two calls of a kernel that takes 10 s, and a tail of 100 s."""

    def __init__(self, clock):
        self.clock = clock
        self.kernels = types.SimpleNamespace(multiply=self.multiply)

    def multiply(self, value):
        self.clock.now += 10
        return 2 * value

    def forward(self):
        self.clock.now += 0.5
        self.kernels.multiply(1)
        self.clock.now += 0.5
        return self.kernels.multiply(21)

    def finish(self):
        self.clock.now += 100

    def fail(self):
        self.clock.now += 7
        raise ValueError("no")

    def step(self):
        answer = self.forward()
        self.finish()
        return answer


@pytest.fixture
def engine():
    return Engine(Clock())


def test_stages_contain_stages_and_kernels(engine):
    with StageTimes(engine.clock) as times:
        times.watch(engine, "step", "step")
        times.watch(engine, "forward", "forward")
        times.watch(engine, "finish", "tail")
        times.watch_kernel(engine.kernels, "multiply")
        assert engine.step() == 42
        stages = times.take()
    assert list(stages) == ["forward", "tail", "step"]
    assert (stages["forward"].seconds, stages["forward"].kernel_seconds) == (21, 20)
    assert (stages["tail"].seconds, stages["tail"].kernel_seconds) == (100, 0)
    assert (stages["step"].seconds, stages["step"].kernel_seconds) == (121, 20)


def test_each_take_begins_anew_and_calls_of_one_stage_add_up(engine):
    with StageTimes(engine.clock) as times:
        times.watch(engine, "forward", "work")
        times.watch(engine, "finish", "work")
        engine.step()
        engine.step()
        first = times.take()["work"]
        assert (first.seconds, first.num_calls) == (242, 4)
        assert times.take() == {}
        engine.finish()
        assert times.take()["work"].seconds == 100


def test_a_call_that_raises_counts(engine):
    with StageTimes(engine.clock) as times:
        times.watch(engine, "fail", "fail")
        with pytest.raises(ValueError, match="no"):
            engine.fail()
        assert times.take()["fail"].seconds == 7


def test_afterwards_everything_is_as_before(engine):
    own = dict(vars(engine))
    module = types.ModuleType("some_module")
    module.call = before = len
    with StageTimes(engine.clock) as times:
        times.watch(engine, "forward", "a")
        times.watch(engine, "forward", "b")  # a method may be watched twice
        times.watch(Engine, "finish", "c")
        times.watch(module, "call", "d")
        assert engine.forward() == 42
        assert module.call([1]) == 1
        engine.finish()
        assert set(times.take()) == {"a", "b", "c", "d"}
    assert vars(engine) == own
    assert module.call is before
    engine.step()
    assert times.take() == {}


def test_an_unknown_method_is_an_error(engine):
    with StageTimes() as times, pytest.raises(AttributeError, match="backward"):
        times.watch(engine, "backward", "a")


class NativeStep:
    """A call of 13 s, of which 10 are its kernels': they keep their own time."""

    def __init__(self, clock):
        self.clock = clock
        self.seconds = {"forward": 100.0, "sample": 1.0}

    def run(self):
        self.clock.now += 13
        self.seconds = {"forward": self.seconds["forward"] + 8, "sample": 3.0}


def test_kernels_that_keep_their_own_time_are_told_apart():
    clock = Clock()
    native_step = NativeStep(clock)
    with StageTimes(clock) as times:
        times.watch_native(native_step, "run", "prepare", lambda: native_step.seconds)
        times.watch(native_step, "run", "step")
        native_step.run()
        taken = times.take()
    seconds = {name: (stage.seconds, stage.kernel_seconds) for name, stage in taken.items()}
    assert seconds == {"forward": (8, 8), "sample": (2, 2), "prepare": (3, 0), "step": (13, 10)}
    assert "run" not in vars(native_step)
