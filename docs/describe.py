"""Write `x-codes` and `paths` of openapi.json: `.venv/bin/python docs/describe.py`.

endpoints.json has what differs from endpoint to endpoint. What they share comes from the code: who
may call a view, the headers of its responses, and the errors that it raises. The rest of
openapi.json is written by hand.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Flask

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import auth  # noqa: E402
from app import create_app  # noqa: E402
from raised_errors import errors_in  # noqa: E402
from service.responses import Problem, title_of  # noqa: E402
from settings import load  # noqa: E402

OPENAPI = HERE / "openapi.json"
ENDPOINTS = HERE / "endpoints.json"
LIMITS = [
    "RateLimit-Policy",
    "RateLimit",
    *(f"X-RateLimit-{name}" for name in ("Limit", "Remaining", "Reset")),
]
PARAMETER = re.compile(r"<(?:[^:>]+:)?([^>]+)>")  # as Flask writes it
FIELDS = ("operationId", "tags", "summary", "description", "security", "parameters")


def main() -> None:
    entries = json.loads(ENDPOINTS.read_text())
    OPENAPI.write_text(described(create_app(load({})), OPENAPI.read_text(), entries))


def described(app: Flask, openapi: str, own: Any) -> str:
    """The text of openapi.json, with what endpoints.json says."""
    codes = [row for each in (own, *own["endpoints"].values()) for row in each.get("codes", ())]
    codes.sort(key=lambda row: row["status"])
    rows = ",\n".join(f"    {json.dumps(row)}" for row in codes)
    made = paths_of(app, own["endpoints"], json.loads(openapi)["components"]["responses"])
    paths = json.dumps(made, indent=2).replace("\n", "\n  ")
    paths = re.sub(r'\{\s+("\$ref": "[^"]+")\s+\}', r"{\1}", paths)  # on one line
    for name, text in [("x-codes", f"[\n{rows}\n  ]"), ("paths", paths)]:
        old = rf'(?ms)(?<=^  "{name}": ).*?^  [\]}}](?=,$)'
        openapi = re.sub(old, lambda _, text=text: text, openapi)  # type: ignore[misc]
    return openapi


def paths_of(app: Flask, entries: Any, shared: Any) -> dict[str, Any]:
    """The paths of these entries; `shared` has the errors that are described once for all."""
    views = {
        (method, PARAMETER.sub(r"{\1}", rule.rule)): app.view_functions[rule.endpoint]
        for rule in app.url_map.iter_rules()
        for method in rule.methods or ()
    }
    paths: dict[str, Any] = {}
    for name, entry in entries.items():
        method, path = name.split()
        assert (method, path) in views, f"edit docs/endpoints.json: no view answers {name}"
        paths.setdefault(path, {})[method.lower()] = operation(views[method, path], entry, shared)
    return paths


def operation(view: Callable[..., Any], entry: Any, shared: Any) -> dict[str, Any]:
    """What a method of a path takes and returns. What the entry says of a field comes first."""
    source = inspect.getsource(view)
    needs_key = "@require_api_key" in source
    fields = {
        "operationId": re.sub("_(.)", lambda found: found[1].upper(), view.__name__),
        "tags": ["protected" if needs_key else "public"],
        "security": [{"apiKey": []}] if needs_key else [],
        **entry,
    }
    found = {name: fields[name] for name in FIELDS if name in fields}
    if "request" in entry:
        found["requestBody"] = {"required": True, **content(entry["request"])}
    good = entry.get("response", {})
    names = ["Cache-Control", *(LIMITS if needs_key else ()), *good.get("headers", ())]
    found["responses"] = {
        str(good.get("status", 200)): {
            "description": good.get("description", "Success."),
            "headers": headers(names),
            **content(good),
        }
    }
    for status, codes in sorted(errors_of(source, needs_key, entry).items()):
        found["responses"][str(status)] = error(status, codes, entry, shared)
    return found


def headers(names: Any) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def content(body: Any) -> dict[str, Any]:
    """The schema and the example of a body, or nothing if it has none."""
    media = {name: body[name] for name in ("schema", "example") if name in body}
    return {"content": {body.get("type", "application/json"): media}} if media else {}


def errors_of(source: str, needs_key: bool, entry: Any) -> dict[int, set[str]]:
    """The statuses of the errors that a client can get, with the codes that a view gives them."""
    found = [*errors_in(source), *((row["status"], row["code"]) for row in entry.get("codes", ()))]
    found += errors_in(inspect.getsource(auth)) if needs_key else []
    statuses = {400, 413, 500, *map(int, entry.get("errors", ())), *(status for status, _ in found)}
    if needs_key:
        statuses |= {503} if "enforce_limit=False" in source else {429, 503}
    return {each: {code for status, code in found if status == each} for each in statuses}


def error(status: int, codes: set[str], entry: Any, shared: Any) -> dict[str, Any]:
    """The error that endpoints share, with the headers that the entry adds, or one of its own."""
    name, added = title_of(status).replace(" ", ""), headers(entry.get("error_headers", ()))
    if name in shared and not added:
        return {"$ref": f"#/components/responses/{name}"}
    if name in shared:
        return {**shared[name], "headers": shared[name]["headers"] | added}
    body = Problem(status).get_response().get_json()
    fields = {field: {"const": value} for field, value in body.items()}
    fields |= {"detail": {"type": "string"}, "code": {"enum": sorted(codes) or [body["code"]]}}
    return {
        "description": entry.get("errors", {}).get(str(status), title_of(status)),
        "headers": headers(["Cache-Control"]) | added,
        "content": {
            "application/problem+json": {
                "schema": {"type": "object", "properties": fields, "required": [*fields]}
            }
        },
    }


if __name__ == "__main__":
    main()
