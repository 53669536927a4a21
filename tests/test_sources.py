"""Rules for the code of the service that no single behaviour would show."""

import re

import pytest
from peewee import ForeignKeyField

import models
from helpers.server import REPOSITORY, sources

RULES = {
    # Elsewhere a variable would be neither checked at the start nor described.
    "add a setting to settings.py, see CONTRIBUTING.md": (
        r"\bos\.environ|\bgetenv\b|import.* environ\b",
        ["settings.py", "server/demo.py"],
    ),
    # Elsewhere they might be those of another app, or be read before they can be given.
    "ask current_service().settings where the setting is needed": (
        r"\b(?<!json\.)load\(|settings\.load\b",
        ["settings.py", "app.py", "server/lifecycle.py", "server/demo.py"],
    ),
    # Commands and the demo, in which nobody guesses, do without.
    "hash passwords by the functions of web/forms.py": (
        r"\b(hash|verify)_password\(",
        ["web/forms.py", "accounts/users.py", "cli.py", "server/demo.py"],
    ),
    # psycopg writes them as %s; KeyStore._query replaces them.
    "ask by peewee's methods, because PostgreSQL has no ? in SQL": (
        r"execute_sql\([^()]*\?",
        ["cli.py", "storage/sqlite.py"],  # for SQLite only
    ),
    "order by an id, and let peewee write the query, because PostgreSQL has none of these": (
        r"\browid\b|fn\.(GROUP_CONCAT|IFNULL|STRFTIME|DATETIME|JULIANDAY|UNIXEPOCH|TOTAL)\b"
        r"|OR (IGNORE|REPLACE)\b"
        r"|\b(replace|replace_many|on_conflict_replace)\((?=\)|(?!tzinfo)\w+=)",
        [],
    ),
    # A path in the code lacks the prefix of SCRIPT_NAME.
    "use url_for(...), which a template hands to a script as data-...": (
        r"(redirect|fetch|assign|WebSocket|EventSource)\(f?[\"'`]/|\blocation\b.*[\"'`]/",
        [],
    ),
    # One that was made up has no password_hash, so `transaction` takes it for a changed account.
    "read the User, for example with User.get_or_none": (r"(?<!class )\bUser\(", []),
    # Else a request that is counted meanwhile would be missing in the window of the successor.
    "read a key inside `with transaction(user)` by `locked`": (
        r"(?m)^( *)with .*\btransaction\([\w.]+\).*:\n(\1 .*\n|\n)*?\1 .*"
        r"\bApiKey\.(get|select\(\))",
        [],
    ),
    # One in a handler would be a greenlet for each client.
    "make a Ticker once, at the level of the module": (r"(?m)^ .*\bTicker\(", []),
    # An operator, or NTP, may set the clock of the machine.
    "measure ages and waits by time.monotonic()": (
        r"\btime\(\) [-+<>]|[-+<>]=? (?:time\.)?time\(\)",
        ["web/log_in.py", "ws/ticker.py"],
    ),
    # It has the password of the database.
    "say `settings.sqlite or 'PostgreSQL'` instead of the URL": (
        r"{[^{}]*database_url",
        [],
    ),
    # What is false is counted, too: only null isn't.
    "count rows by fn.COUNT(ROW.id).filter(condition)": (
        r"\bCOUNT\((?!Case)[^()]*(?:\.(?:is_null|in_|not_in|contains|startswith)\(| [=!<>]=? )",
        [],
    ),
    # Else 4.05 looks like 4.5, and 9:05 like 9:5.
    "write the digits after a point or a colon with their zeros, as in {cents % 100:02}": (
        r"}[.:]\$?{+[^{}:]*%\s*\w+\s*}",
        [],
    ),
    # In SQLite, one has no end.
    "use BigIntegerField: in PostgreSQL, this ends at 2,147,483,647, or before": (
        r"\b(Small)?IntegerField\b",
        [],
    ),
    # All of a row would undo what others have stored since it was read, such as counts.
    "use save(only=[...]), or update": (
        r"(?<!self|tore|iter)\.save\((?!only=|force_insert=)",
        [],
    ),
}


@pytest.mark.parametrize("advice", RULES)
def test_rule_holds_in_all_files_but_these(advice: str) -> None:
    rule, exceptions = RULES[advice]
    found = [
        f"{match[0]} in {file}"
        for file in {*sources(), *REPOSITORY.glob("web/static/*.js")}
        - {REPOSITORY / name for name in exceptions}
        if (match := re.search(rule, file.read_text()))
    ]
    assert not found, f"{advice}: {found}"


def test_columns_have_moments_of_their_rows_and_owners_that_exist() -> None:
    for table, name, field in {(t, *c) for t in models.TABLES for c in t._meta.columns.items()}:
        assert field.default is None or callable(field.default) or not name.endswith("_at"), (
            f"{table} {name}: default=now, not now()"
        )
        assert isinstance(field, ForeignKeyField) or name == "key_id" or name[-3:] != "_id", (
            f"{table} {name}: use a ForeignKeyField; a table that Citus distributes by its keys "
            "can't have one, so call the column key_id, and delete its rows yourself"
        )
