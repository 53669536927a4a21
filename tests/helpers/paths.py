"""The paths of the API and of the settings' pages, and those of all pages that an app has."""

import re

from flask import Flask

YEAR, STATUS = "/api/v1/demo/year", "/api/v1/status"
TEST, ME, STATS = PROTECTED = (
    "/api/v1/protected/test",
    "/api/v1/user/me",
    "/api/v1/usage/stats",
)
GATE = "/api/v1/gate"
ECHO, TIME = SOCKETS = ("/api/v1/ws/echo", "/api/v1/ws/time")
PROFILE, SECURITY = "/settings/profile", "/settings/security"
KEYS = f"{SECURITY}/keys"

# Pages, endpoints and sockets that show totals of all users, or rows that are for everybody, on
# purpose. Put only the paths here that show a row to everybody, not those that change it.
TOTALS: set[str] = set()
# Protected endpoints that also answer when nothing is left, and then don't count.
UNLIMITED = {STATS}
# Paths of requests that call another service while their client waits.
CALLS: set[str] = set()
# Paths of requests that store something also if they are refused, such as a log of failures.
AUDITED: set[str] = set()
# Paths of lists with all rows of a user, who can't have more than the table allows.
COMPLETE: set[str] = set()
# Routes of forms that are meant to change several rows, such as a choice of the main one; paths of
# operations that are meant to change rows of others that belong to a row of the user.
SEVERAL: set[str] = set()
# Types of messages that a socket sends to others only when something is new.
SELDOM: set[str] = set()

PARAMETER = re.compile(r"<(?:(\w+)(?:\((.*?)\))?:)?(\w+)>")  # its converter, arguments and name


def pages(app: Flask, method: str, *texts: str) -> list[str]:
    """The paths of the pages that take this method, without static files.

    A parameter that is a number is 1 or 2**63, one that is a text is each of these texts in turn.
    """
    return [
        path
        for rule in app.url_map.iter_rules()
        if method in (rule.methods or ())
        for path in filled(rule.rule, texts)
        if not path.startswith(("/api/", "/static/"))
    ]


def filled(rule: str, texts: tuple[str, ...]) -> list[str]:
    found = PARAMETER.search(rule)
    if not found:
        return [rule]
    bounds = dict(re.findall(r"(min|max)=(\d+)", found[2] or ""))
    kinds = {
        # Of a row, and of none: SQLite has no number that large.
        "int": [bounds.get("min", "1"), bounds.get("max", f"{2**63}")],
        "float": ["1.5"],
        "uuid": ["00000000-0000-0000-0000-000000000001"],
        "any": re.findall(r"[\w.-]+", found[2] or ""),
    }
    return [
        path
        for value in kinds.get(found[1], texts)
        for path in filled(rule.replace(found[0], value, 1), texts)
    ]
