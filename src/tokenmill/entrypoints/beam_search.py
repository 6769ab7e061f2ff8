"""Beam search: the likeliest continuations of a prompt, found side by side.

It is made of requests for one token each with log-probabilities: every step extends all beams, and
beams that begin alike share the blocks of the prefix cache. The search itself knows no engine;
`LLM.beam_search` and the server drive it.

    extend every running beam by its 2 * width best tokens
      end tokens                   the beam has ended, with its score
      of the others the best       run on, `width` of them
    done when no running beam can become one of the `width` best any more

A score is the sum of a beam's log-probabilities divided by its length ** length_penalty. The length
is that of the generated tokens, the end token apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tokenmill import parameter_checks as check
from tokenmill.config.engine_config import EngineConfig
from tokenmill.engine.prompts import Prompt, TokensPrompt
from tokenmill.errors import InvalidRequestError
from tokenmill.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from tokenmill.sampling_params import ALL_LOGPROBS, MAX_TOKENS_LIMIT, SamplingParams
from tokenmill.tokenizer.tokenizer import Tokenizer

MAX_BEAM_WIDTH = 1_024
MAX_LENGTH_PENALTY = 100.0


class BeamSearchParams(
    msgspec.Struct, metaclass=check.StrictKeywords, frozen=True, kw_only=True, omit_defaults=True
):
    """How to search. Raises `InvalidRequestError` that names the parameter and its limit."""

    beam_width: int
    """Beams that run side by side, and sequences that are returned."""
    max_tokens: int | None
    """Most tokens of a beam; None is up to the context length."""
    ignore_eos: bool = False
    """Treat end tokens like any others."""
    temperature: float = 0.0
    """Must be 0: nothing is drawn at random."""
    length_penalty: float = 1.0
    """0 compares sums of log-probabilities, 1 their means; larger values favour longer beams."""
    include_stop_str_in_output: bool = False
    """Leave the text of the end token in the output."""

    def __post_init__(self) -> None:
        penalty = check.number(
            "length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        normalised = {
            "beam_width": check.integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH),
            "max_tokens": check.optional_integer(
                "max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT
            ),
            "ignore_eos": check.flag("ignore_eos", self.ignore_eos),
            "temperature": check.number("temperature", self.temperature, 0.0, 0.0),
            "length_penalty": penalty,
            "include_stop_str_in_output": check.flag(
                "include_stop_str_in_output", self.include_stop_str_in_output
            ),
        }
        for name, value in normalised.items():
            msgspec.structs.force_setattr(self, name, value)


@dataclass(slots=True)
class Beam:
    """One sequence."""

    token_ids: list[int] = field(default_factory=list)
    """Generated; an end token is the last of them."""
    cumulative_logprob: float = 0.0
    positions: list[PositionLogprobs] = field(default_factory=list)
    """The candidates of each token, the chosen one first."""
    finish_reason: str | None = None

    def extended(self, token_id: int, position: PositionLogprobs) -> Beam:
        """The beam with one more token."""
        chosen = position[token_id]
        return Beam(
            [*self.token_ids, token_id],
            self.cumulative_logprob + chosen.logprob,
            [*self.positions, {token_id: chosen, **position}],
        )

    def score(self, length_penalty: float) -> float:
        """What beams are compared by; larger is better."""
        length = len(self.token_ids) - (self.finish_reason == "stop")
        return _score(self.cumulative_logprob, length, length_penalty)


def _score(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    return cumulative_logprob / math.pow(max(length, 1), length_penalty)


class BeamSearch:
    """The search for one prompt: `prompts` says what to ask for, `advance` takes the answers."""

    def __init__(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        config: EngineConfig,
        end_token_ids: Sequence[int],
    ) -> None:
        """Raises `InvalidRequestError` for a width that the engine's limits do not allow."""
        _check_engine(params, config)
        if isinstance(prompt, dict) and prompt.get("multi_modal_data"):
            raise InvalidRequestError(
                "beam search takes no images; sample instead, or leave them out.",
                parameter="prompt",
            )
        self.params = params
        self.request = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False
        )
        """What each of `prompts` is to be asked with."""
        self._prompt = prompt
        self._salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        self._max_model_len = config.model.max_model_len
        self._end_token_ids = frozenset(() if params.ignore_eos else end_token_ids)
        self._running = [Beam()]
        self._ended: list[Beam] = []
        """The best so far, at most `beam_width`."""
        self._first: RequestOutput | None = None
        self.error: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to ask."""
        return not self._running

    def prompts(self) -> list[Prompt]:
        """One for each running beam."""
        if self._first is None:
            return [self._prompt]
        known = self._first.prompt_token_ids
        prompts: list[Prompt] = []
        for beam in self._running:
            prompt = TokensPrompt(prompt_token_ids=[*known, *beam.token_ids])
            if self._salt is not None:
                prompt["cache_salt"] = self._salt
            prompts.append(prompt)
        return prompts

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take the answers to `prompts`."""
        self._first = self._first or outputs[0]
        failed = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason in _FAILURES]
        if failed:
            self._fail(failed[0])
            return
        candidates: list[Beam] = []
        for beam, output in zip(self._running, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs, "a request for log-probabilities has them"
            position = dict(logprobs[0])
            candidates += [beam.extended(token_id, position) for token_id in position]
        self._settle(candidates)

    def result(
        self, tokenizer: Tokenizer | None, *, num_logprobs: int | None = None
    ) -> RequestOutput:
        """The best sequences, best first, once the search is done.

        `num_logprobs` limits how many candidates each place lists.
        """
        assert self._first is not None, "the search has begun"
        first = self._first
        outputs = [
            self._output(index, beam, tokenizer, num_logprobs)
            for index, beam in enumerate(self._ended)
        ]
        metrics = RequestMetrics(
            arrival_time=first.metrics.arrival_time,
            first_scheduled_time=first.metrics.first_scheduled_time,
            first_token_time=first.metrics.first_token_time,
            last_token_time=first.metrics.last_token_time,
        )
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
            metrics=metrics,
            lora_request=first.lora_request,
        )

    def _fail(self, failed: CompletionOutput) -> None:
        """One beam's request has failed, and so has the search."""
        self.error = failed.error or "the engine gave no answer."
        self._ended = self._running
        for beam in self._ended:
            beam.finish_reason = failed.finish_reason
        self._running = []

    def _settle(self, candidates: list[Beam]) -> None:
        """Sort the extended beams into those that have ended and those that run on."""
        open_beams = []
        for beam in candidates:
            if beam.token_ids[-1] in self._end_token_ids:
                beam.finish_reason = "stop"
                self._ended.append(beam)
            else:
                open_beams.append(beam)
        width = self.params.beam_width
        # Equally good ones stay in their order: that of their parents, then of their tokens.
        open_beams.sort(key=lambda beam: -beam.cumulative_logprob)
        self._running = open_beams[:width]
        if self._running and len(self._running[0].token_ids) >= self._max_length:
            for beam in self._running:
                beam.finish_reason = "length"
            self._ended += self._running
            self._running = []
        penalty = self.params.length_penalty
        self._ended.sort(key=lambda beam: -beam.score(penalty))
        del self._ended[width:]
        if self._running and len(self._ended) == width and not self._can_improve():
            self._running = []

    @property
    def _max_length(self) -> int:
        """Most tokens of a beam."""
        assert self._first is not None
        room = self._max_model_len - len(self._first.prompt_token_ids)
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    def _can_improve(self) -> bool:
        """Whether a running beam may still beat one of those that have ended.

        Its sum only falls. The length that favours it most is the longest if penalties are
        positive, else the one that it has.
        """
        best, penalty = self._running[0], self.params.length_penalty
        length = self._max_length if penalty > 0 else len(best.token_ids)
        return _score(best.cumulative_logprob, length, penalty) > self._ended[-1].score(penalty)

    def _output(
        self, index: int, beam: Beam, tokenizer: Tokenizer | None, num_logprobs: int | None
    ) -> CompletionOutput:
        shown = beam.token_ids
        if beam.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            shown = shown[:-1]
        text = ""
        if tokenizer is not None and self._first is not None:
            skips = not self.params.include_stop_str_in_output
            stream = tokenizer.stream(self._first.prompt_token_ids, skip_special_tokens=skips)
            text = "".join([*map(stream.push, shown), stream.finish()])
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=beam.token_ids,
            cumulative_logprob=beam.cumulative_logprob,
            logprobs=[_first_of(position, num_logprobs) for position in beam.positions],
            finish_reason=beam.finish_reason,
            error=self.error,
        )


_FAILURES = ("error", "abort")


def _first_of(position: PositionLogprobs, count: int | None) -> PositionLogprobs:
    """The chosen token, and the best `count`."""
    chosen = next(iter(position))
    ranked = sorted(position, key=lambda token_id: -position[token_id].logprob)
    kept = ranked if count is None else ranked[:count]
    return {token_id: position[token_id] for token_id in dict.fromkeys([chosen, *kept])}


def _check_engine(params: BeamSearchParams, config: EngineConfig) -> None:
    asked, limit = 2 * params.beam_width, config.max_logprobs
    if limit != ALL_LOGPROBS and asked > limit:
        raise InvalidRequestError(
            f"beam_width={params.beam_width} needs {asked} log-probabilities per token, but this"
            f" engine gives at most {limit} (max_logprobs); search with at most {limit // 2} beams,"
            f" or start it with a larger max_logprobs.",
            parameter="beam_width",
        )
    if config.sampling.logprobs_mode.endswith("_logits"):
        raise InvalidRequestError(
            f"beam search adds log-probabilities, and this engine gives logits"
            f" (logprobs_mode={config.sampling.logprobs_mode!r}); start it with raw_logprobs.",
            parameter="beam_width",
        )
