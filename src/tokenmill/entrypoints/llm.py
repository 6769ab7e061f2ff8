"""Offline use: prompts in, texts out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tokenmill.config.engine_args import EngineArgs
from tokenmill.engine.build import Progress
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.engine.prompts import Prompt, TokensPrompt
from tokenmill.entrypoints import pooling
from tokenmill.entrypoints.beam_search import BeamSearch, BeamSearchParams
from tokenmill.entrypoints.chat.render import render_chat
from tokenmill.entrypoints.chat.templates import read_template
from tokenmill.entrypoints.offline_operations import OfflineOperations
from tokenmill.entrypoints.offline_requests import RequestRunner
from tokenmill.entrypoints.per_prompt import as_list, as_prompts, is_list, one_each
from tokenmill.entrypoints.progress import request_progress, start_progress
from tokenmill.errors import InvalidRequestError, refuse_unknown
from tokenmill.lora_request import LoRARequest
from tokenmill.outputs import RequestOutput
from tokenmill.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from tokenmill.pooling_params import PoolingParams
from tokenmill.pooling_params import pooling_task as checked_task
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.reasoning import resolve_reasoning_parser

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}` as in the OpenAI protocol."""


class LLM(OfflineOperations):
    """A model, loaded and ready.

        with LLM("smollm2-135m") as llm:
            for output in llm.generate(["The sky is", "One, two,"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Keyword arguments are the settings of `EngineArgs`. `on_progress(stage, done, total)` is called
    with bytes while the model is fetched and loaded; without it a terminal shows bars. Calls from
    several threads take turns.

    Raises `ModelNotFoundError`, `CheckpointError`, `ConfigError`, or `UnknownArgumentError` with
    the nearest name.
    """

    def __init__(
        self,
        model: str = EngineArgs.model,
        *,
        on_progress: Progress | None = None,
        **engine_args: Any,
    ) -> None:
        refuse_unknown("LLM", engine_args, [field.name for field in fields(EngineArgs)])
        args = EngineArgs(model=model, **engine_args)
        self._chat_template = read_template(args.chat_template)
        with start_progress(on_progress) as progress:
            self.llm_engine = LLMEngine.from_args(args, progress)
        self.reasoning_parser = resolve_reasoning_parser(
            args.reasoning_parser, self.llm_engine.tokenizer
        )
        """How the model marks its reasoning, by the name of its family; None for no reasoning."""
        self._requests = RequestRunner(self.llm_engine)
        self._turn = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        A prompt is a string, a list of token ids, or a dict (`engine/prompts.py`). Parameters are
        one for all prompts or one for each; None takes the model's defaults. `use_tqdm` shows a
        progress bar on a terminal. `lora_request` is the adapter of all prompts, or a list with one
        or None for each (`enable_lora`). `priority` holds a number for each prompt.

        A prompt that is refused (`InvalidRequestError`) stops the call before anything runs. A
        request that fails while it runs has `finish_reason` `error`; the others go on. Ctrl-C
        aborts the requests of this call and leaves the engine usable.
        """
        prompt_list, params_list, more = self._asked(
            prompts, sampling_params, lora_request, priority
        )
        with self._turn:
            return self._requests.run(prompt_list, params_list, use_tqdm=use_tqdm, **more)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue what `generate` would run, for `wait_for_completion` to run; the requests' ids.

        An engine that is asleep takes requests, too.
        """
        asked = self._asked(prompts, sampling_params, lora_request, priority)
        with self._turn:
            return self._requests.enqueue(asked[0], asked[1], **asked[2])

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **chat: Any,
    ) -> list[str]:
        """As `enqueue`, what `chat` would run; `chat` are its other arguments."""
        prompts = self._chat_prompts(messages, **chat)
        return self.enqueue(prompts, sampling_params, lora_request=lora_request)

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run what was enqueued, and give the outputs in the order of the calls.

        Requests that ended before (`sleep` with the mode `abort`) are among them. Ctrl-C leaves
        requests queued: call it again. Raises `InvalidRequestError` of an engine that is asleep.
        """
        with self._turn:
            return self._requests.wait(use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
        concurrency_limit: int | None = None,
    ) -> list[RequestOutput]:
        """The likeliest continuations of every prompt, best first; in the order of the prompts.

        `concurrency_limit` is the most prompts that are searched at the same time. Raises
        `InvalidRequestError` for a `beam_width` beyond half of the engine's `max_logprobs`.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(
                f"params has type {type(params).__name__}; it must be BeamSearchParams.",
                parameter="params",
            )
        engine = self.llm_engine
        searches = [
            BeamSearch(prompt, params, engine.config, engine.end_token_ids)
            for prompt in as_prompts(prompts)
        ]
        limit = len(searches) if concurrency_limit is None else max(concurrency_limit, 1)
        with self._turn, request_progress(len(searches), shown=use_tqdm) as advance:
            for begin in range(0, len(searches), limit):
                self._search(searches[begin : begin + limit], lora_request)
                for search in searches[begin : begin + limit]:
                    advance(search.result(None))
        return [search.result(engine.tokenizer) for search in searches]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        Contents may hold images, for a model that takes them (docs/images.md). Raises
        `ChatTemplateError` if the model has no chat template or it refuses the messages.
        """
        prompts = self._chat_prompts(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """What a pooling model makes of every prompt, as arrays; in the order of the prompts.

        `pooling_task` is one of `POOLING_TASKS`, by default what the model is for. Raises
        `InvalidRequestError` if it cannot do that, and `GenerationError` if a request fails.
        """
        if pooling_task is not None:
            pooling_task = checked_task("pooling_task", pooling_task)
        outputs = self._pool(
            "encode", prompts, pooling_params, pooling_task, use_tqdm, lora_request
        )
        return [pooling.pooling_output(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt. Raises as `encode` does."""
        outputs = self._pool("embed", prompts, pooling_params, "embed", use_tqdm, lora_request)
        return [pooling.embedding_output(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The scores of every prompt's classes. Raises as `encode` does."""
        outputs = self._pool(
            "classify", prompts, pooling_params, "classify", use_tqdm, lora_request
        )
        return [pooling.classification_output(output) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` goes with the one of `data_1`, or with its own.

        A cross-encoder (a classifier with one class) reads both texts together; of an embedding
        model it is the cosine. Raises as `encode` does.
        """
        config = pooling.pooling_of(self.llm_engine.config, "score")
        second = pooling.as_texts("data_2", data_2)
        given = pooling.as_texts("data_1", data_1)
        names = ("data_1", "data_2")
        first = pooling.paired(given, second, names)
        if pooling.scores_pairs(config, "score"):
            pairs = [pooling.pair_prompt(*pair) for pair in zip(first, second, strict=True)]
            outputs = self._pool("score", pairs, pooling_params, "classify", use_tqdm, lora_request)
            return [pooling.scoring_output(output) for output in outputs]
        texts = [*given, *second]
        outputs = self._pool("score", texts, pooling_params, "embed", use_tqdm, lora_request)
        firsts = pooling.paired(outputs[: len(given)], second, names)
        halves = zip(firsts, outputs[len(given) :], strict=True)
        return [pooling.similarity_output(*each) for each in halves]

    def _pool(
        self,
        what: str,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: str | None,
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        prompt_list = as_prompts(prompts)
        adapters = one_each("lora_request", lora_request, LoRARequest, len(prompt_list))
        config = pooling.pooling_of(self.llm_engine.config, what)
        params_list = [
            pooling.with_task(each, task or each.task or config.tasks[0])
            for each in one_each(
                "pooling_params", params, PoolingParams, len(prompt_list), PoolingParams()
            )
        ]
        with self._turn:
            return self._requests.run(
                prompt_list, params_list, use_tqdm=use_tqdm, adapters=adapters
            )

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """The prompt that a conversation amounts to."""
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer, and the engine has none (skip_tokenizer_init).",
                parameter="messages",
            )
        rendered = render_chat(
            tokenizer,
            messages,
            chat_template=chat_template or self._chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            images=self.llm_engine.images,
        )
        prompt = TokensPrompt(prompt=rendered.text, prompt_token_ids=rendered.token_ids)
        if rendered.images:
            prompt["multi_modal_data"] = {"image": rendered.images}
        if mm_processor_kwargs is not None:
            prompt["mm_processor_kwargs"] = dict(mm_processor_kwargs)
        return prompt

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no parameters are given: the model's own defaults."""
        return self.llm_engine.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self.llm_engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and the KV cache; the object cannot be used any more."""
        self.llm_engine.close()

    def __repr__(self) -> str:
        return f"<LLM {self.llm_engine.summary}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _search(self, searches: list[BeamSearch], adapter: LoRARequest | None) -> None:
        """Extend all beams of these searches, step by step, until all are done."""
        while running := [search for search in searches if not search.is_done]:
            asked = [search.prompts() for search in running]
            prompts = [prompt for each in asked for prompt in each]
            outputs = iter(
                self._requests.run(
                    prompts,
                    [running[0].request] * len(prompts),
                    use_tqdm=False,
                    adapters=[adapter] * len(prompts),
                )
            )
            for search, each in zip(running, asked, strict=True):
                search.advance([next(outputs) for _ in each])

    def _chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], **chat: Any
    ) -> list[TokensPrompt]:
        one = not is_list(messages) or not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        return [self.chat_prompt(conversation, **chat) for conversation in conversations]

    def _asked(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: Sequence[int] | None,
    ) -> tuple[list[Prompt], list[SamplingParams], dict[str, Any]]:
        """Arguments of `generate`, with one of each for every prompt."""
        prompt_list = as_prompts(prompts)
        defaults = self.get_default_sampling_params()
        params_list = one_each(
            "sampling_params", sampling_params, SamplingParams, len(prompt_list), defaults
        )
        priorities = [0] * len(prompt_list)
        if priority is not None:
            priorities = as_list("priority", priority, "integers")
        if len(priorities) != len(prompt_list):
            raise InvalidRequestError(
                f"priority has {len(priorities)} entries for {len(prompt_list)} prompts;"
                f" give one for each.",
                parameter="priority",
            )
        adapters = one_each("lora_request", lora_request, LoRARequest, len(prompt_list))
        return prompt_list, params_list, {"priorities": priorities, "adapters": adapters}
