"""Administration: what each command does, prints, and refuses in one line."""

import contextlib
import fcntl
import os
import re
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask.testing import FlaskCliRunner

from accounts import api_keys, users
from cli import KEY_COLUMNS
from conftest import NewKey, in_ci, new_user
from helpers.commands import COMMANDS, run_commands
from helpers.server import PATH, clean_environment, eventually, writing
from helpers.stored import (
    HIDDEN,
    OWN,
    add_hidden_user,
    add_many_rows,
    add_rows,
    change,
    count,
    hidden_rows,
    rotate_key,
    row,
    snapshot,
    turned,
    write,
)
from models import DAY, HOUR, ApiKey, HourlyUsage, User, db, now
from ratelimit import CLOCK_SKEW
from settings import PROJECT, Settings
from storage import sqlite

PASSWORD = "a password of hers"


@pytest.fixture
def shell(config: Settings) -> dict[str, Any]:
    """The arguments that let `subprocess` run a line in which `$FLASK` is the command."""
    return {
        "shell": True,
        "cwd": PROJECT,
        "env": clean_environment(
            DATABASE_URL=f"sqlite:///{config.database_url}",
            PYTHONUNBUFFERED="",
            PATH=PATH,
            FLASK="python3 -m flask",  # not by its path, which may have a space
            PYTHON=sys.executable,
        ),
        "stdin": subprocess.DEVNULL,
        "text": True,
    }


def run(line: str, shell: dict[str, Any]) -> tuple[int, str, str]:
    """The status of a line, and what it prints to both outputs."""
    done = subprocess.run(line, capture_output=True, timeout=60, **shell)
    return done.returncode, done.stdout, done.stderr


def done(result: Result, said: str = "") -> str:
    """What a command printed that must have succeeded, and have said this on standard error."""
    assert (result.exit_code, result.stderr) == (0, f"{said}\n" if said else ""), (
        f"the command has to succeed, and say this: {result.exception or 'see cli.py'}"
    )
    return result.stdout


def refused(result: Result) -> str:
    """The one line that a command printed that must have failed."""
    assert (result.exit_code, result.stdout) == (1, ""), (
        "it is not refused: use valid_key(), user_named(), or check_fields()"
    )
    assert result.stderr.startswith("Error: "), "raise a ClickException or a ValueError in cli.py"
    assert result.stderr.count("\n") == 1, f"a mistake is told in one line: {result.stderr}"
    return result.stderr.removeprefix("Error: ").rstrip("\n")


@pytest.mark.parametrize(("bom", "end"), [("", ""), ("", "\n2"), ("\ufeff", "\r\n")])
def test_password_may_come_from_stdin(cli: FlaskCliRunner, bom: str, end: str) -> None:
    """In the first line, with what PowerShell sends before it, and Windows after it."""
    for command, password, said in [
        ("create ada ada@example.com", "a" * 10, "User ada was created."),
        (
            "password ADA",
            f" {PASSWORD} é ",
            "The password of ada was changed, and all their sessions have ended.",
        ),
    ]:
        result = cli.invoke(
            args=f"user {command} --password-stdin".split(), input=f"{bom}{password}{end}"
        )
        assert done(result, said) == ""
    assert users.verify_password(users.find_user("ada"), f" {PASSWORD} é ")


def test_password_is_asked_for_twice_and_hidden(cli: FlaskCliRunner) -> None:
    for repeated, status in (("mistyped", 1), (PASSWORD, 0)):
        result = cli.invoke(
            args=["user", "create", "ada", "ada@example.com"], input=f"{PASSWORD}\n{repeated}\n"
        )
        assert (result.exit_code, PASSWORD in result.output) == (status, False), (
            f"a password that is repeated as {repeated!r} has the status {status}, and is not shown"
        )
        assert result.stdout.startswith("Password (10 or more characters): ")
        assert bool(users.find_user("ada")) == (status == 0), "a password that differs makes a user"


def test_lists_have_all_columns_and_no_secret(cli: FlaskCliRunner, owner: User, key: str) -> None:
    successor = rotate_key(owner, key[8:16])[2]
    api_keys.create_key(new_user("aaron"), "a", "development")
    write(User.created_at, 1)
    change(
        key,
        name='z"my',
        total=7,
        created_at=1,
        last_used_at=2,
        rotated_at=3,
        expires_at=4_102_444_800,
    )
    assert done(cli.invoke(args=["user", "list"])).startswith(
        f"{owner.id}\tada\tada@example.com\t1970-01-01T00:00:01Z\n"
    )
    old, new, last = (
        line.split("\t") for line in done(cli.invoke(args=["key", "list"])).splitlines()
    )
    # In the order of KEY_COLUMNS: created, last used, expires, rotated; a new one comes at the end.
    moments = [
        "1970-01-01T00:00:01Z",
        "1970-01-01T00:00:02Z",
        "2100-01-01T00:00:00Z",
        "1970-01-01T00:00:03Z",
    ]
    assert old[:11] == [key[8:16], "ada", 'z"my', "production", "free", *moments, "7", ""], (
        "the columns of `flask key list`, in the order of KEY_COLUMNS in cli.py"
    )
    assert [new[0], *new[6:11], last[1]] == [
        *(successor[8:16], *["never"] * 3, "0", key[8:16]),
        "aaron",
    ], "the last one is the newest key of the last user: docs/testing-clients.md relies on it"
    assert {*ApiKey._meta.columns} <= {
        *(*KEY_COLUMNS, "user_id", "digest", "nonce", "reset", "used")
    }, "name new columns at the end of KEY_COLUMNS"


def test_usage_is_that_of_the_hours_of_the_clock_and_the_busiest_key_is_first(
    cli: FlaskCliRunner, new_key: NewKey
) -> None:
    quiet, busy, idle = sorted(new_key() for _ in range(3))
    hour = now() // HOUR * HOUR
    ages = {quiet: {0: 3, 24: 99}, busy: {0: 2, 1: 4, 23: 8}}
    with db.connection_context():
        HourlyUsage.insert_many(
            (hour - age * HOUR, key[8:16], requests)
            for key, counts in ages.items()
            for age, requests in counts.items()
        ).execute()
    change(quiet, total=1234)
    assert [line.split("\t") for line in done(cli.invoke(args=["usage"])).splitlines()] == [
        [busy[8:16], "ada", "ci", "2", "14", "0"],
        [quiet[8:16], "ada", "ci", "3", "3", "1234"],
        [idle[8:16], "ada", "ci", "0", "0", "0"],
    ], "key, user, name, this hour, 24 hours, total; most in 24 hours first: see usage in cli.py"


def test_lists_have_an_order(cli: FlaskCliRunner, new_key: NewKey) -> None:
    for name in ("bob", "eve"):
        new_user(name)
    for text in "bac":
        add_rows(row(new_key()), text, 1, is_full=text == "a")
    for command in [name for name, arguments in COMMANDS.items() if not arguments]:
        printed = done(cli.invoke(args=command.split()))
        with turned():
            assert printed == done(cli.invoke(args=command.split())), (
                f"flask {command}: add order_by() to the query, with the id at its end, and with "
                "is_null() before a column that may be null"
            )


def test_list_of_a_user_is_that_of_all_without_the_rows_of_others(
    cli: FlaskCliRunner, new_key: NewKey
) -> None:
    add_many_rows(row(new_key()), 1, 3)
    add_hidden_user()
    helps = {name: cli.invoke(args=[*name.split(), "--help"]).stdout for name in COMMANDS}
    for command in [name.split() for name in helps if re.search(r"\[USER\w*\]\n", helps[name])]:
        of_one, of_all = (cli.invoke(args=command + more).stdout for more in (["ADA"], []))
        advice = f"flask {' '.join(command)} ada: query = query.where(ROW.user == user)"
        assert not HIDDEN.search(of_one), f"{advice}: {of_one}"
        lacking = {*OWN.findall(of_all)} - {*OWN.findall(of_one), "ada"}
        assert not lacking, f"{advice}, and show all of the user: {lacking}"
        for name in ("ADA", "ada@example.com"):
            assert cli.invoke(args=[*command, name]).stdout == of_one, (
                f"{command} {name}: call user_named"
            )
        assert all(
            NO_USER in refused(cli.invoke(args=[*command, name])) for name in ("nobody", "")
        ), f"{command} with a name, even an empty one: call user_named"


def test_list_has_a_header_on_a_terminal(shell: dict[str, Any], key: str) -> None:
    in_a_terminal = (
        "import pty; pty.spawn(['sh', '-c', 'export PYTHONIOENCODING=ascii; "
        "$FLASK key list; $FLASK key list | cat'])"
    )
    change(key, name="\u00e9")
    header, row, *piped = run(f'"$PYTHON" -c "{in_a_terminal}"', shell)[1].splitlines()
    assert (header, row[:18]) == ("\t".join(KEY_COLUMNS), f"{key[8:16]}\tada\t\\xe9\t")
    assert piped == [row], "there is no header without a terminal"
    assert run("$FLASK key list | true", shell)[2] == "", "no error if the reader has ended"


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize(
    ("options", "seconds", "type", "tier"),
    [
        ("--expires 5s", 5, "production", "free"),
        ("--expires 15m --type development", 900, "development", "free"),
        ("--expires 24h --tier pro", DAY, "production", "pro"),
        ("--expires 99999d", 99_999 * DAY, "production", "free"),
    ],
)
def test_key_is_as_told(
    cli: FlaskCliRunner,
    capfd: pytest.CaptureFixture[str],
    options: str,
    seconds: int,
    type: str,
    tier: str,
) -> None:
    """This command writes a key to the descriptor of standard output itself."""
    cli.app.cli.main(["key", "create", "ada", "ci", *options.split()], standalone_mode=False)
    made = row(capfd.readouterr().out)
    assert (made.type, made.tier) == (type, tier), "edit create_key in cli.py"
    assert made.expires_at - made.created_at in (seconds - 1, seconds), (
        f"with {options}, the key ends after {seconds} s: see duration() in cli.py"
    )


@pytest.mark.parametrize("text", ["90", "1w", "1.5h", "100000d", "24 h", ""])
def test_duration_needs_a_number_and_a_unit(cli: FlaskCliRunner, key: str, text: str) -> None:
    assert "like 90d, 24h, 15m or 5s" in (
        cli.invoke(args=["key", "rotate", key[8:16], "--grace", text]).stderr
    ), "edit duration() in cli.py"


@pytest.mark.parametrize(("grace", "seconds"), [("", DAY), ("--grace 0", 0), ("--grace 5m", 300)])
def test_rotated_key_lasts_for_its_grace(
    cli: FlaskCliRunner, key: str, grace: str, seconds: int
) -> None:
    """With 0, it has ended at once, also by a clock that is behind."""
    cli.app.cli.main(["key", "rotate", key[8:16], *grace.split()], standalone_mode=False)
    left = row(key).expires_at - now()
    assert left in (seconds - 1, seconds) if seconds else left <= -CLOCK_SKEW, (
        f"the old key ends in {left} s, and not in {seconds or -CLOCK_SKEW} s: see --grace in "
        "cli.py, and rotate_key in accounts/api_keys.py"
    )


NO_USER = ".db. To create one: flask user create USERNAME EMAIL"  # it says in which file
NO_KEY = "There is no valid key with this ID."
# Commands that name a user, or a key: one that is not there, or has ended; and wrong texts.
MISTAKES = [
    *(
        (f"{name} {arguments.replace('KEY', 'EXPIRED')}", NO_KEY if "KEY" in arguments else NO_USER)
        for name, arguments in COMMANDS.items()
        if re.search("KEY|bob", arguments) and name != "user create"
    ),
    *(
        (f"{name} {arguments}".replace(f" {word}", " a\x1b[2J", 1).replace("bob", "ada"), "")
        for name, arguments in COMMANDS.items()
        for word in re.findall("^[a-z]+|(?<= )(?<!--type )[a-z@.]+", arguments)
    ),
]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *MISTAKES,
        ("user password ada --password-stdin", "password: Use 10 to 256 characters."),
        ("user create bob nowhere --password-stdin", "email: Enter an address"),
        ("key create ada ci --tier gold", "no tier 'gold', only pro, free, five, once."),
        ("key tier KEY gold", "gold"),
        ("key revoke nobody's", NO_KEY),
    ],
)
def test_mistake_is_one_line_and_changes_nothing(
    cli: FlaskCliRunner, new_key: NewKey, command: str, words: str
) -> None:
    key, expired = new_key(), new_key()
    change(expired, expires_at=1)
    before = snapshot()
    arguments = command.replace("KEY", key[:16]).replace("EXPIRED", expired[:16]).split()
    assert words in refused(cli.invoke(args=arguments, input="too short\n"))
    assert snapshot() == before, f"flask {command} is refused after it has stored something"


@pytest.mark.parametrize("config", [{"KEYS_PER_USER": "0"}], indirect=True)
def test_command_changes_nothing_that_it_does_not_name(
    cli: FlaskCliRunner,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither another user's rows, nor another key of the same user.

    While it waits, bob is renamed, and another user takes that name. Where users make no keys of
    their own, the operator makes them.
    """

    def exchange_names(*_: object) -> str:
        if write(User.username, "robert", User.email == "bob@example.com"):
            write(User.username, "bob", User.email == "HIDDEN")
        return "long enough"

    for wait in ("read_password", "users.hash_password", "select.select"):
        monkeypatch.setattr(f"cli.{wait}", exchange_names)
    add_hidden_user()
    others = before = hidden_rows(counts=())
    for name, _ in run_commands(cli.app, tmp_path, capfd):
        write(User.username, "HIDDEN", User.email == "HIDDEN")
        write(User.username, "bob", User.email == "bob@example.com")
        kept = others if "bob" in COMMANDS[name] else before
        found = hidden_rows(counts=())
        wrong = [each for each in (*kept, *found) if each not in found or each not in before]
        assert not wrong, (
            f"flask {name} changes what it doesn't name: see change_key, and call user_named once, "
            f"before it waits: {wrong}"
        )
        before = found
        if name == "key create":
            api_keys.create_key(users.find_user("bob") or User(), "HIDDEN", used=7)
            before = hidden_rows(counts=())


@pytest.mark.parametrize(
    ("command", "said", "keys"),
    [
        ("key tier KEY pro", "The tier of key ID is pro.", [("pro", 3)]),
        ("key revoke KEY", "Key ID was revoked.", []),
        ("user delete ADA", "User ada was deleted, with everything in the account.", []),
    ],
)
def test_change_is_made_and_said(
    cli: FlaskCliRunner, key: str, command: str, said: str, keys: list[tuple[str, int]]
) -> None:
    change(key, used=3)
    assert not done(
        cli.invoke(args=command.replace("KEY", key[:16]).split()), said.replace("ID", key[8:16])
    )
    assert [(each["tier"], each["used"]) for each in snapshot(())[ApiKey]] == keys, (
        f"the tier of each key after flask {command}, and what is used up: see cli.py"
    )


def test_only_a_new_user_makes_a_database(cli: FlaskCliRunner, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    cli.app.settings = replace(cli.app.settings, database_url=other)  # type: ignore[attr-defined]
    for line in ("user create --help", "key --help", "user create"):
        assert "Usage: " in cli.invoke(args=line.split()).output
    refusal = refused(cli.invoke(args=["key", "list"]))
    assert refusal.startswith(f"{other} does not exist. If the service has never run")
    (heading,) = re.findall('"(.*)" in docs/operating.md', refusal)
    assert f"## {heading}\n" in (PROJECT / "docs/operating.md").read_text()
    assert not other.exists(), "a command that creates no user has created the file"
    created = cli.invoke(
        args=["user", "create", "bob", "bob@example.com", "--password-stdin"], input=PASSWORD
    )
    assert (done(created, "User bob was created."), other.exists()) == ("", True)


def test_locked_database_is_one_line(
    cli: FlaskCliRunner, key: str, config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "COMMAND_SECONDS", 0.1)
    with writing(str(config.database_url), "BEGIN IMMEDIATE"):
        assert refused(cli.invoke(args=["key", "revoke", key[8:16]])) == "database is locked"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("key create ada ci > /dev/full", "No space left on device"),
        ("key rotate KEY > /dev/full", "No space left on device"),
        ("key rotate KEY >&-", "standard output is closed, so nothing was done"),
        ("key create ada ci --expires 0", "This key would have expired already."),
        ("user password ada <&-", "standard input is closed, so there is no password to read"),
    ],
)
def test_key_that_nobody_could_use_is_not_made(
    shell: dict[str, Any], key: str, command: str, words: str
) -> None:
    before = row(key).__data__
    status, _, error = run(f"$FLASK {command.replace('KEY', key[:16])}", shell)
    assert (status, error.count("\n"), words in error) == (1, 1, True), (
        f"{command} fails with one line that says {words!r}, not with {error}"
    )
    assert (count(), row(key).__data__) == (1, before), (
        f"{command} could not print its key, but has made it, or changed another one"
    )


@pytest.mark.parametrize(
    ("command", "made", "lines"), [("create ada ci", 1, 1), ("rotate KEY", 1, 1), ("list", 0, 2001)]
)
def test_command_that_waits_for_its_reader_keeps_nobody_from_storing(
    config: Settings, shell: dict[str, Any], key: str, command: str, made: int, lines: int
) -> None:
    """Nor does it hold up a checkpoint; and a list is complete."""
    others = {"user": new_user("bob").id, "name": "x" * 60, "type": ""}
    with db.connection_context():
        ApiKey.insert_many([others | {"id": f"{n:08}", "digest": n} for n in range(2000)]).execute()
    reader, output = os.pipe()
    os.write(output, b"\n" * fcntl.fcntl(output, fcntl.F_GETPIPE_SZ))  # now it is full
    line = f"exec $FLASK key {command.replace('KEY', key[:16])}"
    with subprocess.Popen(line, stdout=output, **shell) as process, open(reader) as printed:
        eventually(
            lambda: re.search("select|poll|pipe", Path(f"/proc/{process.pid}/wchan").read_text()),
            30,
        )
        with contextlib.closing(sqlite3.connect(str(config.database_url), timeout=0)) as other:
            with other:
                assert other.execute("UPDATE api_key SET name = 'late'").rowcount == 2001
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        os.close(output)
        assert len(printed.read().strip().splitlines()) == lines
    assert count() == 2001 + made


def test_backup_is_whole_and_private_and_replaces_nothing(
    cli: FlaskCliRunner, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is a path, even if it looks like a URI. Not each file system has hard links."""
    monkeypatch.delattr(os, "link")
    monkeypatch.setattr("tempfile.tempdir", "/no such folder")  # which may be on another disk
    copy, link = tmp_path / "file:copy.db", tmp_path / "link.db"
    link.symlink_to(tmp_path / "nothing.db")
    monkeypatch.chdir(tmp_path)
    assert done(cli.invoke(args=["backup", copy.name]), f"The database was copied to {copy}.") == ""
    assert copy.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(sqlite3.connect(copy)) as opened:
        assert opened.execute("SELECT id FROM api_key").fetchall() == [(key[8:16],)]
    before = copy.read_bytes()
    late = tmp_path / "late.db"
    monkeypatch.setattr(  # another program makes this file while SQLite copies
        "peewee.logger.debug", lambda asked: "VACUUM" in asked[0] and late.write_text("theirs")
    )
    monkeypatch.setattr("peewee.logger.isEnabledFor", lambda level: True)
    for taken in (late, copy, link):
        result = cli.invoke(args=["backup", str(taken)])
        assert (result.exit_code, result.stderr) == (
            1,
            f"Error: {taken} exists, and is not replaced\n",
        ), f"a backup replaces {taken.name}: look right before the rename, not before the copy"
    assert (copy.read_bytes(), late.read_text(), link.exists(), [*tmp_path.glob(".*")]) == (
        before,
        "theirs",
        False,
        [],
    )


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("ulimit -f 1000; $FLASK", "disk I/O error"),
        ("NUMBER=15 PYTHONPATH=$DIR $FLASK", ""),
        in_ci("NUMBER=1 PYTHONPATH=$DIR $FLASK", ""),
        in_ci("NUMBER=2 PYTHONPATH=$DIR $FLASK", ""),
    ],
)
def test_backup_that_fails_leaves_no_file_of_that_name(
    shell: dict[str, Any], owner: User, tmp_path: Path, command: str, reason: str
) -> None:
    """On a full disk, or by a signal just before the finished copy gets its name."""
    write(User.password_hash, "x" * 2_000_000)
    (tmp_path / "kept").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import os; os.rename = lambda *_: os.kill(os.getpid(), int(os.environ['NUMBER']))"
    )
    status, _, error = run(f"DIR={tmp_path}; {command} backup $DIR/kept/copy.db", shell)
    assert (status != 0, reason in error) == (True, True)
    assert not list((tmp_path / "kept").glob("[!.]*"))
