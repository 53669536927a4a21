"""Every operation of openapi.json does what its entry says, and nothing that an API must not do.

The same tests go through tests/helpers/sample.py, which has what the service lacks: a body that is
stored, a table, a stream. So an endpoint of any kind that is described is also tested.
With --postgres, they use PostgreSQL.
"""

import inspect
import json
import re
import time
from collections.abc import Callable, Iterator
from html import unescape
from io import BytesIO
from itertools import chain, islice, product
from typing import Any
from unittest import mock
from urllib.parse import unquote, urljoin

import gevent
import pytest
from flask import Flask, request, request_finished
from flask.testing import FlaskClient
from peewee import FloatField, IntegerField, OperationalError
from werkzeug.test import TestResponse

import auth
import raised_errors
from accounts import api_keys, users
from conftest import NewKey
from helpers import sample
from helpers.described import (
    ANY_TIME,
    NONSENSE,
    OPERATIONS,
    UNSTORABLE,
    Operation,
    changed,
    misfits,
    parts_of,
    times_in,
    values_of,
)
from helpers.documents import (
    API,
    OPENAPI,
    SOCKETS,
    needs_key,
    resolved,
    rows,
)
from helpers.paths import COMPLETE, KEYS, PARAMETER, SEVERAL, TEST, TOTALS, UNLIMITED, pages
from helpers.stored import (
    HIDDEN,
    NAME,
    NEEDED,
    OWN,
    TEXTS,
    add_hidden_user,
    add_many_rows,
    add_rows,
    change,
    check_beside_others,
    fields,
    hidden_rows,
    neglected,
    outage,
    remarked,
    rename,
    row,
    snapshot,
    stored_secrets,
    turned,
    write,
)
from models import DAY, HOUR, TABLES, ApiKey, User, db, now
from service.application import Service
from storage.key_store import FIND

EVERY = [*OPERATIONS, *sample.OPERATIONS]
READING = pytest.mark.parametrize("operation", [each for each in EVERY if each.is_safe], ids=str)
MANY = re.compile(r"=B(?!AAE)[A-J]{3}\b")  # texts of add_many_rows and rename, but for the full row
NONCE = r'name="nonce" value="\w+"'
HEADERS = API["components"]["headers"]
OURS = ("401", "413", "429")  # errors whose words don't come from views
LIMIT = r"\d[\d,]* requests? per \w+|'violated.*"  # what differs from key to key in a 429
SIZES = {"limit", "count", "size", "per_page", "page_size", "top"}  # parameters: of a list
LIMITS = {
    *("RateLimit-Policy", "RateLimit"),
    *("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
}

Ask = Callable[..., TestResponse]


pytestmark = pytest.mark.usefixtures("with_sample")


@pytest.fixture(params=EVERY, ids=str)
def operation(request: pytest.FixtureRequest) -> Operation:
    return request.param


@pytest.fixture
@db.connection_context()
def hidden_key(key: str, operation: Operation) -> str:
    """The key of another user. Both have rows; those of Ada come first, as in the examples.

    What the parameters ask for, another user has. If the rows are those of the key, so has another
    key of Ada.
    """
    for number in range(1, 4):
        add_rows(row(key), f"~{number}", number, is_full=number == 1)
    hidden = add_hidden_user()
    for each in operation.parameters:
        add_rows(row(hidden), str(each["example"]), 777_778, is_full=True)
    keyed = [
        table
        for table in TABLES[3:]
        if "key_id" in table._meta.columns or ApiKey in table._meta.refs.values()
    ]
    if keyed and re.search(r"\b(of|by|for) (the|this|your) key\b", str(operation.entry)):
        other = api_keys.create_key(row(key).user, "another key of the user")
        add_rows(other[0], "HIDDEN", 777_779, is_full=True, tables=keyed)
    return hidden


@pytest.fixture
def ask(client: FlaskClient, operation: Operation, hidden_key: str) -> Ask:
    """Sends the example; the user of the key has rows, and so has another one."""

    def send(
        key: str = "", url: str = "", method: str = "", what: str = "the example", **how: Any
    ) -> TestResponse:
        sent = {"headers": {"X-API-Key": key} if key else {}} | operation.sent(operation.example)
        answer = client.open(
            url or operation.url(), method=method or operation.method, **sent | how
        )
        check_answer(operation, answer, what)
        return answer

    return send


def check_answer(operation: Operation, answer: TestResponse, what: str) -> None:
    """The status is listed; the headers and fields are those of this status."""
    status = str(answer.status_code)
    advice = operation.advice
    assert status in operation.responses, (
        f"{advice}: add the response {status}, or raise an error that is described, such as "
        f"auth.invalid_key() ({what}, {answer.request.url}): {answer.text[:200]}"
    )
    cors = {"Cache-Control": "no-store", "Access-Control-Allow-Origin": "*"}
    assert cors.items() <= dict(answer.headers).items(), (
        f"{operation} ({what}) lacks some of {cors}: see is_api and API_HEADERS"
    )
    response = operation.responses[status]
    sent: Any = {name: text for name, text in answer.headers if name in HEADERS}
    is_counted = answer.status_code >= 400 and status != "429"  # and then the view has failed
    wrong = (sent.keys() ^ set(response.get("headers", ()))) - (LIMITS if is_counted else set())
    assert not wrong, (
        f"{advice}: the headers of {status}: {wrong}; "
        "or a Problem that was made once is raised again: make a new one for each answer; or "
        "they are of another request: keep what belongs to one in its environ, or in g"
    )
    assert {"Retry-After", "WWW-Authenticate", *LIMITS} == {
        *answer.headers["Access-Control-Expose-Headers"].split(", ")
    }, "edit API_HEADERS in service/responses.py: what scripts of other origins may read"
    if LIMITS & {*answer.headers.keys()}:
        check_limits(operation, answer)
    wrong = misfits(
        {name: int(text) if text.isdigit() else text for name, text in sent.items()},
        {"properties": {name: HEADERS[name]["schema"] for name in sent}},
        API,
    )
    assert not wrong, f"edit docs/openapi.json: components: headers: {'; '.join(wrong)}"
    contents = response.get("content", {})
    assert answer.mimetype in contents if contents else not answer.data, (
        f"{advice}: {status}: content: {answer.mimetype}"
    )
    if contents and answer.request.method != "HEAD":
        is_json = (answer.mimetype or "").endswith("json")
        body: Any = answer.get_json(force=True) if is_json else answer.text
        wrong = misfits(body, contents[answer.mimetype]["schema"], operation.description)
        assert not wrong, (
            f"{operation} shows rows of others: ask for those of the key; or "
            if HIDDEN.search(str(body)) and operation.path not in TOTALS
            else f"{operation} accepts {what}: check it before anything is stored; or "
            if what != "the example" and answer.status_code < 300
            else ""
        ) + f"{advice}: {status}: {'; '.join(wrong)}"
        examples = contents[answer.mimetype].get("examples", {})
        example = examples.get(body["code"], {"value": body})["value"] if status in OURS else body
        assert re.sub(LIMIT, "", str(example)) == re.sub(LIMIT, "", str(body)), (
            f"edit docs/openapi.json: the example of {body['code']}, or its words in the code"
        )
        assert "problem" not in (answer.mimetype or "") or body["code"] in {
            each["code"] for each in operation.description["x-codes"]
        }, f"edit docs/endpoints.json: codes: {body['code']}"


def check_limits(operation: Operation, answer: TestResponse) -> None:
    """The numbers of a limit are possible ones, and the same in both forms."""
    told = answer.headers
    limit, window = map(int, re.findall(r";[qw]=(-?\d+)", told["RateLimit-Policy"]))
    left, seconds = map(int, re.findall(r";[rt]=(-?\d+)", told["RateLimit"]))
    assert (
        *(told["X-RateLimit-Limit"], told["X-RateLimit-Remaining"]),
        *(0 <= left <= limit, 0 < seconds <= window),
        abs(int(told["X-RateLimit-Reset"]) - time.time() - seconds) < 60,
    ) == (f"{limit}", f"{left}", True, True, True), f"{operation}: {dict(told)}"


def test_routes_are_those_that_are_described(app: Flask) -> None:
    served = {
        (method, PARAMETER.sub(r"{\3}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if rule.rule.startswith("/api/")
    }
    described = {
        *((each.method, each.path) for each in EVERY),
        *(("GET", channel["address"]) for channel in SOCKETS["channels"].values()),
    }
    assert served == described, "edit docs/endpoints.json, or channels in docs/asyncapi.json"


def test_readme_lists_every_endpoint_and_who_may_call_it() -> None:
    """A parameter is written as {name}, or as Flask writes it."""
    assert {each["name"] for each in API["tags"]} == {
        tag for each in OPERATIONS for tag in each.entry["tags"]
    }, "edit `tags` in docs/endpoints.json and docs/openapi.json"
    described = {
        *((each.method, each.path, each.needs_key) for each in OPERATIONS),
        *(("WS", each["address"], needs_key(name)) for name, each in SOCKETS["channels"].items()),
    }
    listed = {
        (method, PARAMETER.sub(r"{\3}", path.strip("`").partition("?")[0]), access == "key")
        for method, path, access, *_ in rows("The API")
    }
    assert described == listed, "edit README.md: the table of endpoints"


def test_entry_is_complete(operation: Operation) -> None:
    """A summary, who may call it, and examples and errors that fit their schemas."""
    advice = operation.advice
    assert operation.entry.get("summary"), f"{advice}: summary"
    assert [each.entry["operationId"] for each in EVERY].count(
        operation.entry["operationId"]
    ) == 1, f"{advice}: operationId: another has the same"
    assert operation.responses.keys() >= {"400", "413", "500"}, "edit errors_of in docs/describe.py"
    kind, schema = operation.body
    bodies = [
        *([("requestBody", operation.example, schema)] if kind.endswith("json") else []),
        *(
            (
                f"the header {each}",
                {"example": of["example"], "required": of.get("required", False)},
                {"properties": {"example": of["schema"], "required": {"const": True}}},
            )
            for each, of in HEADERS.items()
        ),
    ]
    for status, response in operation.responses.items():
        for media in response.get("content", {}).values():
            fields = resolved(media["schema"], operation.description).get("properties", {})
            number = fields.get("status", {}).get("const", int(status))
            assert number == int(status) or int(status) < 400, (
                f"{advice}: {status} has the schema of {number}"
            )
            examples = [each["value"] for each in media.get("examples", {}).values()]
            examples += [media["example"]] if "example" in media else []
            bodies += [(status, example, media["schema"]) for example in examples]
    for place, body, schema in bodies:
        wrong = misfits(body, schema, operation.description)
        assert not wrong, (
            f"{advice}, or components in docs/openapi.json, if only the schema or the example "
            f"there is wrong: the example of {place}: {'; '.join(wrong)}"
        )


def test_field_of_an_answer_is_required_or_says_when_it_is_missing() -> None:
    schemas = [
        *(
            resolved(media["schema"], each.description)
            for each in EVERY
            for response in each.responses.values()
            for media in response.get("content", {}).values()
        ),
        *(
            resolved(message, SOCKETS)["payload"]
            for each in SOCKETS["operations"].values()
            for message in each.get("reply", each)["messages"]
        ),
    ]
    found = {
        name
        for schema in parts_of(schemas)
        for name, part in (schema.get("properties", {}) if isinstance(schema, dict) else {}).items()
        if name not in schema.get("required", ()) and "Only " not in part.get("description", "")
    }
    assert not found, f'name {found} in `required`, or begin the description with "Only if"'


@pytest.mark.parametrize("name", SOCKETS["channels"])
def test_rules_for_keys_hold_for_sockets(name: str) -> None:
    inside = [*raised_errors.errors_in(inspect.getsource(auth.require_api_key))]
    assert not inside, f"sockets do not check {inside}: move the rule to auth.require_key"
    listed = {
        (each["status"], each["code"])
        for each in resolved(SOCKETS["channels"][name]["x-refusals"], SOCKETS)
    }
    missing = {*raised_errors.errors_in(inspect.getsource(auth))} - listed
    assert not missing or (401, "missing_api_key") not in listed, (
        f"edit docs/asyncapi.json: {name}: x-refusals: {missing}"
    )


def test_key_is_checked_and_each_request_counted(
    app: Service, ask: Ask, operation: Operation, new_key: NewKey
) -> None:
    key, ended = new_key(tier="once"), new_key()
    change(ended, expires_at=1)
    before = snapshot()
    refused = [
        # Of the six slashes at its start, the client sends two.
        ask(url=f"/////{operation.url()}", what="//api/").status_code,
        ask(ended).status_code,
    ]
    if operation.needs_key:
        assert refused == [401, 401], (
            f"{operation} is answered without a valid key: use @require_api_key, "
            f'or {operation.advice}: "security": []'
        )
        # The key was just deleted; then the database fails.
        with mock.patch.object(app.store, "hit", side_effect=[None, OperationalError("gone")]):
            assert [ask(key).status_code for _ in range(2)] == [401, 503], (
                f"{operation} serves a request that could not be counted"
            )
    answer, again = ask(key), ask(key)
    assert answer.status_code < 300 or (answer.status_code == 404 and operation.parameters), (
        f"{operation} must be taken, also beside three rows of its user, whose times have passed: "
        f"call the column of an end expires_at, whose time is to come: {answer.text}"
    )
    counted = app.store.usage_of(row(key)).total
    assert ("n't count" if operation.needs_key else "Counts as one") not in (
        operation.entry.get("description", "")
    ), f"{operation.advice}: description: whether a request counts"
    if not operation.needs_key:
        assert counted == 0, f"{operation} is public, so it counts nothing"
        assert operation.is_safe or snapshot() == before, f"anybody can store: {operation}"
        change(key, expires_at=1)
        app.store.clear_cache()
        assert len({re.sub(ANY_TIME, "", ask(each).text) for each in (key, ended)}) == 1, (
            f"{operation} remembers that a key was good: call auth.find_key for each request"
        )
        return
    assert counted == 1, f"{operation} counts {counted} requests: use @require_api_key"
    assert set(answer.headers.keys()) >= LIMITS, f"{operation}: use @require_api_key"
    enforced = again.status_code == 429
    assert enforced == ("429" in operation.responses), f"{operation.advice}: 429"
    assert enforced or operation.path in UNLIMITED, (
        f"{operation} has no limit: remove enforce_limit=False, or name it in helpers/paths.py"
    )
    # As after its tier was lowered, or changed while the service runs.
    change(key, tier="five", used=6, reset=int(answer.headers["X-RateLimit-Reset"]))
    app.store.clear_cache()
    assert (ask(key).headers.get("X-RateLimit-Limit"), ask(key).status_code) == (
        "5",
        again.status_code,
    ), f"{operation} remembers the tier that a key had"


def test_wrong_body_is_refused_and_stores_nothing(ask: Ask, operation: Operation, key: str) -> None:
    for what, sent in wrong_bodies(operation).items():
        assert 400 <= ask(key, what=what, **sent).status_code < 500, (
            f"{operation} accepts {what}: check it before anything is stored, or "
            f"{operation.advice}: requestBody"
        )


def wrong_bodies(operation: Operation) -> dict[str, dict[str, Any]]:
    """Bodies that do not fit the description, each with a name and as arguments of a client."""
    kind, schema = operation.body
    found: dict[str, dict[str, Any]] = {
        "20,000 bytes": {"data": b"x" * 20_000, "content_type": kind or "text/plain"}
    }
    if not kind:
        return found
    found |= {
        "no body": {"data": b"", "content_type": None},
        "an empty body": {"data": b"", "content_type": kind},
        "another type, by force=True": operation.sent(operation.example)
        | {"content_type": "image/png"},
        **{
            f"a text such as {text[:2]!r}": operation.sent(text)
            for text in ("\0", b"\xff", "x" * 15_000)
            if kind.startswith("text/")
            and (len(text) == 1 or misfits(text, schema, operation.description))
        },
        **{
            f"a body without {name}": operation.sent(
                {other: value for other, value in operation.example.items() if other != name}
            )
            for name in schema.get("required", ())
        },
    }
    if not kind.endswith("json"):
        return found
    wrong = [
        (str(body)[:80], operation.sent(body))
        for value, body in changed(operation.example, schema, operation.description)
        if value in UNSTORABLE or misfits(body, schema, operation.description)
    ]
    return (
        found
        | dict(wrong)
        | {
            str(data[:20]): {"data": data, "content_type": kind}
            for data in (b"{", b"\xff", b"null", b"[]", b'"text"', b"7", b"9" * 5000, b"[" * 15_000)
            if data != b"[]" or schema["type"] != "array"
        }
    )


@pytest.mark.parametrize(
    ("operation", "name", "value"),
    [
        (each, name, value)
        for each in EVERY
        for name, part in each.body[1].get("properties", {}).items()
        for value, fits in values_of(part)
        if fits
    ],
    ids=lambda each: str(each)[:40],
)
def test_body_is_taken_within_its_bounds(
    ask: Ask, operation: Operation, key: str, name: str, value: Any
) -> None:
    """Whatever the schema allows; and a text is stored whole.

    Each value is sent to a database of its own, because a user may have only a few rows.
    """
    others = {} if operation.method == "PATCH" else operation.example
    if value is False and operation.method != "POST":
        ask(key, **operation.sent(others | {name: True}))
    before = snapshot()
    answer = ask(key, **operation.sent(others | {name: value}))
    advice = (
        f"{operation}: take {name} as it is described, and whole, beside three rows of the user: "
        f"{str(value)[:99]}"
    )
    assert answer.status_code < 300, (
        f"{operation.advice}: let 1 be the example of the ID in the path, which is that of a row"
        if answer.status_code == 404
        else f"{advice}: {answer.text}"
    )
    assert next(objects(answer), {}).get(name, value) == value, f"{advice}: {answer.text}"
    assert value is not False or snapshot() != before, (
        f"{operation} stores the same with {name} true as with false: what is switched on can't be "
        "switched off; or let its schema have an enum of the only value"
    )
    lost = neglected(before, value) - {name}
    assert others or not lost, f"{operation} with another {name} must keep {lost}, or set the time"
    assert {*re.findall("x{9,}", str(snapshot()))} <= {value}, advice


def test_body_is_bounded_and_described(ask: Ask, operation: Operation, key: str) -> None:
    """A text without a limit would be stored whole; what is not described is not read."""

    kind, schema = operation.body
    for name, part in schema.get("properties", {}).items():
        assert (
            {"maxLength", "pattern", "enum", "const"} & part.keys()
        ) or "string" not in part.get("type", ""), f"{operation.advice}: maxLength of {name}"
    if not kind:
        stream = mock.Mock(wraps=BytesIO(b'{"text": "Tea?"}'))
        ask(
            headers={"X-API-Key": key, "Content-Length": "16"},
            input_stream=stream,
            content_type="application/json",
        )
        assert not any(each.called for each in (stream.read, stream.readline, stream.readinto)), (
            f"{operation.advice}: requestBody, which the view reads"
        )


def test_parameters_are_described(ask: Ask, operation: Operation, key: str, read: set[str]) -> None:
    """Also what comes back if they make no sense."""
    status = ask(key, url=operation.url(only_required=True)).status_code
    assert status < 300 or status == 404, (
        f"{operation.advice}: required; or take it beside three rows of the user: {status}"
    )
    ask(key)
    assert (
        min(ask(key, url=operation.url(value)).status_code for value in NONSENSE) >= 400
        or "{" not in operation.path
        or "404" not in operation.responses
    ), f"{operation}: raise Problem(404) where no row has the ID of the path"
    described = {each["name"] for each in operation.parameters if each["in"] == "query"}
    assert described <= read, f"{operation.advice}: the parameters of the query"
    others = read - described - {*re.findall(r"'(\w+)': {", str(operation.body[1]))}
    assert not others, f"{operation.advice}: the view reads {others} of the query, or of the body"


def test_parameter_is_taken_within_its_bounds_only(
    ask: Ask, operation: Operation, key: str, hidden_key: str
) -> None:
    """And one that is left out has the described default: there are more rows than that."""
    add_many_rows(row(key))
    move_times(0, -HOUR)  # some may ask for a day
    add_rows(row(key), "~full", 2, is_full=True)  # the others have nulls
    add_rows(row(hidden_key), "HIDDEN too", 777_778)  # the latest row is not of the key
    for name, schema in operation.query.items():
        advice = f"{operation.advice}: the schema of {name}, or check it in the view"
        assert "type" in schema or "enum" in schema, f"{advice}: type"
        texts: dict[Any, str] = {}
        left_out = operation.url(only_required=True)
        others = [  # one choice may be possible with some of another parameter only
            {other: choice}
            for other, part in operation.query.items()
            for choice in part.get("enum", ())
            if other != name
        ]
        for value, fits in values_of(schema):
            answers = (
                ask(key, url=operation.url(only_required=True, changes=more | {name: value}))
                for more in [{}, *(others if fits else ())]
            )
            answer = min(answers, key=lambda each: each.status_code)
            assert answer.status_code < 300 if fits else answer.status_code == 400, (
                f"{advice}: {value!r} gives {answer}"
            )
            texts |= {value: re.sub(ANY_TIME, "", answer.text)} if fits else {}
        some = {*texts.values(), re.sub(ANY_TIME, "", ask(key, url=left_out).text)}
        assert len(texts) < 2 or len(some) > 1, (
            f"{advice}: each value has the same answer, so let the view apply it"
        )
        for value, size in sizes(texts).items() if name in SIZES else ():
            assert size == min(value, max(sizes(texts).values())), (
                f"{advice}: {size} rows with {value}: use where() and limit()"
            )
        assert all(
            found == beside
            for found, beside in (
                sizes(
                    {
                        text: ask(
                            key, url=operation.url(only_required=True, changes={name: text})
                        ).text
                        for text in texts
                    }
                ).values()
                # A wildcard, and what is sorted beside it.
                for texts in (("%", "$"), ("____", "^^^^"))
            )
        ), f"{advice}: % and _ are wildcards of LIKE, so use contains()"
        limits = SIZES & operation.largest.keys() - {name}
        many = {each: operation.largest[each] for each in limits}
        values = [
            each
            for each in parts_of(
                longest(ask(key, url=operation.url(only_required=True, changes=many)).text)[-1:]
            )
            if not isinstance(each, dict | list)
        ]
        for choice in schema.get("enum", values) if limits else ():
            urls = [
                operation.url(only_required=True, changes={name: choice, **changes})
                for changes in (dict.fromkeys(limits, 1), many)
            ]
            found = sizes({url: ask(key, url=url).text for url in urls})
            assert found[urls[0]] == min(1, max(found.values())), (
                f"{advice}: let where() filter, before limit(): {found}"
            )
        if "default" in schema:
            bodies = {
                without_numbers(ask(key, url=url).text)
                for url in (
                    left_out,
                    operation.url(only_required=True, changes={name: schema["default"]}),
                )
            }
            assert len(bodies) == 1, f"{advice}: {schema['default']} is not the default"


def longest(text: str) -> list[Any]:
    """The longest list in an answer, if there is one."""
    return max(
        (each for each in parts_of(json.loads(text)) if isinstance(each, list)),
        key=len,
        default=[],
    )


def sizes(texts: dict[Any, str]) -> dict[Any, int]:
    """The length of the longest list in each answer."""
    return {value: len(longest(text)) for value, text in texts.items()}


def check_lists(app: Service, key: ApiKey, send: Callable[[], dict[str, str]]) -> None:
    """They have an end and a full order, and show what is stored at the moment.

    A cache in a module would also show it to other users.
    """
    add_many_rows(key)
    send()  # some leave a message for the next page
    some = send()
    add_many_rows(key, 105, 125)
    many = send()
    with turned():
        again = send()
    for what, text in again.items():
        few, all, text = map(without_numbers, (some[what], many[what], text))
        assert len(few) == len(all) or what in COMPLETE, (
            f"{what} grows with its rows without an end: for more than 100 rows, use limit(), and "
            "a parameter for the next ones; or if a form or an endpoint limits how many there are, "
            "name it in COMPLETE in tests/helpers/paths.py"
            if len(few) < len(all)
            else f"{what}: two GETs differ: {str({*few.splitlines()} - {*all.splitlines()})[:500]}"
        )
        assert text == all, (
            f"{what}: add order_by() to the query, with the id at its end; PostgreSQL has nulls at "
            "the other end, so order by is_null() before a column that may be null"
        )
    rename()
    app.store.clear_cache()
    for what, text in send().items():
        kept = {*OWN.findall(text)} - {*OWN.findall(OPENAPI)}
        assert not kept, f"{what} shows what was stored before: keep no rows in a module: {kept}"
    check_nulls(send)


@pytest.mark.usefixtures("stopped_clock")
@READING
def test_list_has_an_end_and_an_order_and_is_not_remembered(
    app: Service, ask: Ask, operation: Operation, key: str
) -> None:
    url = operation.url(only_required=True)
    kept = [*chain(*snapshot().values())]
    wrong = [
        f"{name} is {shown!r} and not {stored}"
        for made in objects(ask(key, url=url))
        for name, shown in made.items()
        if (
            stored := [
                each[name]
                for each in kept
                if each.get("id") == made["id"]
                if made.keys() <= each.keys() or (name in each and name.endswith("_at"))
            ]
        )
        if all(is_another(shown, each) for each in stored)
    ]
    assert not wrong, f"{operation}: show the column of the same name: {wrong}"
    check_lists(app, row(key), lambda: {str(operation): ask(key, url=url).text})
    if order := re.search("(?i)(latest|newest|oldest)( is| are)? first", str(operation.entry)):
        names = "|".join(move_times(-9999, 1))  # each row in a second of its own
        times = re.findall(rf'"(?:{names})": ?"(.*?)"', ask(key, url=url).text)
        assert times == sorted(times, reverse=order[1].lower() != "oldest"), (
            f"{operation} says {order[0]}: edit order_by(), or docs/endpoints.json"
        )
    for size, begin in product(
        SIZES & operation.largest.keys(),
        {"before", "after", "cursor", "page", "offset"} & operation.query.keys(),
    ):
        some = {size: min(40, operation.largest[size] - 1 or 1)}  # with many rows, several pages
        whole, *pages = (
            [each["id"] for each in objects(page)]
            for page in (
                ask(
                    key,
                    url=operation.url(only_required=True, changes={size: operation.largest[size]}),
                ),
                *islice(pages_from(operation, lambda url: ask(key, url=url), some, begin), 200),
            )
        )
        assert "'next" not in str(operation.entry) or (
            [*chain(*pages)][: len(whole)] == whole and len(pages) < 200
        ), (
            f"{operation}: pages of {some} have other rows than one page of all: {begin} must "
            "begin where the page before has ended, and only the last has no next one; also, let "
            f"where() filter, before limit(): {[each[:1] + each[-1:] for each in pages]}"
        )


def pages_from(
    operation: Operation, ask: Callable[..., TestResponse], changes: dict[str, Any], begin: str
) -> Iterator[TestResponse]:
    """The page with these parameters, and those to which a field named next... leads from it.

    It has the value of a parameter, or an address.
    """
    yield (page := ask(operation.url(only_required=True, changes=changes)))
    if after := re.search(rf'"next\w*": ?"?(?!null)(?:[^"]*[?&]{begin}=)?([^",&}}\s]+)', page.text):
        yield from pages_from(operation, ask, changes | {begin: unquote(after[1])}, begin)


def move_times(start: int, step: int) -> set[str]:
    """Make the rows of added tables so many seconds apart; returns the names of such columns."""
    made = [each for each in fields(IntegerField) if each.default is now]
    for field in [each for each in made if each.model in TABLES[3:]]:
        write(field, field + start + step * field.model._meta.primary_key)
    return {field.name for field in made}


def check_nulls(send: Callable[[], dict[str, str]]) -> None:
    """What shows a number that may be null tells this from 0."""
    for number, field in enumerate(fields(IntegerField, FloatField), 543):
        if field.null and not field.unique and not field.name.endswith("_at"):
            none, zero, some = (send() for value in (None, 0, number) if write(field, value))
            same = [
                what
                for what in some
                if re.search(rf"\b{number}\b", some[what])  # not a sum
                and none[what] == zero[what]
            ]
            assert not same, f"{same}: don't use `or` or `if` with {field.name}, which may be 0"


@pytest.mark.parametrize("operation", [each for each in EVERY if each.method == "POST"], ids=str)
def test_new_row_is_found_by_its_id(
    client: FlaskClient, ask: Ask, operation: Operation, key: str, hidden_key: str, owner: User
) -> None:
    """In the list of the same path, and by what has the ID in its path, which changes no other.

    It has all items that were sent, to which no rows belong yet. Another user has just sent the
    same. A list from one day to a last day has the rows of both. What has no body is sent again.
    """
    change(hidden_key, used=0)
    theirs, before, answer = ask(hidden_key), snapshot(), ask(key)
    assert theirs.status_code in (404, answer.status_code), (  # of a row that only Ada has
        f"{operation}: rows of others change the answer, so let no column be unique for itself; "
        "or it is refused because of three rows of its own user, which these tests don't allow"
    )
    made = next(objects(answer), None)
    assert not made or made["id"] != next(objects(theirs), made | {"id": ""})["id"], (
        f"{operation} finds a row of another user: look among those of key.user_id only"
    )
    new = [each.get("id") for each in missing(before, snapshot())]
    assert not new or not made or made["id"] in new, f"{operation} returns {made}, and stores {new}"
    assert (
        not made
        or not isinstance(operation.example, dict)
        or all(
            len(shown) >= len(operation.example[name])
            for name, shown in made.items()
            if isinstance(shown, list) and isinstance(operation.example.get(name), list)
        )
    ), (
        f"{operation} returns {made} for {operation.example}: show also rows to which no others "
        "belong (in SQL, a left join)"
    )
    for other in sorted(EVERY, key=lambda each: each.method == "DELETE"):
        found = re.fullmatch(re.escape(operation.path) + r"(?:/\{(\w+)\})?", other.path)
        if made and found and (found[1] or other.is_safe):
            days = [
                name
                for name, schema in other.query.items()
                if schema.get("format") == "date"
                if re.search("(?i)last day|inclusive|included", str(other.entry["parameters"]))
            ]
            answers = [
                client.open(
                    other.url(
                        only_required=True,
                        changes={name: other.largest[name] for name in SIZES & other.largest.keys()}
                        | dict.fromkeys(days, day)
                        | {found[1] or "": made["id"]},
                    ),
                    method=other.method,
                    headers={"X-API-Key": key},
                    **other.sent(other.example),
                )
                for day in {*re.findall(r"\d{4}-\d\d-\d\d", str(made) * bool(days))} or {""}
            ]
            assert [
                all(answer.status_code < 300 for answer in answers),
                not other.is_safe
                or any(
                    made | each == each | made for answer in answers for each in objects(answer)
                ),
            ] == [True, True], (
                f"{other} does not find what {operation} returns, with its day as {days or 'none'}"
                f": {[answer.text or answer for answer in answers]}"
            )
    changed = [  # besides the row in the path, and that of the user, which may have a count
        each
        for each in missing(snapshot(), before)
        if str(each.get("id")) not in operation.url().partition("?")[0].split("/")
        if each.get("username") != owner.username
    ]
    assert not changed, f"{operation.path}: also changed are {changed}: name the ID in where()"
    ended = snapshot()
    with mock.patch("time.time", return_value=time.time() + 30):
        assert operation.body[0] or not (ask(key) and remarked(before) + remarked(ended)), (
            f"{operation} {remarked(before) + remarked(ended)}"
        )


def objects(answer: TestResponse) -> Iterator[dict[str, Any]]:
    """Those in an answer that have an ID."""
    for each in parts_of(answer.get_json(silent=True)):
        yield from [each] if isinstance(each, dict) and "id" in each else []


def missing(some: dict[Any, list[Any]], others: dict[Any, list[Any]]) -> list[dict[str, Any]]:
    """The rows of the others that some don't have."""
    return [each for table, rows in others.items() for each in rows if each not in some[table]]


def without_numbers(text: str) -> str:
    """The text with a 0 in the place of each number, and of each UUID."""
    return re.sub(r"[0-9a-f]{8}(?:-[0-9a-f]{4,12}){4}|\d+", "0", text)


def check_times(what: str, one: str, other: str) -> None:
    """The texts are the same but for seconds."""
    advice = f"{what}: write times with date_time, timestamp or display"
    assert without_numbers(one) == without_numbers(other), advice
    assert all(
        abs(first - second) <= HOUR
        for first, second in zip(times_in(one), times_in(other), strict=True)
    ), f"{advice}: the server's time zone changes them"


def test_times_are_ours_and_the_same_in_every_time_zone(
    ask: Ask, operation: Operation, key: str, zones: Iterator[None]
) -> None:
    """All rows are new, so all times are of today."""
    one, other = [ask(key) for _ in zones]
    if one.status_code == other.status_code:  # it is not deleted by the first
        check_times(str(operation), one.text, other.text)
    moments = {*times_in(one.text)} - {*times_in(json.dumps(operation.example))}
    assert all(abs(each - time.time()) < 2 * DAY for each in moments), (
        f"{operation}: one of {moments} is not of today"
    )


def test_nothing_of_another_user_is_shown_or_changed(
    client: FlaskClient,
    ask: Ask,
    operation: Operation,
    key: str,
    hidden_key: str,
    owner: User,
) -> None:
    """Also if the client names their rows in the path, the query, or the body.

    Some belong to rows of Ada, such as a vote in her poll. They may be shown, and deleted with it.
    And if the other user has just asked the same, also with a key of the same name.
    """
    name = api_keys.random_text(8)  # which nothing remembers from another test
    change(key, name=name)
    change(hidden_key, used=0)
    ids = {each["id"] for each in hidden_rows() if "id" in each and NAME not in each.values()}
    _, same = api_keys.create_key(users.find_user("HIDDEN") or User(), name)
    if operation.method != "DELETE" and operation.path not in SEVERAL:
        firsts = {
            table._meta.table_name: rows[0].get("id") for table, rows in snapshot().items() if rows
        }
        add_rows(row(hidden_key), "=guest", 1, parents=firsts)
    before = hidden_rows()
    requests: list[dict[str, Any]] = [
        {"url": url}
        for url in {
            operation.url(only_required=True),
            *map(operation.url, ["", *map(str, ids), NAME]),
        }
    ]
    example = operation.example if isinstance(operation.example, dict) else {}
    # Columns that no field describes are among the names, such as user_id.
    names = {*example, *(name for table in TABLES for name in table._meta.combined if example)}
    requests += [operation.sent(example | {name: value}) for name in names for value in ids]
    for each in requests:
        for other in (hidden_key, same) if operation.is_safe else ():
            client.get(each.get("url", operation.url()), headers={"X-API-Key": other})
        answer = ask(key, **each)
        assert operation.path in TOTALS or not (
            HIDDEN.search(answer.text) or same[8:16] in answer.text
        ), (
            f"{operation} shows rows of others: ask for those of the key, or see TOTALS; if it is "
            f"described as of the key, not for those of other keys of the user: {answer.text[:300]}"
        )
        assert hidden_rows() == before, (
            f"{operation} changes rows of others: look among those of key.user only, or see SEVERAL"
        )
    client.get(TEST, headers={"X-API-Key": key})
    with db.connection_context():  # as in another process: this one still knows the key
        owner.delete_instance(recursive=True)
    assert ask(key).status_code < 500, f"{operation}: it has to expect that the user is gone"


@pytest.mark.usefixtures("stopped_clock")
@READING
def test_rows_of_others_change_no_answer(
    ask: Ask, operation: Operation, key: str, hidden_key: str
) -> None:
    """Whatever is asked for: they are neither shown nor counted."""
    urls = {
        *(operation.url(), operation.url(only_required=True)),
        *(
            operation.url(only_required=True, changes={name: value})
            for name, schema in operation.query.items()
            for value, fits in values_of(schema)
            if fits
        ),
    }

    def send() -> dict[str, str]:
        return {url: ask(key, url=url).text for url in urls}

    check_beside_others(send, hidden_key, [each["example"] for each in operation.parameters])


@READING
@mock.patch("storage.key_store.CACHE_SECONDS", 60)
def test_get_changes_nothing_and_head_has_its_headers(
    app: Flask, ask: Ask, operation: Operation, key: str, new_key: NewKey, asked: list[Any]
) -> None:
    """Also when another key's request is answered meanwhile."""
    pro = {"X-API-Key": new_key(tier="pro")}
    before = snapshot()
    get, head = ask(key), ask(key, method="HEAD")
    with request_finished.connected_to(
        lambda *_, **__: (
            request.headers["X-API-Key"] == key
            and gevent.spawn(FlaskClient(app).get, TEST, headers=pro).get()
        )
    ):
        other = ask(key, headers={"X-API-Key": key, "Origin": "https://a.example"})
    assert [sql for sql, _ in asked].count(FIND) < 3, (
        f"{operation} looks up the same key again and again: see KeyStore.find, which remembers it"
    )
    check_vary(str(operation), get, other)
    assert snapshot() == before, f"{operation} changes a row: let it be a POST"
    assert (
        *(set(get.headers.keys()), get.status_code, head.data),
        get.headers.get("RateLimit-Policy"),
    ) == (
        *(set(head.headers.keys()), head.status_code, b""),
        other.headers.get("RateLimit-Policy"),
    ), (
        f"{operation}: HEAD has the headers and the status of GET, and no body; each has the limit "
        "of its own key: keep what belongs to one request in its environ, or in g"
    )


def is_another(shown: Any, stored: Any) -> bool:
    """Whether an answer shows something else than is stored, which may be a time."""
    is_comparable = shown is None or type(shown) is type(stored) or times_in(str(shown))
    return shown != stored and bool(is_comparable) and times_in(str(shown)) != [stored]


def check_vary(what: str, one: TestResponse, other: TestResponse) -> None:
    """A cache would give the answer for one origin to another."""
    ours, theirs = (
        {
            (name, text)
            for name, text in each.headers
            if name not in LIMITS | {"Set-Cookie", "Content-Length", "Date"}
        }
        for each in (one, other)
    )
    assert ours == theirs or "Origin" in other.headers.get("Vary", ""), (
        f"{what} depends on Origin: add Vary: Origin: {ours ^ theirs}"
    )


def test_outage_at_any_statement_is_503(
    app: Service, ask: Ask, operation: Operation, key: str
) -> None:
    """Not an empty list, or half of an answer."""

    def send() -> int:
        app.store.clear_cache()
        return ask(key).status_code

    check_outages(app, str(operation), send)


def check_outages(app: Service, name: str, send: Callable[[], int]) -> None:
    if not app.settings.sqlite:
        pytest.skip("tests/wire/test_wire_postgres.py has outages of PostgreSQL")
    with outage(after=1000) as statements:
        send()
    for number, statement in enumerate([*statements]):
        with outage(after=number) as made:
            status = send()
        assert len(made) <= number + 1, (
            f"{name} asks the database again after it has failed at {statement}, so its client "
            "may wait twice: see error_page"
        )
        # A row may have been remembered this time.
        assert status == 503 or len(made) <= number, (
            f"{name}: {status}, when the database fails at {statement}: let the error pass, it "
            "becomes a 503"
        )


def test_no_secret_is_logged(
    ask: Ask, operation: Operation, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a key, nor what a column or a field is named as a secret."""
    caplog.set_level("INFO")
    answer = ask(key)
    found = {key[17:]} | {
        str(value)
        for each in parts_of(
            [*snapshot().values(), operation.example, answer.get_json(silent=True)]
        )
        for name, value in (each.items() if isinstance(each, dict) else ())
        if re.search("password|digest|secret|token|code|nonce", name)
    }
    assert not any(len(value) > 3 and value in caplog.text for value in found), (
        f"{operation} logs a secret: {caplog.text}"
    )
    assert not stored_secrets() & {*re.findall(r"[\w:$]+", answer.text)}, (
        f"{operation} shows the digest of a key, or a hash"
    )


@pytest.fixture
def ada(client: FlaskClient) -> FlaskClient:
    """A browser in which Ada is logged in, who has a key."""
    assert [
        client.post(path, data=form).status_code
        for path, form in {
            "/sign-up": {
                "username": "ada",
                "email": "ada@example.com",
                "password": "long enough",
            },
            KEYS: {"name": "ci", "type": "production"},
        }.items()
    ] == [303, 200]
    return client


@pytest.fixture
@db.connection_context()
def own_key(ada: FlaskClient) -> ApiKey:
    """The key of Ada."""
    return ApiKey.get()


@pytest.fixture
def paths(app: Flask, own_key: ApiKey) -> list[str]:
    """Those of the pages that Ada may open."""
    return pages(app, "GET", "ada", own_key.id)


def test_page_changes_nothing(ada: FlaskClient, own_key: ApiKey, paths: list[str]) -> None:
    """Browsers open pages by themselves, and other sites can make them do so."""
    add_rows(own_key, "<i>", 1)
    for field in fields(*TEXTS):
        write(field, "<i>", field.name not in NEEDED | {"key_id", "password_hash"})
    before = snapshot()
    for path in paths:
        page = ada.get(path)
        paths += [
            urljoin(path, unescape(link))
            for link in re.findall(r'href="((?!/static|\w+:)[^"#]*\?[^"#]*)', page.text)
            if "?" not in path
        ]
        check_vary(path, page, ada.get(path, headers={"Origin": "https://a.example"}))
        assert page.mimetype != "text/html" or "<i>" not in page.text, f"{path}: no |safe"
        assert "-Reset: " in page.text or not re.search(r">[^<]*\b1[6-9]\d{8}\b", page.text), (
            f"{path} shows a time in Unix seconds: use display or relative_time"
        )
        assert (page.headers.get("Cache-Control") == "no-store") != path.endswith("api.json"), (
            f"{path} may be stored by a cache"
        )
        assert not stored_secrets() & {*re.findall(r"[\w:$]+", page.text)}, (
            f"{path} shows the digest of a key, or a hash"
        )
        assert snapshot() == before, f"{path} changes a row: let a form with POST do that"


def test_times_of_a_page_are_the_same_in_every_time_zone(
    ada: FlaskClient, paths: list[str], zones: Iterator[None]
) -> None:
    for path in paths:  # some leave a message for the next page
        ada.get(path)
    one, other = [{path: re.sub(NONCE, "", ada.get(path).text) for path in paths} for _ in zones]
    for path in paths:
        check_times(path, one[path], other[path])


@pytest.mark.usefixtures("stopped_clock")
def test_list_of_a_page_has_an_end_and_an_order_and_is_not_remembered(
    app: Service, ada: FlaskClient, own_key: ApiKey, paths: list[str]
) -> None:
    for name in ("b", "a", "c"):
        api_keys.create_key(users.find_user("ada") or User(), name)
    check_lists(
        app, own_key, lambda: {path: re.sub(NONCE, "", ada.get(path).text) for path in paths}
    )
    for path in paths:
        links = [""]
        shown = set()
        for text in (ada.get(path + link).text for link in links):
            shown |= {*MANY.findall(text)}
            links += {
                unescape(each)
                for each in re.findall(
                    rf'href="(?:{path})?([?](?:before|after|cursor|page|offset)=[^"#]*)', text
                )
            } - {*links}
        assert not shown or len(links) == 1 or shown >= {*MANY.findall(str(snapshot()))}, (
            f"{path}: some of many rows are on none of the pages {links}: each must begin where "
            "the one before has ended"
        )


@pytest.mark.usefixtures("stopped_clock")
def test_rows_of_others_change_no_page(ada: FlaskClient, own_key: ApiKey, paths: list[str]) -> None:
    """And no address in it has the ID of one. They were stored first, so theirs begin at 1."""
    hidden = add_hidden_user()
    add_many_rows(own_key, 1, 4)
    others = hidden_rows()
    wrong_ids = {str(each.get("id")) for each in others} - {
        str(each.get("id")) for each in chain(*snapshot().values()) if each not in others
    }
    assert not [
        f"{path} leads to {address}, which has the ID of no row of the user: use that of its row"
        for path in paths
        for address in re.findall(' (?:href|action)="(/.*?)"', ada.get(path).text)
        if wrong_ids & {*re.findall(r"/(\d+)(?![^/?#])", address)}
    ]
    check_beside_others(
        lambda: {path: re.sub(NONCE, "", ada.get(path).text) for path in paths}, hidden, []
    )


def test_page_whose_database_fails_at_any_statement_is_503(
    app: Service, ada: FlaskClient, paths: list[str]
) -> None:
    for path in [path for path in paths if ada.get(path).status_code == 200]:
        check_outages(app, path, lambda path=path: ada.get(path).status_code)  # type: ignore[misc]


def test_preflight_and_405_name_the_methods_of_the_path(
    client: FlaskClient, operation: Operation
) -> None:
    names = {"OPTIONS"} | {each.method for each in EVERY if each.path == operation.path}
    names |= {"HEAD"} if "GET" in names else set()
    assert {*client.open(operation.url(), method="BREW").headers["Allow"].split(", ")} == names
    answer = client.options(operation.url(), headers={"Access-Control-Request-Method": "GET"})
    assert [
        *(answer.status_code, answer.data, {*answer.headers["Allow"].split(", ")}),
        {*answer.headers["Access-Control-Allow-Methods"].split(", ")},
    ] == [200, b"", names, names], f"{operation}: OPTIONS"
    assert answer.headers["Access-Control-Allow-Headers"] == (
        "X-API-Key, Content-Type, Authorization, *"
    ), "edit PREFLIGHT: * is not Authorization, and older browsers need the other names, too"
    assert answer.headers["Access-Control-Max-Age"] == "86400", "a browser asks once a day"
