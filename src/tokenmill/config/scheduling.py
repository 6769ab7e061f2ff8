"""How large a step is, and who computes how much in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.config.argument_types import at_least, one_of
from tokenmill.config.choices import Choices
from tokenmill.config.device import DeviceDefaults
from tokenmill.config.encoder import undivided_tokens
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import SchedulerConfig
from tokenmill.config.memory import StepShape, Weights
from tokenmill.config.parameters import ModelParameters
from tokenmill.errors import ConfigError

POLICIES = ("fcfs", "priority")
STEP_SECONDS = 0.1
"""A step should stay under this, so that a request which comes meanwhile does not wait for long.
Steps in which requests decode have a limit of their own, `DeviceDefaults.shared_step_seconds`."""
MIN_BUDGET = 64


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the size of a step follows from."""

    weights: Weights
    parameters: ModelParameters
    flops: float
    """Operations that the machine computes in a second."""
    defaults: DeviceDefaults

    @property
    def ops_per_token(self) -> int:
        """Of the products in all layers."""
        num_embeddings = self.parameters.vocab_size * self.parameters.hidden_size
        return 2 * max(self.weights.num_decoder_values - num_embeddings, 1)


def step_shape(
    args: EngineArgs,
    hf_config: Mapping[str, Any],
    sizing: Sizing,
    max_model_len: int,
    max_num_drafts: int,
    choices: Choices,
) -> StepShape:
    """The largest step. It has room for an item that is not cut beside all other requests."""
    undivided, each = undivided_tokens(args, hf_config), 1 + max_num_drafts
    least = undivided
    if undivided:
        least += ((args.max_num_seqs or sizing.defaults.max_num_seqs) - 1) * each
    budget = _token_budget(args, sizing, least, choices)
    most = min(sizing.defaults.max_num_seqs, budget)
    if undivided:
        most = min(most, 1 + max(budget - undivided, 0) // each)
    max_num_seqs = _max_num_seqs(args, most, choices)
    _check_undivided(undivided, budget, max_num_seqs, each)
    return StepShape(max_num_seqs, budget, max_model_len, max_num_drafts)


def _check_undivided(num_tokens: int, budget: int, max_num_seqs: int, each: int) -> None:
    needed = num_tokens + (max_num_seqs - 1) * each
    if num_tokens and budget < needed:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than {needed}: the {num_tokens} tokens of an"
            f" image of this model are computed in one step, beside those of"
            f" max_num_seqs={max_num_seqs} requests. Raise it to {needed}, lower max_num_seqs, or"
            f' take no images (limit_mm_per_prompt={{"image": 0}}).'
        )


def _token_budget(args: EngineArgs, sizing: Sizing, least: int, choices: Choices) -> int:
    """Tokens of a step; at least `least` if nobody has set them."""
    if args.max_num_batched_tokens is not None:
        budget = at_least("max_num_batched_tokens", args.max_num_batched_tokens, 1)
        if args.max_num_seqs is not None and budget < args.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={args.max_num_seqs},"
                f" but every running request needs a token of the step; raise it to"
                f" {args.max_num_seqs}, or lower max_num_seqs to {budget}."
            )
    else:
        fitting = int(STEP_SECONDS * sizing.flops / sizing.ops_per_token) // 32 * 32
        fitting = min(fitting, sizing.defaults.max_num_batched_tokens)
        budget = max(fitting, MIN_BUDGET, args.max_num_seqs or 0, least)
        budget = choices.choose(
            "max_num_batched_tokens", budget, f"a step takes about {STEP_SECONDS * 1e3:.0f} ms"
        )
    if not args.enable_chunked_prefill and budget < sizing.parameters.max_context:
        length = args.max_model_len or sizing.parameters.max_context
        if budget < length and args.max_num_batched_tokens is not None:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_model_len={length}, which"
                f" enable_chunked_prefill=False needs; raise it to {length}."
            )
        budget = max(budget, length)
    return budget


def _max_num_seqs(args: EngineArgs, most: int, choices: Choices) -> int:
    if args.max_num_seqs is not None:
        return at_least("max_num_seqs", args.max_num_seqs, 1)
    return choices.choose("max_num_seqs", most, "each takes a token of a step")


def scheduler_config(
    args: EngineArgs, sizing: Sizing, step: StepShape, max_model_len: int
) -> SchedulerConfig:
    """Who computes how much in a step; `max_model_len` is what has found room."""
    ahead = args.async_scheduling
    if ahead is None:
        ahead = sizing.defaults.async_scheduling
    threshold = args.long_prefill_token_threshold
    if not 0 <= threshold <= max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold={threshold} must lie between 0 (off) and"
            f" max_model_len, {max_model_len}."
        )
    attention_cost, shared_tokens = 0.0, 0
    if args.enable_chunked_prefill:
        ops_per_key = 4 * sizing.parameters.num_heads * sizing.parameters.head_size
        attention_cost = sizing.defaults.attention_slowness * ops_per_key / sizing.ops_per_token
        if args.max_num_batched_tokens is None:  # else somebody has said what a step takes
            shared_tokens = math.ceil(
                sizing.defaults.shared_step_seconds * sizing.flops / sizing.ops_per_token
            )
    return SchedulerConfig(
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=threshold,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=one_of("scheduling_policy", args.scheduling_policy, POLICIES),
        max_steps_in_flight=max(2 if ahead else 1, args.pipeline_parallel_size),
        attention_cost=attention_cost,
        shared_tokens=shared_tokens,
        num_stages=args.pipeline_parallel_size,
    )
