"""Prompts and parameters to core requests: the last place where a user error may arise."""

from __future__ import annotations

import hashlib
import itertools
import math
import numbers
import random
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.structured_outputs import same_backend
from tokenmill.contracts.logits_processor import load_processors
from tokenmill.contracts.request import AdapterRef, EngineCoreRequest, MultiModalFeature
from tokenmill.engine.kv_params import take_kv_params
from tokenmill.engine.prompts import ParsedPrompt, parse_prompt
from tokenmill.engine.token_rules import token_rules
from tokenmill.errors import ContextLengthExceededError, InvalidRequestError, shown
from tokenmill.parameter_checks import MAX_INTEGER, are_ids_below
from tokenmill.pooling_params import PoolingParams
from tokenmill.sampling_params import ALL_LOGPROBS, SamplingParams
from tokenmill.structured_outputs import StructuredOutputsParams
from tokenmill.tokenizer.reasoning import reasoning_markers, resolve_reasoning_parser
from tokenmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import Images

RequestParams = SamplingParams | PoolingParams

IMAGES = "multi_modal_data['image']"
"""What a prompt calls its images."""
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """One user request, ready for the core: a core request for each of its `n` sequences."""

    request_id: str
    """The caller's id."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[EngineCoreRequest]


class InputProcessor:
    """Tokenizes, validates, fills in what the user left open."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        images: Images | None = None,
    ) -> None:
        self.images = images
        """What the model makes of images; None for one that takes none."""
        self._name = config.model.name
        self._max_model_len = config.model.max_model_len
        self._vocab_size = config.model.vocab_size
        self._max_logprobs = config.max_logprobs
        self._takes_priority = config.scheduler.policy == "priority"
        self._grammar_backend = config.structured_outputs.backend
        self._kv_transfer = config.kv_transfer
        self._tokenizer = tokenizer
        self.end_token_ids = eos_token_ids
        """Every id that ends a text of this model."""
        parser = resolve_reasoning_parser(config.reasoning_parser, tokenizer)
        self._reasoning = (
            None if parser is None or tokenizer is None else reasoning_markers(tokenizer, parser)
        )
        self._processors = load_processors(config.sampling.logits_processors)
        self._seeds = random.Random(config.seed)
        self._key_prefix = uuid.uuid4().hex[:8]
        self._key_numbers = itertools.count()

    def process(
        self,
        request_id: str,
        prompt: object,
        params: RequestParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        adapter: AdapterRef | None = None,
    ) -> ProcessedInput:
        """Check one request and make its core requests.

        Raises `InvalidRequestError`, or `ContextLengthExceededError` for a prompt that leaves no
        room for a token.
        """
        check_caller(request_id, arrival_time)
        parsed = parse_prompt(prompt)
        if isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"{self._name} generates and does not pool; build the engine with runner='pooling',"
                f" or with a model for embeddings or scores.",
                parameter="model",
            )
        kv_params, params = take_kv_params(params, self._kv_transfer)
        self._check_params(params)
        rules = token_rules(params, self._tokenizer, self._reasoning, self._vocab_size)
        self._check_priority(priority)
        token_ids = self._truncate(self._token_ids(parsed, params), params)
        token_ids, features = self._expand(token_ids, parsed, params)
        self._check_length(len(token_ids))
        room = self._max_model_len - len(token_ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed & _SEED_MASK
        first = EngineCoreRequest(
            request_id=self._new_key(),
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=parsed.cache_salt,
            mm_features=features,
            token_rules=rules,
            adapter=adapter,
            kv_transfer_params=kv_params,
            **self._ends(params),
        )
        others = [
            replace(first, request_id=self._new_key(), seed=child_seed(seed, index))
            for index in range(1, params.n)
        ]
        return ProcessedInput(request_id, parsed.text, token_ids, params, [first, *others])

    def _new_key(self) -> str:
        """An id for a core request."""
        return f"{self._key_prefix}-{next(self._key_numbers)}"

    def _ends(self, params: SamplingParams) -> dict[str, Any]:
        """Fields of a core request: which ids may end it."""
        eos, *more_eos = self.end_token_ids or (None,)
        user_stops = params.stop_token_ids or []
        if params.ignore_eos:
            eos, stops = None, user_stops
        else:
            stops = list(dict.fromkeys([*user_stops, *more_eos]))
        every_stop = list(dict.fromkeys([*self.end_token_ids, *user_stops]))
        return {
            "eos_token_id": eos,
            "stop_token_ids": stops,
            "min_tokens_mask_ids": every_stop if params.min_tokens else [],
        }

    def _expand(
        self, token_ids: list[int], parsed: ParsedPrompt, params: SamplingParams
    ) -> tuple[list[int], list[MultiModalFeature]]:
        """The prompt with its images' placeholders, and the images."""
        images = self.images
        if images is None:
            self._refuse_images(parsed)
            return token_ids, []
        if parsed.images and params.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens would cut images off a prompt, or into pieces; leave it"
                " out.",
                parameter="truncate_prompt_tokens",
            )
        images.check_marks(token_ids, len(parsed.images))
        options = images.options(parsed.processor_options)
        return images.expand(token_ids, images.prepare_all(parsed.images, options, IMAGES))

    def _refuse_images(self, parsed: ParsedPrompt) -> None:
        if parsed.images:
            raise InvalidRequestError(
                f"{self._name} takes no images here; leave out multi_modal_data, or use a model"
                f" that does (docs/images.md).",
                parameter="multi_modal_data",
            )

    def _token_ids(self, parsed: ParsedPrompt, params: RequestParams) -> list[int]:
        """The prompt's ids, tokenized or checked."""
        if parsed.token_ids is not None:
            if params.truncate_prompt_tokens is None:
                self._check_length(len(parsed.token_ids))  # before each of millions is looked at
            token_ids = self._checked_ids("prompt_token_ids", parsed.token_ids)
        else:
            assert parsed.text is not None
            images, text = self.images, parsed.text
            text = text if images is None else images.with_surroundings(text)
            token_ids = self._encode(text, params)
        if not token_ids:
            raise InvalidRequestError(
                "prompt has no tokens; give it at least one.", parameter="prompt"
            )
        return token_ids

    def _encode(self, text: str, params: RequestParams) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt is text, but the engine has no tokenizer (skip_tokenizer_init);"
                " give token ids as `prompt_token_ids`.",
                parameter="prompt",
            )
        self._check_num_chars(text, params)
        token_ids = self._tokenizer.encode(text)
        if max(token_ids, default=0) >= self._vocab_size:
            raise InvalidRequestError(
                f"prompt holds token {max(token_ids)} of the tokenizer, but token ids of this model"
                f" lie between 0 and {self._vocab_size - 1}: the two do not belong together."
                f" Build the engine with the model's own tokenizer, or leave out that text.",
                parameter="prompt",
            )
        return token_ids

    def _check_num_chars(self, text: str, params: RequestParams) -> None:
        """Refuse what is certainly too long before time is spent on tokenizing megabytes."""
        assert self._tokenizer is not None
        longest = self._max_model_len * self._tokenizer.max_token_chars
        if len(text) > longest and params.truncate_prompt_tokens is None:
            raise ContextLengthExceededError(
                f"prompt has {len(text)} characters, more than {self._max_model_len} tokens"
                f" (max_model_len) can hold; shorten it, or set truncate_prompt_tokens.",
                parameter="prompt",
            )

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The last `truncate_prompt_tokens` ids."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep == -1:
            keep = max(self._max_model_len - (params.max_tokens or 1), 1)
        return token_ids[-keep:]

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise ContextLengthExceededError(
                f"prompt has {num_tokens} tokens, but max_model_len={self._max_model_len} must hold"
                f" the prompt and at least one new token; shorten it to {self._max_model_len - 1}"
                f" tokens, or set truncate_prompt_tokens.",
                parameter="prompt",
            )

    def _check_params(self, params: object) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params has type {type(params).__name__}; it must be SamplingParams.",
                parameter="sampling_params",
            )
        if params.logprob_token_ids is None:  # else there is a limit of its own
            self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            self._checked_ids(name, getattr(params, name) or ())
        self._check_extra_args(params)
        if params.structured_outputs is not None:
            self._check_structured_outputs(params.structured_outputs)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                "stop needs a tokenizer, and the engine has none (skip_tokenizer_init);"
                " use stop_token_ids.",
                parameter="stop",
            )

    def _check_extra_args(self, params: SamplingParams) -> None:
        """Ask the operator's processors."""
        if params.extra_args is not None and not self._processors:
            raise InvalidRequestError(
                f"extra_args={shown(params.extra_args)} is for custom logits processors, and this"
                f" engine has none (logits_processors); leave it out.",
                parameter="extra_args",
            )
        for processor in self._processors:
            try:
                processor.validate_params(params)
            except InvalidRequestError:
                raise
            except ValueError as error:
                raise InvalidRequestError(str(error), parameter="extra_args") from error

    def _check_structured_outputs(self, form: StructuredOutputsParams) -> None:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, and the engine has none"
                " (skip_tokenizer_init).",
                parameter="structured_outputs",
            )
        if form.backend is not None and not same_backend(form.backend, self._grammar_backend):
            raise InvalidRequestError(
                f"structured_outputs.backend={shown(form.backend)} is not this engine's, which is"
                f" {self._grammar_backend!r} (structured_outputs_config); leave it out.",
                parameter="structured_outputs.backend",
            )

    def _check_logprobs(self, name: str, value: int | None) -> None:
        limit = self._max_logprobs
        if value is None or limit == ALL_LOGPROBS or 0 <= value <= limit:
            return
        shown = "the whole vocabulary" if value == ALL_LOGPROBS else str(value)
        raise InvalidRequestError(
            f"{name}={value} asks for {shown}, but this engine gives at most {limit} per token"
            f" (max_logprobs); ask for less, or start it with a larger max_logprobs.",
            parameter=name,
        )

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(
                f"priority={shown(priority)} must be an integer; smaller is earlier.",
                parameter="priority",
            )
        if not -MAX_INTEGER <= priority <= MAX_INTEGER:
            raise InvalidRequestError(
                f"priority={shown(priority)} must lie between {-MAX_INTEGER} and {MAX_INTEGER}.",
                parameter="priority",
            )
        if priority and not self._takes_priority:
            raise InvalidRequestError(
                f"priority={shown(priority)} needs scheduling_policy='priority'; this engine runs"
                f" 'fcfs'.",
                parameter="priority",
            )

    def _checked_ids(self, name: str, token_ids: Iterable[Any]) -> list[int]:
        """The ids as integers of Python, whatever kind of integer they came as."""
        given = list(token_ids)
        if are_ids_below(given, self._vocab_size):
            return given
        checked = []
        for token_id in given:
            if isinstance(token_id, bool) or not isinstance(token_id, int | numbers.Integral):
                raise InvalidRequestError(
                    f"{name} holds {shown(token_id)}; every token id must be an integer.",
                    parameter=name,
                )
            number = int(token_id)
            if not 0 <= number < self._vocab_size:
                raise InvalidRequestError(
                    f"{name} holds {shown(number)}; token ids of this model lie between 0 and"
                    f" {self._vocab_size - 1}.",
                    parameter=name,
                )
            checked.append(number)
        return checked


def check_caller(request_id: object, arrival_time: object) -> None:
    """Refuse what would break the tables and queues that all requests share."""
    if not isinstance(request_id, str):
        raise InvalidRequestError(
            f"request_id={shown(request_id)} must be a string.", parameter="request_id"
        )
    if arrival_time is not None and (
        not isinstance(arrival_time, int | float) or not math.isfinite(arrival_time)
    ):
        raise InvalidRequestError(
            f"arrival_time={shown(arrival_time)} must be a finite number of seconds on the"
            f" monotonic clock.",
            parameter="arrival_time",
        )


def child_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request: the first keeps `seed`, the others get a hash."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
