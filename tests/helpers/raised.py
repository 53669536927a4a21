"""Which errors a function raises, by its source and by those of the functions that it calls."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

from helpers.server import REPOSITORY
from service.problems import Problem

Error = tuple[int, str]  # its status and code


def errors(function: Callable[..., Any]) -> set[Error]:
    """The errors that are raised with a number, here or in functions that are called by name."""
    found: set[Error] = set()
    seen: set[CodeType] = set()
    todo = [function]
    while todo:
        called = todo.pop()
        plain = inspect.unwrap(called, stop=lambda each: hasattr(each, "__code__"))
        code = getattr(plain, "__code__", None)
        if code and code not in seen and is_ours(code):
            seen.add(code)
            found |= set(errors_in(code))
            todo += called_by(called, code)
    return found


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(str(REPOSITORY)) and "/.venv" not in code.co_filename


def called_by(function: Callable[..., Any], code: CodeType) -> Iterator[Callable[..., Any]]:
    """The functions whose names are in the code; of a decorated one, also that inside."""
    known = getattr(function, "__globals__", {})
    modules = [value for value in known.values() if isinstance(value, ModuleType)]
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    for name in {name for each in (code, *inner) for name in each.co_names}:
        for found in (known.get(name), *(getattr(each, name, None) for each in modules)):
            if inspect.isfunction(found):
                yield found
    for cell in getattr(function, "__closure__", None) or ():
        if inspect.isfunction(cell.cell_contents):
            yield cell.cell_contents


def errors_in(code: CodeType) -> Iterator[Error]:
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Problem", "abort")):
            given = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if given and isinstance(given[0], int):
                has_code = ast.unparse(node.func).endswith("Problem") and len(given) > 1
                default = Problem(given[0]).get_response().get_json()["code"]
                yield given[0], str(given[1]) if has_code else default
