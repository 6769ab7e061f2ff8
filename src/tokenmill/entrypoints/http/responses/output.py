"""A response: the request repeated, and the answer's blocks as items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.entrypoints.http.blocks import Block, BlockKind
from tokenmill.entrypoints.http.errors import error_object
from tokenmill.entrypoints.http.replies import TokenLogprob, Usage
from tokenmill.entrypoints.http.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
)
from tokenmill.entrypoints.http.responses.tools import shown_tools
from tokenmill.sampling_params import SamplingParams

_PREFIXES = {
    BlockKind.TEXT: "msg",
    BlockKind.REASONING: "rs",
    BlockKind.CALL: "fc",
    BlockKind.CUSTOM_CALL: "ctc",
}
CALLS = (BlockKind.CALL, BlockKind.CUSTOM_CALL)


class OutputItems:
    """The items of one answer: each block has one, whose id is the same wherever it is told, and
    tells which response it belongs to (`router.responses` reads that).
    """

    def __init__(self, response_id: str, namespaces: Mapping[str, tuple[str, str]]) -> None:
        """`namespaces` are those of the tools whose names in the chat have one in front."""
        self._response_id = response_id
        self._namespaces = namespaces
        self._logprobs: dict[int, list[TokenLogprob]] = {}

    def id(self, block: Block) -> str:
        """That of a block's item."""
        secret = self._response_id.removeprefix("resp_")
        return f"{_PREFIXES[block.kind]}_{secret}_{block.index}"

    def add_logprobs(self, block: Block, entries: Sequence[TokenLogprob]) -> None:
        """More of a text's tokens."""
        self._logprobs.setdefault(block.index, []).extend(entries)

    def logprobs(self, block: Block) -> list[TokenLogprob]:
        """Those of a text's tokens so far; nothing where they were not asked for."""
        return self._logprobs.get(block.index, [])

    def begun(self, block: Block) -> dict[str, Any]:
        """The item of a block that is empty as yet."""
        if block.kind in CALLS:
            return self._call(block, "", "in_progress")
        return self._item(block, [], "in_progress")

    def finished(self, block: Block) -> dict[str, Any]:
        """The item of a block that has ended."""
        status = "completed" if block.ended else "incomplete"
        if block.kind in CALLS:
            return self._call(block, block.text, status)
        return self._item(block, [self.part(block, block.text)], status)

    def part(self, block: Block, text: str) -> dict[str, Any]:
        """The one part of a text or of reasoning, with so much of it."""
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs(block) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id(block), "status": status, "content": content}
        if block.kind is BlockKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant"}

    def _call(self, block: Block, text: str, status: str) -> dict[str, Any]:
        namespace, name = self._namespaces.get(block.name, (None, block.name))
        is_custom = block.kind is BlockKind.CUSTOM_CALL
        return {
            "id": self.id(block),
            "type": "custom_tool_call" if is_custom else "function_call",
            "status": status,
            "call_id": block.call_id,
            **({} if namespace is None else {"namespace": namespace}),
            "name": name,
            "input" if is_custom else "arguments": text,
        }


def empty_response(
    request: ResponsesRequest, params: SamplingParams, *, id: str, created: int, model: str
) -> ResponseReply:
    """What is known of a response before it has an answer; the request's fields with their
    defaults.
    """
    text = request.text or {}
    return ResponseReply(
        id=id,
        created_at=created,
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": (request.reasoning or {}).get("effort"), "summary": None},
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=params.temperature,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        text={**text, "format": text.get("format") or {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=shown_tools(request.tools or []),
        top_logprobs=request.top_logprobs or 0,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


def response_usage(usage: Usage) -> ResponseUsage:
    """The counts of a chat under the names of this protocol."""
    prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=getattr(prompt, "cached_tokens", 0)),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(getattr(output, "reasoning_tokens", 0)),
        total_tokens=usage.total_tokens,
    )


def response_error(error: Exception) -> dict[str, Any]:
    """What a failed response says of its error."""
    ours = error_object(error)["error"]
    code = "server_error" if ours["type"] == "server_error" else ours["code"]
    return {"code": code, "message": ours["message"]}
