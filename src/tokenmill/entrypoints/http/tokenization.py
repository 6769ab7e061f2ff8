"""POST /tokenize, POST /detokenize: the tokenizer, as prompts and chats go through it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.json_response import json_response
from tokenmill.entrypoints.http.openapi import json_body, replies
from tokenmill.entrypoints.http.prompts import chat_prompt
from tokenmill.entrypoints.http.protocol import DetokenizeRequest, TokenizeRequest
from tokenmill.entrypoints.http.replies import DetokenizeReply, TokenizeReply
from tokenmill.entrypoints.http.state import state_of
from tokenmill.errors import InvalidRequestError, shown

router = APIRouter(default_response_class=Response)


@router.post(
    "/tokenize",
    responses=replies(TokenizeReply, 400, 404),
    openapi_extra=json_body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    """Ids of a prompt, or of a conversation as a chat would have them."""
    state = state_of(request)
    fields = await read_request(request, TokenizeRequest)
    state.model_name(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("give either prompt or messages.", parameter="prompt")
    if fields.prompt is not None:
        text, special = fields.prompt, fields.add_special_tokens is not False
        ids = await state.engine.encode(text, add_special_tokens=special)
    else:
        ids = (await chat_prompt(state, fields)).token_ids
    token_strs: list[str] | UnsetType = UNSET
    if fields.return_token_strs:
        decode = state.tokenizer.decode_token
        token_strs = await state.in_text_thread(lambda: [decode(each) for each in ids])
    return json_response(
        TokenizeReply(
            count=len(ids),
            max_model_len=state.engine.config.model.max_model_len,
            tokens=ids,
            token_strs=token_strs,
        )
    )


@router.post(
    "/detokenize",
    responses=replies(DetokenizeReply, 400, 404),
    openapi_extra=json_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    """Text of ids."""
    state = state_of(request)
    fields = await read_request(request, DetokenizeRequest)
    state.model_name(fields.model)
    tokenizer, vocab_size = state.tokenizer, state.engine.config.model.vocab_size

    def decode() -> str:
        for token_id in fields.tokens:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"tokens holds {shown(token_id)}; token ids of this model lie between 0 and"
                    f" {vocab_size - 1}.",
                    parameter="tokens",
                )
        return tokenizer.decode(fields.tokens)

    return json_response(DetokenizeReply(prompt=await state.in_text_thread(decode)))
