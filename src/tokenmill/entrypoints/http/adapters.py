"""POST /v1/load_lora_adapter, POST /v1/unload_lora_adapter; and the adapters that a server starts
with.

A request can name no file but those below the folder that the operator has set (`lora_root`).
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.http.adapter_protocol import LoadAdapterRequest, UnloadAdapterRequest
from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.engine import Engine
from tokenmill.entrypoints.http.errors import AdminDisabledError
from tokenmill.entrypoints.http.json_response import json_response
from tokenmill.entrypoints.http.models import adapter_model
from tokenmill.entrypoints.http.openapi import json_body, replies
from tokenmill.entrypoints.http.replies import Model
from tokenmill.entrypoints.http.state import ServerState, state_of
from tokenmill.errors import AdapterError, ConfigError, InvalidRequestError, shown
from tokenmill.features.lora.peft import signature
from tokenmill.lora_request import LoRARequest, check_adapter_name

router = APIRouter(default_response_class=Response)


@router.post(
    "/v1/load_lora_adapter",
    responses=replies(Model, 400, 403, 503),
    openapi_extra=json_body(LoadAdapterRequest),
)
async def load_adapter(request: Request) -> Response:
    """Read an adapter, so that requests may choose it."""
    state = state_of(request)
    _check_switched_on(state)
    fields = await read_request(request, LoadAdapterRequest)
    check_adapter_name(fields.lora_name, "lora_name")
    _check_free(state, fields.lora_name, replaces=bool(fields.load_inplace))
    path = _below_root(state.args.lora_root, fields.lora_path)
    known = await state.engine.load_adapter(LoRARequest(fields.lora_name, str(path)))
    return json_response(adapter_model(state, known))


@router.post(
    "/v1/unload_lora_adapter",
    responses=replies(Model, 400, 403, 404),
    openapi_extra=json_body(UnloadAdapterRequest),
)
async def unload_adapter(request: Request) -> Response:
    """Let no further request choose an adapter; those under way finish with it."""
    state = state_of(request)
    _check_switched_on(state)
    fields = await read_request(request, UnloadAdapterRequest)
    return json_response(adapter_model(state, state.engine.adapters.remove(fields.lora_name)))


def parse_adapters(given: list[str] | None, model_names: tuple[str, ...]) -> list[LoRARequest]:
    """What `lora_modules` names, as NAME=PATH each. Raises `ConfigError`."""
    requests: dict[str, LoRARequest] = {}
    for each in given or ():
        name, equals, path = each.partition("=")
        if not (equals and name.strip() and path.strip()):
            raise ConfigError(f"lora_modules holds {shown(each)}; give each as NAME=PATH.")
        if name in requests or name in model_names:
            raise ConfigError(f"lora_modules: the name {shown(name)} is taken; give another one.")
        requests[name] = LoRARequest(name, str(Path(path).expanduser()))
    return list(requests.values())


def check_first_adapters(args: ServeArgs, engine_args: EngineArgs) -> None:
    """Raise `ConfigError` for what can be seen to be wrong before the model is loaded."""
    names = tuple(args.served_model_name or [engine_args.model])
    requests = parse_adapters(args.lora_modules, names)
    if (requests or args.enable_lora_updates) and not engine_args.enable_lora:
        setting = "lora_modules" if requests else "enable_lora_updates"
        raise ConfigError(f"{setting} needs enable_lora=True.")
    for request in requests:
        try:
            signature(Path(request.path))
        except AdapterError as error:
            raise ConfigError(f"lora_modules: {request.name}: {error}") from error


async def load_first_adapters(engine: Engine, requests: list[LoRARequest]) -> None:
    """Load the adapters that a server starts with. Raises `ConfigError` for one that is bad."""
    for request in requests:
        try:
            await engine.load_adapter(request)
        except AdapterError as error:
            raise ConfigError(f"lora_modules: {request.name}: {error}") from error


def _check_switched_on(state: ServerState) -> None:
    if not state.args.enable_lora_updates:
        raise AdminDisabledError(
            "adapters cannot be loaded or unloaded here (enable_lora_updates)."
        )
    state.engine.adapters.check_enabled()


def _check_free(state: ServerState, name: str, *, replaces: bool) -> None:
    if name in state.model_names:
        raise InvalidRequestError(
            f"lora_name={shown(name)} is the name of the model itself.", parameter="lora_name"
        )
    if name in state.engine.adapters and not replaces:
        raise InvalidRequestError(
            f"lora_name={shown(name)} is loaded already; set load_inplace=true to replace it.",
            parameter="lora_name",
        )


def _below_root(root: str | None, given: str) -> Path:
    """The directory that a request means: below the root, links resolved.

    What lies elsewhere is refused in the same words, whether or not it is there.
    """
    refused = InvalidRequestError(
        f"lora_path={shown(given)} names no directory of adapters below this server's lora_root.",
        parameter="lora_path",
    )
    if root is None:
        raise AdminDisabledError("this server reads no adapters from its disk (lora_root).")
    try:
        base = Path(root).expanduser().resolve(strict=True)
        path = (base / given).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    if base not in path.parents or not path.is_dir():
        raise refused
    return path
