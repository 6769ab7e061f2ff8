"""GET /docs, GET /openapi.json: the interface for readers and for programs."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

from tokenmill.entrypoints.http.json_response import json_response

router = APIRouter(include_in_schema=False)

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>tokenmill</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h2{margin-top:2rem;font-size:1.1rem}code{background:#8882;padding:.1em .3em;border-radius:3px}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;
border-bottom:1px solid #8884;padding:.3em .6em .3em 0}:root{color-scheme:light dark}
</style><h1>tokenmill</h1><p>The same as JSON: <a href="openapi.json">openapi.json</a></p>
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@router.get("/openapi.json")
async def openapi_json(request: Request) -> Response:
    """The OpenAPI document."""
    return json_response(request.app.openapi())


@router.get("/docs")
async def docs(request: Request) -> Response:
    """A page that needs nothing from elsewhere."""
    page = _HEAD + "".join(_sections(request.app.openapi()))
    return Response(page, media_type="text/html", headers={"content-security-policy": _POLICY})


def _sections(document: dict[str, Any]) -> list[str]:
    schemas = document["components"]["schemas"]
    sections = []
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            text = operation.get("description", "")
            sections.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            sections.append(f"<p>{escape(text)}</p>{_fields(operation, schemas)}")
    return sections


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A table of the body's fields."""
    if "requestBody" not in operation:
        return ""
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = schemas[reference.rpartition("/")[2]]
    required = schema.get("required", [])
    rows = []
    for name, field in schema["properties"].items():
        mark = " (required)" if name in required else ""
        kind, text = escape(_type(field)), escape(field.get("description", ""))
        rows.append(f"<tr><td><code>{escape(name)}</code>{mark}<td>{kind}<td>{text}")
    return f"<table><tr><th>field<th>type<th>meaning{''.join(rows)}</table>"


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(each) for each in field["anyOf"] if each.get("type") != "null")
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return "null"
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
