"""Every command of `flask`, each with arguments, in an order in which each succeeds."""

import re
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from flask import Flask

import models
from accounts.api_keys import id_in

COMMANDS = {  # KEY is the last key that was printed
    "user create": "bob bob@example.com --password-stdin",
    "user list": "",
    "user password": "bob --password-stdin",
    "key create": "bob ci --type development",
    "key list": "",
    "key tier": "KEY pro",
    "key rotate": "KEY --grace 5m",
    "usage": "",
    "key revoke": "KEY",
    "user delete": "bob",
    "backup": "FOLDER/copy.db",
}


def names(commands: Any) -> Iterator[str]:
    """The commands of a group, such as `user create`."""
    for name, command in commands.items():
        is_group = isinstance(command, click.Group)
        yield from (f"{name} {each}" for each in names(command.commands)) if is_group else [name]


def run_commands(
    app: Flask, folder: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[tuple[str, str]]:
    """Run all of them in this process; gives each with what it prints to both outputs."""
    unknown = set(names(app.cli.commands)) ^ COMMANDS.keys()
    assert not unknown, f"edit COMMANDS in tests/helpers/commands.py: {unknown}"
    for name, arguments in COMMANDS.items():
        text = app.test_cli_runner().invoke(args=[*name.split(), "--help"]).stdout
        lacking = {*re.findall(r"^  (--[\w-]+)  ", text, re.M)} - {*arguments.split(), "--help"}
        assert not lacking, f"edit COMMANDS in tests/helpers/commands.py: {name}: {lacking}"
    connections = models.db.obj  # a command uses another one
    key = ""
    for name, arguments in COMMANDS.items():
        line = f"{name} {arguments}".replace("KEY", key).replace("FOLDER", str(folder))
        with (
            app.app_context(),
            models.db.connection_context(),
            mock.patch("sys.stdin", TextIOWrapper(BytesIO(b"long enough"))),
        ):
            models.db.execute_sql("ALTER TABLE api_key DROP COLUMN rotated_at")
            try:
                app.cli.main(line.split(), standalone_mode=False)
            except click.ClickException as error:
                if "pg_dump" not in error.message:  # with PostgreSQL, a backup is another command
                    pytest.fail(f"flask {line}: {error.message}")
            finally:
                models.db.initialize(connections)
            assert "rotated_at" in {each.name for each in models.db.get_columns("api_key")}, (
                f"flask {name}: a command adds what the tables lack: see prepare_database in cli.py"
            )
        printed = capfd.readouterr()
        assert not key or key not in printed.out + printed.err, f"flask {name} prints a key"
        key = printed.out.strip() if id_in(printed.out) else key
        yield name, printed.out + printed.err
