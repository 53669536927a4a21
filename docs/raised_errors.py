"""Which errors a source text raises, for describe.py and for tests."""

import ast
import textwrap
from collections.abc import Iterator

from service.responses import Problem


def errors_in(source: str) -> Iterator[tuple[int, str]]:
    """The statuses and codes of the errors that are raised with a number."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Problem", "abort")):
            given = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if given and isinstance(given[0], int):
                has_code = ast.unparse(node.func).endswith("Problem") and len(given) > 1
                default = Problem(given[0]).get_response().get_json()["code"]
                yield given[0], str(given[1]) if has_code else default
