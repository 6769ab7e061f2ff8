"""Messages between processes: everything arrives as it was sent, and nothing else is taken."""

from __future__ import annotations

import pickle
from types import MappingProxyType

import msgspec
import pytest

from helpers.core import create_request
from helpers.served import serve_args
from tokenmill.contracts.encoding import ErrorInfo, describe, rebuild
from tokenmill.contracts.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    MultiModalFeature,
    SchedulerStats,
    TensorData,
    TokenLogprobs,
)
from tokenmill.engine import wire
from tokenmill.engine.build import open_model, settle_config
from tokenmill.errors import (
    ConfigError,
    ContextLengthExceededError,
    EngineDeadError,
    InvalidRequestError,
    MemoryBudgetError,
)
from tokenmill.sampling_params import SamplingParams


def test_the_settings_of_an_engine_arrive_as_they_were_sent():
    args = serve_args(hf_overrides={"rope_theta": 5e5, "nested": {"a": [1, None]}})
    checkpoint = open_model(args, lambda *_: None)
    config = settle_config(args, checkpoint)
    checkpoint.close()
    setup = wire.Setup("module:factory", args, config, 20)
    arrived = wire.decode_to_core(wire.encode(setup))
    assert arrived == setup
    assert type(arrived.config) is type(config)
    frozen = msgspec.structs.replace(setup, args=setup.args)
    object.__setattr__(config.model, "hf_config", MappingProxyType(dict(config.model.hf_config)))
    assert wire.decode_to_core(wire.encode(frozen)) == setup


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            n=3,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=2**64 - 1,
            stop_token_ids=[5, 6],
            max_tokens=None,
            logprobs=5,
            prompt_logprobs=-1,
        ),
        SamplingParams(temperature=0, min_tokens=3, ignore_eos=True),
    ],
)
def test_requests_arrive_as_they_were_sent(params):
    request = create_request(8, cache_salt="sält", deadline=1.5, priority=-3)
    request.sampling_params = params
    request.seed = 2**64 - 1
    message = wire.AddRequests([wire.core_request(request)])
    assert wire.decode_to_core(wire.encode(message)) == message


def test_images_arrive_as_they_were_sent():
    pixels = TensorData("uint8", (1, 2, 2, 3), bytes(range(12)))
    features = [
        MultiModalFeature("a" * 64, "image", 2, 4, {"pixels": pixels}, [(0, 1), (2, 2)]),
        MultiModalFeature("b" * 64, "image", 7, 1),
    ]
    message = wire.AddRequests([wire.core_request(create_request(8, mm_features=features))])
    arrived = wire.decode_to_core(wire.encode(message))
    assert arrived == message
    assert arrived.requests[0].mm_features[0].spans == [(0, 1), (2, 2)]


def test_outputs_arrive_as_they_were_sent():
    outputs = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                "a",
                new_token_ids=[1, 2],
                new_logprobs=[TokenLogprobs([1, 5], [-0.1, -float("inf")], 1)],
                finish_reason=FinishReason.STOP,
                stop_reason=2,
            ),
            EngineCoreOutput("b", finish_reason=FinishReason.ERROR, error="why"),
        ],
        stats=SchedulerStats(num_running=2),
    )
    message = wire.StepOutputs(outputs)
    assert wire.decode_from_core(wire.encode(message)) == message


def test_stop_strings_stay_in_the_front_end():
    """Only it looks for them; and they may hold what no message can."""
    request = create_request(8)
    request.sampling_params = SamplingParams(stop=["\ud800"], seed=3)
    sent = wire.core_request(request)
    assert sent.sampling_params == SamplingParams(seed=3)
    assert request.sampling_params.stop == ["\ud800"]
    plain = create_request(8)
    assert wire.core_request(plain) is plain


def test_text_that_cannot_be_sent_is_the_users_fault():
    request = create_request(8, kv_transfer_params={"x": "\udfff"})
    with pytest.raises(InvalidRequestError, match="Unicode"):
        wire.encode(wire.AddRequests([request]))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("no", parameter="prompt"),
        ContextLengthExceededError("too long", parameter="prompt"),
        ConfigError("bad"),
        MemoryBudgetError("short"),
    ],
)
def test_errors_keep_their_class(error):
    rebuilt = rebuild(describe(error))
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    assert getattr(rebuilt, "parameter", None) == getattr(error, "parameter", None)


@pytest.mark.parametrize("kind", ["OSError", "difflib", "shown", "nonsense", "ErrorInfo"])
def test_an_error_is_rebuilt_as_one_of_ours_or_as_a_dead_engine(kind):
    assert type(rebuild(ErrorInfo(kind, "text"))) is EngineDeadError


def test_a_foreign_error_is_named():
    info = describe(ZeroDivisionError("division by zero"))
    assert info == ErrorInfo("EngineDeadError", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", pickle.dumps([1, "a"]), msgspec.msgpack.encode([99, []])]
)
def test_other_bytes_are_refused(data):
    for decode in (wire.decode_to_core, wire.decode_from_core):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)
