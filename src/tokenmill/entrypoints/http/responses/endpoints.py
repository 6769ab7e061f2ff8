"""POST /v1/responses, POST /v1/responses/input_tokens; and what can be done with responses that are
kept: GET, DELETE, POST .../cancel, GET .../input_items.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.errors import (
    PreviousResponseNotFoundError,
    ResponseNotFoundError,
)
from tokenmill.entrypoints.http.json_response import json_response
from tokenmill.entrypoints.http.openapi import json_body, replies
from tokenmill.entrypoints.http.prompts import chat_prompt, check_num_values
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.responses import background
from tokenmill.entrypoints.http.responses.items import Item, checked_items
from tokenmill.entrypoints.http.responses.job import ResponseInput, ResponsesJob
from tokenmill.entrypoints.http.responses.protocol import (
    DeletedReply,
    InputItemsReply,
    InputTokensReply,
    InputTokensRequest,
    ResponseReply,
    ResponsesRequest,
)
from tokenmill.entrypoints.http.responses.store import KeptResponse, TooMuchKeptError
from tokenmill.entrypoints.http.responses.translation import chat_of
from tokenmill.entrypoints.http.sse import JsonAnswer
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.entrypoints.http.tools import AnswerPlan
from tokenmill.errors import InvalidRequestError, shown

router = APIRouter(default_response_class=Response)

MAX_LISTED = 100
_LONGEST_NUMBER = 9
"""Digits."""
_IN_PATH: dict[str, Any] = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
_PAGE: list[dict[str, Any]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


@router.post(
    "/v1/responses",
    responses=replies(ResponseReply, stream=True),
    openapi_extra=json_body(ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    """Answer items with items."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, ResponsesRequest)
    given = await _resolved(state, record, fields)
    job = ResponsesJob(state, record, fields, given)
    if not fields.background:
        return job.response()
    _check_background(fields)

    async def begin() -> bytes:
        return msgspec.json.encode(await background.start(state, record, job))

    return JsonAnswer(state, record, begin)


@router.post(
    "/v1/responses/input_tokens",
    responses=replies(InputTokensReply, 400, 404, 408, 413, 415),
    openapi_extra=json_body(InputTokensRequest),
)
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    state, record = state_of(request), record_of(request)
    fields = await read_request(request, InputTokensRequest)
    state.model_name(fields.model)
    given = await _resolved(state, record, fields)
    chat, renames = chat_of(fields, given.items, given.history)
    with renames.applied():
        AnswerPlan(state, chat)  # which leaves out the tools that the choice rules out
        rendered = await chat_prompt(state, chat)
    return json_response(InputTokensReply(input_tokens=len(rendered.token_ids)))


@router.get(
    "/v1/responses/{response_id}",
    responses=replies(ResponseReply, 400, 404),
    openapi_extra={"parameters": [_IN_PATH]},
)
async def get_response(request: Request) -> Response:
    """A response that was kept."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequestError(
            "stream: responses that are kept are not streamed again; leave it out.",
            parameter="stream",
        )
    return Response((await _kept(request)).body, media_type="application/json")


@router.delete(
    "/v1/responses/{response_id}",
    responses=replies(DeletedReply, 404),
    openapi_extra={"parameters": [_IN_PATH]},
)
async def delete_response(request: Request) -> Response:
    """Forget a response; one that is under way is broken off."""
    state = state_of(request)
    kept = await _kept(request)
    await background.cancel(state, kept.id)
    await state.responses.delete(kept.id, kept.owner)
    return json_response(DeletedReply(id=kept.id))


@router.post(
    "/v1/responses/{response_id}/cancel",
    responses=replies(ResponseReply, 400, 404),
    openapi_extra={"parameters": [_IN_PATH]},
)
async def cancel_response(request: Request) -> Response:
    """Break off a response in the background; one that has ended stays as it is."""
    kept = await _kept(request)
    if not msgspec.json.decode(kept.body)["background"]:
        raise InvalidRequestError(
            f"response_id={shown(kept.id)} was not created with background=true; a response that"
            f" is waited for ends when its client leaves.",
            parameter="response_id",
        )
    await background.cancel(state_of(request), kept.id)
    return Response((await _kept(request)).body, media_type="application/json")


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses=replies(InputItemsReply, 400, 404),
    openapi_extra={"parameters": [_IN_PATH, *_PAGE]},
)
async def list_input_items(request: Request) -> Response:
    """The input of a response, the latest item first."""
    query = request.query_params
    limit = query.get("limit", "20")
    is_short = len(limit) <= _LONGEST_NUMBER and limit.isascii()
    if not (is_short and limit.isdigit() and 1 <= int(limit) <= MAX_LISTED):
        raise InvalidRequestError(
            f"limit={shown(limit)} must be an integer between 1 and {MAX_LISTED}.",
            parameter="limit",
        )
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order={shown(order)} must be asc or desc.", parameter="order")
    kept = await _kept(request)
    items = await state_of(request).responses.input_items(kept.id)
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequestError(
                f"after={shown(after)} is no item of this response's input.", parameter="after"
            )
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return json_response(
        InputItemsReply(
            data=page,
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
            has_more=len(items) > len(page),
        )
    )


async def _kept(request: Request) -> KeptResponse:
    """The response that a path names. Raises `ResponseNotFoundError`."""
    id, owner = request.path_params["response_id"], record_of(request).key_name or ""
    kept = await state_of(request).responses.get(id, owner)
    if kept is None:
        raise ResponseNotFoundError(f"response {shown(id)} is not kept here, or no longer.")
    return kept


async def _resolved(
    state: ServerState, record: RequestRecord, fields: InputTokensRequest
) -> ResponseInput:
    """The request's items and history, with what they refer to.

    Raises `InvalidRequestError`, `PreviousResponseNotFoundError`.
    """
    owner = record.key_name or ""
    check_num_values({"input": fields.input})  # before each of them is looked at
    items = checked_items(fields.input)
    # A request may refer to as much as it could bring.
    limit = state.args.max_body_bytes
    await _resolve_references(state, owner, items, limit)
    history: list[Item] = []
    if fields.previous_response_id is not None:
        try:
            found = await state.responses.history(fields.previous_response_id, owner, limit)
        except TooMuchKeptError:
            raise _too_much("previous_response_id", limit) from None
        if found is None:
            raise PreviousResponseNotFoundError(
                f"previous_response_id={shown(fields.previous_response_id)} is not kept here, or no"
                f" longer; send its items as input.",
                parameter="previous_response_id",
            )
        status, history = found
        if status == "in_progress":
            raise InvalidRequestError(
                f"previous_response_id={shown(fields.previous_response_id)} is still computed; wait"
                f" until it has ended.",
                parameter="previous_response_id",
            )
    return ResponseInput(items, history)


async def _resolve_references(
    state: ServerState, owner: str, items: list[Item], limit: int
) -> None:
    """Put what they refer to in the places of references."""
    places = [i for i, item in enumerate(items) if item["type"] == "item_reference"]
    try:
        found = await state.responses.items([items[i]["id"] for i in places], owner, limit)
    except TooMuchKeptError:
        raise _too_much("input", limit) from None
    for i, item in zip(places, found, strict=True):
        if item is None:
            where = f"input[{i}].id"
            raise InvalidRequestError(
                f"{where}={shown(items[i]['id'])} is no item that is kept here; send it in full.",
                parameter=where,
            )
        items[i] = item


def _too_much(where: str, limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} refers to items of more than {limit} bytes (max_body_bytes); refer to less.",
        parameter=where,
    )


def _check_background(fields: ResponsesRequest) -> None:
    for name, wrong in (("store", fields.store is False), ("stream", bool(fields.stream))):
        if wrong:
            raise InvalidRequestError(
                f"{name}: with background=true, a response is kept and not streamed; leave it out.",
                parameter=name,
            )
