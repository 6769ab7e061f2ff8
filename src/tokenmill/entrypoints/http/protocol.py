"""Request bodies, as OpenAI's clients and vLLM's send them.

A field that is null counts as left out. Types are checked when a body is decoded; values by
`SamplingParams`, the input processor and the endpoints. The bounds in the texts and schemas are
those checks'; decoding itself does not apply them, since its messages could not show the value.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Raw, Struct, UnsetType

from tokenmill.entrypoints.http.field_types import (
    CacheSalt,
    ModelName,
    Priority,
    Seed,
    Timeout,
    meta,
)
from tokenmill.repetition import MAX_PATTERN_SIZE
from tokenmill.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)


def _integer(low: int, high: int | None = None) -> dict[str, Any]:
    return {"minimum": low} if high is None else {"minimum": low, "maximum": high}


_FORM = {
    "properties": {"type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]}},
    "required": ["type"],
}
_STOPS = {"maxItems": MAX_STOP_STRINGS, "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TOKEN_IDS = {"maxItems": MAX_STOP_TOKEN_IDS}
_BIASES = {
    "type": ["object", "null"],
    "additionalProperties": {"type": "number"},
    "maxProperties": MAX_LOGIT_BIASES,
}


class RepetitionDetection(Struct, kw_only=True, omit_defaults=True):
    """Ends an answer that repeats itself."""

    max_pattern_size: Annotated[
        int, meta("Tokens of the longest pattern.", **_integer(1, MAX_PATTERN_SIZE))
    ]
    min_pattern_size: Annotated[int, meta("Tokens of the shortest.", **_integer(0))] = 1
    min_count: Annotated[int, meta("How often it comes in a row.", **_integer(2))] = 2


class StreamOptions(Struct, kw_only=True):
    """What a stream tells besides text."""

    include_usage: bool | None = None
    """One more chunk at the end, without choices and with the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class SamplingFields(Struct, kw_only=True):
    """Fields that completions and chats share."""

    model: ModelName = None
    n: Annotated[
        int | None, meta("Sequences for each prompt; above 1 only if sampling.", **_integer(1))
    ] = None
    temperature: Annotated[
        float | None,
        meta("0 always takes the best token.", minimum=0, maximum=MAX_TEMPERATURE),
    ] = None
    top_p: Annotated[float | None, meta("In (0, 1].", exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, meta("Best tokens to keep; 0 or -1 is off.", minimum=-1)] = None
    min_p: Annotated[
        float | None, meta("Least share of the best token's probability.", minimum=0, maximum=1)
    ] = None
    presence_penalty: Annotated[
        float | None,
        meta("Taken from tokens that the answer has.", minimum=-MAX_PENALTY, maximum=MAX_PENALTY),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        meta("The same, each time that it has them.", minimum=-MAX_PENALTY, maximum=MAX_PENALTY),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        meta(
            "Above 1 makes tokens of prompt and answer less likely.",
            minimum=1 / MAX_REPETITION_PENALTY,
            maximum=MAX_REPETITION_PENALTY,
        ),
    ] = None
    logit_bias: Annotated[
        Raw | UnsetType, meta("Token id to what is added to its logit.", **_BIASES)
    ] = UNSET
    """Decoded by `sampling.py`, if it is not too long."""
    allowed_token_ids: Annotated[
        list[int] | None,
        meta("The only ids that may come.", minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        meta(
            "Words that must not come.",
            maxItems=MAX_BAD_WORDS,
            minLength=1,
            maxLength=MAX_BAD_WORD_LENGTH,
        ),
    ] = None
    seed: Seed = None
    stop: Annotated[
        str | list[str] | None, meta("Strings that end the text; none of them empty.", **_STOPS)
    ] = None
    stop_token_ids: Annotated[list[int] | None, meta("Ids that end it.", **_TOKEN_IDS)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, meta("Tokens before anything may stop.", minimum=0)] = None
    thinking_token_budget: Annotated[
        int | None, meta("Most tokens of reasoning; -1 is no limit.", minimum=-1)
    ] = None
    repetition_detection: RepetitionDetection | None = None
    logprob_token_ids: Annotated[
        list[int] | None,
        meta(
            "Ids whose log-probabilities are given in place of the best ones'.",
            maxItems=MAX_LOGPROB_TOKEN_IDS,
        ),
    ] = None
    stream_interval: Annotated[
        int | None, meta("Tokens between two chunks of a stream.", minimum=1)
    ] = None
    vllm_xargs: Annotated[
        dict[str, str | int | float | list[str | int | float]] | None,
        meta("Arguments of the server's own logits processors."),
    ] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        meta("Whose KV the prompt begins with, or that it is computed for another server."),
    ] = None
    use_beam_search: Annotated[
        bool | None, meta("The `n` most likely answers instead of sampled ones.")
    ] = None
    length_penalty: Annotated[
        float | None, meta("Of beam search: above 0 favours longer answers.")
    ] = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        int | None, meta("Keep the last so many prompt tokens; -1 as many as fit.", minimum=-1)
    ] = None
    prompt_logprobs: Annotated[
        int | None, meta("Log-probabilities of the prompt's tokens; not in a stream.", minimum=-1)
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        meta("The form of the answer: text, json_object, json_schema or structural_tag.", **_FORM),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        meta(
            "The same in vLLM's terms: one of json, json_object, regex, choice, grammar, and"
            " structural_tag, and options."
        ),
    ] = None
    guided_json: Annotated[Any, meta("Older name of structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, meta("Of structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, meta("Of structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, meta("Of structured_outputs.grammar.")] = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: Annotated[bool | None, meta("Put the prompt in front of the answer.")] = None
    add_special_tokens: Annotated[
        bool | None, meta("What the tokenizer itself puts around a text, such as a BOS.")
    ] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    data_parallel_rank: Annotated[
        int | None, meta("The replica that is to compute it.", **_integer(0))
    ] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: Annotated[
        bool | None, meta("Write tokens in log-probabilities as `token_id:7`.")
    ] = None
    timings: Annotated[bool | None, meta("Add a `timings` object to the answer.")] = None
    timings_per_token: Annotated[bool | None, meta("The same, by llama.cpp's name.")] = None
    timeout: Timeout = None
    user: str | None = None
    request_id: Annotated[str | None, meta("Ignored; send an `x-request-id` header.")] = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[int | str | list[int]],
        meta("A text, its token ids, or a list of texts and lists of ids."),
    ]
    max_tokens: Annotated[
        int | None,
        meta("Most tokens to generate, 16 unless given; 0 with `echo` only.", minimum=0),
    ] = None
    logprobs: Annotated[
        int | None, meta("The chosen token's log-probability and so many best ones.", minimum=-1)
    ] = None
    best_of: Annotated[int | None, meta("Must equal `n`.", minimum=1)] = None


_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART: dict[str, Any] = {
    "type": "object",
    "description": "For models that take images; as a data: URL, or as the server allows.",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {
                "url": {"type": "string"},
                "detail": {"type": "string", "enum": ["auto", "low", "high"]},
            },
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_MESSAGES: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {
                "type": "string",
                "enum": ["system", "developer", "user", "assistant", "tool", "function"],
            },
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]},
                    },
                ]
            },
        },
        "required": ["role", "content"],
    },
}


_TOOL_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,256}$"}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": _TOOL_NAME,
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
_CUSTOM = {
    "type": "object",
    "properties": {
        "name": _TOOL_NAME,
        "description": {"type": ["string", "null"]},
        "format": {"type": ["object", "null"]},
    },
    "required": ["name"],
}
_TOOLS: dict[str, Any] = {
    "maxItems": 1024,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"const": "function"}, "function": _FUNCTION},
                "required": ["function"],
            },
            {
                "type": "object",
                "properties": {"type": {"const": "custom"}, "custom": _CUSTOM},
                "required": ["type", "custom"],
            },
        ]
    },
}


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], meta("The conversation.", **_MESSAGES)]
    add_generation_prompt: Annotated[
        bool | None, meta("End with what begins an answer; true unless given.")
    ] = None
    continue_final_message: Annotated[
        bool | None, meta("Continue the last message; excludes add_generation_prompt.")
    ] = None
    chat_template: Annotated[
        str | None, meta("A Jinja template; refused unless the server trusts them.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, meta("Further variables for the template.")
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, meta("Options of the model's image processor.")
    ] = None
    documents: list[dict[str, Any]] | None = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        meta("Functions and custom tools that the model may call.", **_TOOLS),
    ] = None
    tool_choice: Annotated[
        Any, meta("none, auto, required, or an object that names a function or allows some.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, meta("False: at most one call.")] = None
    include_reasoning: Annotated[
        bool | None, meta("False leaves the reasoning out of the answer.")
    ] = None
    reasoning_effort: Annotated[str | None, meta("Handed to the template.")] = None
    max_tokens: Annotated[
        int | None, meta("Most tokens to generate; up to the context unless given.", minimum=1)
    ] = None
    max_completion_tokens: Annotated[int | None, meta("The same; this one wins.", minimum=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[
        int | None, meta("Best tokens per position; needs `logprobs`.", minimum=0)
    ] = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]] | None, meta("As in a chat.", **_MESSAGES)] = None
    add_special_tokens: Annotated[
        bool | None, meta("True unless given for a prompt, false for messages.")
    ] = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[int], meta("Ids of the model's vocabulary.")]
    model: str | None = None
