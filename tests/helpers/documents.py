"""The documents as text, with their fenced blocks, sections and tables; the API's descriptions."""

import json
import re
from functools import reduce
from operator import getitem
from typing import Any

from helpers.server import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
OPENAPI = (REPOSITORY / "docs/openapi.json").read_text()
API = json.loads(OPENAPI)
SOCKETS = json.loads((REPOSITORY / "docs/asyncapi.json").read_text())
DOCUMENTS = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("[bd]*/*.md")]


def resolved(part: Any, description: Any) -> Any:
    """What a part of a description is, or refers to."""
    while "$ref" in part:
        part = reduce(getitem, part["$ref"].split("/")[1:], description)
    return part


def socket_operations(name: str) -> list[Any]:
    """What the clients of a channel send and receive."""
    return [
        each
        for each in SOCKETS["operations"].values()
        if each["channel"] == {"$ref": f"#/channels/{name}"}
    ]


def needs_key(name: str) -> bool:
    """Whether the socket of this channel does."""
    return any(each.get("security") for each in socket_operations(name))


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def section(title: str, text: str = README) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str, text: str = README) -> list[list[str]]:
    """The cells of all table rows of a section, without the heads."""
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", section(title, text) + "\n", re.MULTILINE)
    return [line.strip("| ").split(" | ") for line in "".join(tables).splitlines()]
