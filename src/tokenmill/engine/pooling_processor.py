"""Prompts and parameters to core requests, for a model that pools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.request import AdapterRef, EngineCoreRequest, PoolingRequest
from tokenmill.engine.input_processor import (
    InputProcessor,
    ProcessedInput,
    RequestParams,
    check_caller,
)
from tokenmill.engine.prompts import ParsedPrompt, parse_prompt
from tokenmill.errors import ContextLengthExceededError, InvalidRequestError
from tokenmill.pooling_params import PoolingParams
from tokenmill.sampling_params import RequestOutputKind, SamplingParams
from tokenmill.tokenizer.tokenizer import Tokenizer

PAIR_KEY = "text_pair"
"""Of a prompt `{"prompt": first, "text_pair": second}`: two texts that are scored together."""


class PoolingProcessor(InputProcessor):
    """Tokenizes, validates, fills in what the user left open."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        super().__init__(config, tokenizer, eos_token_ids)
        assert config.model.pooling is not None
        self._pooling = config.model.pooling
        self._num_closing = 0 if tokenizer is None else _num_closing(tokenizer)

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
        """Check one request and make its core request.

        Raises `InvalidRequestError`, or `ContextLengthExceededError` for a prompt that is longer
        than the model takes.
        """
        check_caller(request_id, arrival_time)
        wanted = self._wanted(params)
        assert isinstance(params, PoolingParams)
        self._check_priority(priority)
        if isinstance(prompt, Mapping) and PAIR_KEY in prompt:
            text, token_ids, second_start = self._pair(prompt, params)
            parsed = ParsedPrompt(text, None)
        else:
            parsed, second_start = parse_prompt(prompt), None
            self._refuse_images(parsed)
            token_ids = self._token_ids(parsed, params)
            closing = self._num_closing if parsed.token_ids is None else 0
            token_ids = self._cut(token_ids, params, closing)
        self._check_length(len(token_ids))
        neutral = SamplingParams(
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=self._skips_cache(wanted, params),
        )
        request = EngineCoreRequest(
            request_id=self._new_key(),
            prompt_token_ids=token_ids,
            sampling_params=neutral,
            seed=0,
            max_tokens=1,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            task=wanted.task,
            priority=priority,
            cache_salt=parsed.cache_salt,
            pooling=PoolingRequest(
                wanted.task, wanted.use_activation, wanted.dimensions, second_start
            ),
            adapter=adapter,
        )
        return ProcessedInput(request_id, parsed.text, token_ids, neutral, [request])

    def _wanted(self, params: object) -> PoolingRequest:
        """The parameters, checked against the model and completed."""
        pooling, tasks = self._pooling, self._pooling.tasks
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"{self._name} is a pooling model and generates nothing; what it can do is:"
                f" {', '.join(tasks)}. Use LLM.{tasks[0]}, or a model that generates.",
                parameter="model",
            )
        task = params.task or tasks[0]
        if task not in tasks:
            raise InvalidRequestError(
                f"task={task!r} is not what {self._name} can do, which is: {', '.join(tasks)}.",
                parameter="task",
            )
        dimensions = params.dimensions
        if dimensions is not None:
            self._check_dimensions(dimensions, task)
        active = params.use_activation
        return PoolingRequest(
            task, pooling.use_activation if active is None else active, dimensions
        )

    def _check_dimensions(self, dimensions: int, task: str) -> None:
        pooling, name = self._pooling, "dimensions"
        if not task.endswith("embed"):
            raise InvalidRequestError(
                f"dimensions={dimensions} is for embeddings; leave it out.", parameter=name
            )
        if not pooling.is_matryoshka:
            raise InvalidRequestError(
                f"dimensions={dimensions}: {self._name} was not trained for shorter embeddings"
                f" (Matryoshka), whose length is {pooling.size}; leave it out. If it was, set"
                f" is_matryoshka with hf_overrides.",
                parameter=name,
            )
        allowed = pooling.matryoshka_dimensions
        if allowed and dimensions not in allowed:
            raise InvalidRequestError(
                f"dimensions={dimensions} is not one of: {', '.join(map(str, allowed))}.",
                parameter=name,
            )
        if dimensions > pooling.size:
            raise InvalidRequestError(
                f"dimensions={dimensions} must be at most {pooling.size}.", parameter=name
            )

    def _pair(
        self, prompt: Mapping[Any, Any], params: PoolingParams
    ) -> tuple[str, list[int], int | None]:
        """The first text, the ids of both, and where the second's type begins."""
        texts = [prompt.get("prompt"), prompt[PAIR_KEY]]
        if set(prompt) != {"prompt", PAIR_KEY} or not all(isinstance(t, str) for t in texts):
            raise InvalidRequestError(
                "a pair of texts is {'prompt': first, 'text_pair': second}, both strings, and"
                " nothing else.",
                parameter="prompt",
            )
        if self._tokenizer is None:
            raise InvalidRequestError(
                "a pair of texts needs a tokenizer, and the engine has none (skip_tokenizer_init).",
                parameter="prompt",
            )
        for text in texts:
            self._check_num_chars(text, params)
        token_ids, second_start = self._tokenizer.encode_pair(*texts)
        if not token_ids:
            raise InvalidRequestError(
                "prompt has no tokens, in neither of its texts; give it at least one.",
                parameter="prompt",
            )
        token_ids = self._cut(token_ids, params, self._num_closing)
        if second_start is not None and second_start >= len(token_ids):
            second_start = None
        return texts[0], self._checked_ids("prompt", token_ids), second_start

    def _cut(self, token_ids: list[int], params: PoolingParams, num_closing: int) -> list[int]:
        """The first `truncate_prompt_tokens` ids, the special ones at the end kept."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        keep = self._max_model_len if keep == -1 else keep
        if len(token_ids) <= keep:
            return token_ids
        kept = max(keep - num_closing, 0)
        return [*token_ids[:kept], *token_ids[len(token_ids) - (keep - kept) :]]

    def _skips_cache(self, wanted: PoolingRequest, params: PoolingParams) -> bool:
        """Whether all tokens must be computed: for a result of each of them, always."""
        return wanted.task.startswith("token_") or bool(params.skip_reading_prefix_cache)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._max_model_len:
            raise ContextLengthExceededError(
                f"prompt has {num_tokens} tokens, but this model takes {self._max_model_len}"
                f" (max_model_len); shorten it, or set truncate_prompt_tokens.",
                parameter="prompt",
            )


def _num_closing(tokenizer: Tokenizer) -> int:
    """Special tokens that the tokenizer puts behind a text."""
    bare, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return len(full) - start - len(bare)
    return 0
