"""The operations of openapi.json: what a client sends to each, and what it should get."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from helpers.documents import API, resolved

JSON_TYPES: dict[type, str] = {
    **{dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"},
    **{int: "integer", float: "number"},
}
NONSENSE = ("x", "-1", "0", "\u00b2", "9" * 30, "x" * 300)  # as parameters
UNSTORABLE = ("a\ud800", "a\0b")  # texts of JSON that SQLite or PostgreSQL cannot store
WRONG: tuple[Any, ...] = (None, True, 7, -1, 10**30, 1.5, "", "x" * 5000, [], {}, [[]], *UNSTORABLE)
FORMATS = {
    "date-time": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",
    "date": r"^\d{4}-\d\d-\d\d$",
    "email": "@",
    "time": r"^\d\d:\d\d:\d\d",
    "uri": r"^\w+:",
    "uuid": r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
}
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
    "enum": lambda value, bound: value in bound,
    "const": lambda value, bound: value == bound,
    "pattern": lambda value, bound: bool(re.search(bound, value)),
    "format": lambda value, bound: bool(re.search(FORMATS.get(bound, ""), str(value))),
}

RULES = {"enum", "format", "minLength", "pattern"}  # those of rows that were made for a test
KEYWORDS = {  # those that `misfits` looks at besides, and those that only explain
    *("type", "properties", "required", "additionalProperties", "items"),
    *("title", "description", "default", "example", "examples", "deprecated"),
    *("anyOf", "oneOf", "readOnly", "writeOnly"),
}


def misfits(body: Any, schema: Any, description: Any, name: str = "the body") -> list[str]:
    """What differs from the schema: types, bounds, the form of texts, the fields of objects.

    A time needs the format date-time.
    """
    schema = resolved(schema, description)
    assert not (unknown := schema.keys() - BOUNDS.keys() - KEYWORDS), (
        f"add {unknown} of {name} to BOUNDS in tests/helpers/described.py, or to KEYWORDS"
    )
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return min((misfits(body, each, description, name) for each in choices), key=len)
    kind = JSON_TYPES[type(body)]
    types = schema.get("type", kind)
    fits = (kind in types or (kind == "integer" and "number" in types)) and (
        # Or else a generated client takes it for a text.
        schema.get("format") == "date-time" or not re.fullmatch(r"[\d-]{10}T[\d:.]+Z", str(body))
    )
    is_made = isinstance(body, str) and body[:1] in ("~", "=")  # such as add_many_rows stores
    bounds = [] if body is None else BOUNDS.keys() & schema.keys() - (RULES if is_made else set())
    if not (fits and all(BOUNDS[bound](body, schema[bound]) for bound in bounds)):
        return [f"{name} is {str(body)[:200]!r}, and described as {schema}"]
    parts = schema.get("properties", {}) if isinstance(body, dict) else {}
    required = set(schema.get("required", ()))
    if isinstance(body, dict) and not required <= body.keys() <= (parts or body).keys():
        return [f"{name} has {[*body]}, and described are {[*parts]}, required {[*required]}"]
    inner = [(body[part], parts[part], part) for part in parts if part in body]
    inner += [(each, schema["items"], name) for each in body or ()] if "items" in schema else []
    return [found for each, part, name in inner for found in misfits(each, part, description, name)]


@dataclass(frozen=True, eq=False, repr=False)
class Operation:
    """A method of a path, and its entry in a description."""

    description: Any
    path: str
    method: str  # in capitals
    entry: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    __repr__ = __str__

    @property
    def advice(self) -> str:
        return f"edit docs/endpoints.json: {self}"

    @property
    def needs_key(self) -> bool:
        """Whether a key is required, and not only allowed."""
        security = self.entry.get("security")
        assert security is not None, f"{self.advice}: security, which is [] for a public one"
        return bool(security) and {} not in security

    @property
    def is_safe(self) -> bool:
        return self.method in ("GET", "HEAD")

    @property
    def responses(self) -> dict[str, Any]:
        return {
            status: resolved(each, self.description)
            for status, each in self.entry["responses"].items()
        }

    @property
    def parameters(self) -> list[Any]:
        found = [resolved(each, self.description) for each in self.entry.get("parameters", ())]
        assert all("example" in each for each in found), f"{self.advice}: example of a parameter"
        return found

    @property
    def query(self) -> dict[str, Any]:
        """The schemas of the parameters of the query, by name."""
        return {
            each["name"]: resolved(each.get("schema", {}), self.description)
            for each in self.parameters
            if each["in"] == "query"
        }

    @property
    def largest(self) -> dict[str, Any]:
        """The largest value of each parameter of the query that has a maximum."""
        return {
            name: schema["maximum"] for name, schema in self.query.items() if "maximum" in schema
        }

    def url(
        self, value: str = "", only_required: bool = False, changes: dict[str, Any] | None = None
    ) -> str:
        """The path with the examples of its parameters, or with this value for each."""
        described = [each for each in self.parameters if each.get("required") or not only_required]
        given = {each["name"]: value or each["example"] for each in described} | (changes or {})
        values = {
            name: each if isinstance(each, str) else json.dumps(each)
            for name, each in given.items()
        }
        query = {name: values[name] for name in self.query.keys() & values.keys()}
        path = self.path.format(**{name: quote(text, safe="") for name, text in values.items()})
        return f"{path}?{urlencode(query)}"

    @property
    def body(self) -> tuple[str, Any]:
        """The type and the schema of the request's body; "" if it has none."""
        kind, media = self._media
        return kind, resolved(media["schema"], self.description)

    @property
    def example(self) -> Any:
        """The example of the request's body."""
        _, media = self._media
        assert "example" in media, f"{self.advice}: example of requestBody"
        return media["example"]

    @property
    def _media(self) -> tuple[str, Any]:
        none: Any = {"content": {"": {"schema": {}, "example": None}}}
        return next(
            iter(resolved(self.entry.get("requestBody", none), self.description)["content"].items())
        )

    def sent(self, value: Any) -> dict[str, Any]:
        """The arguments that let a test client send this body."""
        kind, _ = self.body
        if not kind:
            return {}
        return {
            # werkzeug encodes a form.
            "data": json.dumps(value) if kind.endswith("json") else value,
            "content_type": kind,
        }


def values_of(schema: Any) -> Iterator[tuple[Any, bool]]:
    """Values for a parameter of the query, each with whether it is to be taken."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("type") in ("integer", "number"):
        yield from ((text, False) for text in ("x", "1x", "\u00b2", "1e400", "nan"))
    yield from (("1.5", False),) if schema.get("type") == "integer" else ()
    yield from ((bound, True) for bound in (low, high) if bound is not None)
    yield from ((low - 1, False),) if low is not None else ()
    yield from ((high + 1, False), ("9" * 30, False)) if high is not None else ()
    is_boolean = schema.get("type") == "boolean"
    yield from ((value, True) for value in schema.get("enum", (True, False) if is_boolean else ()))
    yield from (("x" * 20, False),) if "enum" in schema else ()
    if (size := schema.get("maxLength")) and "format" not in schema:  # such as an address
        longest = "x" * size
        yield from ((longest, not misfits(longest, schema, {})), (longest + "x", False))


def changed(example: Any, schema: Any, description: Any) -> Iterator[tuple[Any, Any]]:
    """Values, and examples in which one of them stands in the place of a part."""
    schema = resolved(schema, description)
    bounds = ("minimum", -1), ("maximum", 1)
    yield from ((schema[n] + step, schema[n] + step) for n, step in bounds if n in schema)
    for name, part in schema.get("properties", {}).items() if isinstance(example, dict) else ():
        yield from ((value, example | {name: value}) for value in WRONG)
        for value, inner in changed(example.get(name), part, description):
            yield value, example | {name: inner}
    if isinstance(example, list):
        yield from ((size, example[:1] * size) for size in (0, schema.get("maxItems", 99) + 1))
        yield from ((value, [value, *example[1:]]) for value in WRONG)
        for value, inner in changed(example[0], schema["items"], description):
            yield value, [inner, *example[1:]]


def parts_of(body: Any) -> Iterator[Any]:
    """The body, and all that is in its objects and lists."""
    yield body
    for part in body.values() if isinstance(body, dict) else body if isinstance(body, list) else ():
        yield from parts_of(part)


ANY_TIME = r"[\d-]+[T ][\d:.]+|\b[1-3]\d{9}\b"


def times_in(text: str) -> list[float]:
    """The times in a text, in Unix seconds."""
    return [
        float(each) if each.isdigit() else datetime.fromisoformat(f"{each}+00:00").timestamp()
        for each in re.findall(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|\b[1-3]\d{9}\b", text)
    ]


def operations(description: Any) -> Iterator[Operation]:
    for path, methods in description["paths"].items():
        for method, entry in methods.items():
            if method != "parameters":
                yield Operation(description, path, method.upper(), entry)


OPERATIONS = [*operations(API)]
ENDPOINTS = [each.url() for each in OPERATIONS if each.method == "GET"]
