"""GET /v1/models, GET /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tokenmill.engine.adapters import KnownAdapter
from tokenmill.entrypoints.http.json_response import json_response
from tokenmill.entrypoints.http.openapi import replies
from tokenmill.entrypoints.http.replies import Model, ModelList
from tokenmill.entrypoints.http.state import ServerState, state_of

router = APIRouter(default_response_class=Response)


@router.get("/v1/models", responses=replies(ModelList))
async def list_models(request: Request) -> Response:
    """The names under which the model is served, and its adapters."""
    state = state_of(request)
    names = (*state.model_names, *state.engine.adapters)
    return json_response(ModelList(data=[_model(state, name) for name in names]))


@router.get(
    "/v1/models/{model_id:path}",
    responses=replies(Model, 404),
    openapi_extra={
        "parameters": [
            {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    },
)
async def get_model(request: Request) -> Response:
    """One of them."""
    state = state_of(request)
    name = state.model_name(request.path_params["model_id"] or "''")
    return json_response(_model(state, name))


def adapter_model(state: ServerState, known: KnownAdapter) -> Model:
    """What is told about an adapter."""
    return Model(
        id=known.ref.name,
        created=state.started,
        root=known.ref.path,
        parent=state.model_names[0],
        max_model_len=state.engine.config.model.max_model_len,
    )


def _model(state: ServerState, name: str) -> Model:
    if name in state.engine.adapters:
        return adapter_model(state, state.engine.adapters.get(name))
    model = state.engine.config.model
    return Model(id=name, created=state.started, root=model.name, max_model_len=model.max_model_len)
