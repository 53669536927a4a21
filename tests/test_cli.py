"""Administration: what each command does, prints, and refuses in one line."""

import contextlib
import os
import re
import secrets
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask.testing import FlaskCliRunner

import models
from accounts import api_keys, passwords, users
from cli import KEY_COLUMNS
from conftest import new_user
from helpers.server import REPOSITORY, clean_environment, eventually, writing
from helpers.stored import change, count, row
from models import ApiKey, User
from settings import HERE, Settings
from storage import sqlite

PASSWORD = secrets.token_urlsafe()
PrintKey = Callable[..., str]
Shell = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shell(config: Settings) -> Shell:
    """Runs a line in a shell; `$FLASK` is the command, on the same database."""
    url, flask = f"sqlite:///{config.database_url}", f"{sys.executable} -m flask"
    env = clean_environment(DATABASE_URL=url, PYTHONUNBUFFERED="")
    env |= {"FLASK": flask, "PYTHON": sys.executable}
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return lambda line: subprocess.run(["sh", "-c", line], cwd=HERE, env=env, **how)


def done(result: Result, said: str = "") -> str:
    """What a command printed that must have succeeded, and have said this on standard error."""
    assert (result.exit_code, result.stderr) == (0, f"{said}\n" if said else "")
    return result.stdout


def refused(result: Result) -> str:
    """The one line that a command printed that must have failed."""
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_user_is_created_with_the_password_from_stdin(cli: FlaskCliRunner, end: str) -> None:
    arguments = ["user", "create", "ada", "ada@example.com", "--password-stdin"]
    result = cli.invoke(args=arguments, input=f" {PASSWORD} {end}")
    assert done(result, "User ada was created.") == ""
    assert passwords.verify_password(users.find_user("ada"), f" {PASSWORD} ")


@pytest.mark.usefixtures("owner")
def test_terminal_may_have_another_charset(cli: FlaskCliRunner) -> None:
    latin = cli.app.test_cli_runner(charset="latin-1")
    arguments = ["user", "password", "ada", "--password-stdin"]
    said = "The password of ada was changed, and all their sessions have ended."
    assert done(latin.invoke(args=arguments, input="Ünïcode 密码密码\n".encode()), said) == ""
    assert passwords.verify_password(users.find_user("ada"), "Ünïcode 密码密码")
    assert refused(latin.invoke(args=arguments, input=b"\xff" * 12)).startswith("'utf-8' codec")


@pytest.mark.usefixtures("owner")
def test_list_whose_reader_has_left_ends_quietly(shell: Shell) -> None:
    assert shell("PYTHONUNBUFFERED=1 $FLASK user list | true").stderr == ""


def test_password_is_asked_for_twice_and_hidden(cli: FlaskCliRunner) -> None:
    arguments = ["user", "create", "ada", "ada@example.com"]
    for repeated, status in (("mistyped", 1), (PASSWORD, 0)):
        result = cli.invoke(args=arguments, input=f"{PASSWORD}\n{repeated}\n")
        assert (result.exit_code, PASSWORD in result.output) == (status, False)
        assert result.stdout.startswith("Password (10 or more characters): ")
        assert bool(users.find_user("ada")) == (status == 0)


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize(
    "command", ["user password bob", "user delete bob", "key list bob", "key create bob ci"]
)
def test_unknown_user_is_one_line(cli: FlaskCliRunner, config: Settings, command: str) -> None:
    missing = f"There is no user 'bob' in {config.database_url}."
    hint = "To create one: flask user create USERNAME EMAIL"
    assert refused(cli.invoke(args=command.split())) == f"{missing} {hint}"


@pytest.mark.usefixtures("key")
def test_deleted_user_takes_keys_along(cli: FlaskCliRunner) -> None:
    bob = new_user("bob")
    api_keys.create_key(bob, "ci", "production")
    said = "User ada and all their API keys were deleted."
    assert done(cli.invoke(args=["user", "delete", "ADA"]), said) == ""
    with models.db.connection_context():
        assert [key.user for key in ApiKey.select()] == [bob]
        assert list(User.select()) == [bob]


def test_password_that_is_typed_late_is_not_that_of_the_next_user(
    cli: FlaskCliRunner, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    def type_late(from_stdin: bool) -> str:
        users.delete(owner)
        with models.db.connection_context():
            User.create(id=owner.id, username="bob", email="bob@example.com", password_hash="")
        return PASSWORD

    monkeypatch.setattr("cli.read_password", type_late)
    said = "The account was changed in the meantime, so nothing was done."
    assert refused(cli.invoke(args=["user", "password", "ada"])) == said
    assert not passwords.verify_password(users.find_user("bob"), PASSWORD)


def test_lists_have_all_columns_and_no_secret(cli: FlaskCliRunner, owner: User, key: str) -> None:
    successor = api_keys.rotate_key(owner, key[8:16])[2]
    with models.db.connection_context():
        User.update(created_at=1).execute()
        columns = {"created_at": 1, "last_used_at": 2, "rotated_at": 3, "total": 7, "name": "my ci"}
        ApiKey.update(**columns, expires_at=4102444800).where(ApiKey.id == key[8:16]).execute()
    printed = done(cli.invoke(args=["user", "list"]))
    assert printed == f"{owner.id}\tada\tada@example.com\t1970-01-01T00:00:01Z\n"
    printed = done(cli.invoke(args=["key", "list"]))
    old, new = (line.split("\t") for line in printed.splitlines())
    # In the order of KEY_COLUMNS: created, last used, expires, rotated; a new one comes at the end.
    moments = [f"1970-01-01T00:00:0{second}Z" for second in (1, 2, 3)]
    moments.insert(2, "2100-01-01T00:00:00Z")
    assert old[:10] == [key[8:16], "ada", "my ci", "production", "free", *moments, "7"]
    assert (new[0], new[6:10]) == (successor[8:16], [*["never"] * 3, "0"])
    hidden = set(ApiKey._meta.columns) - {
        *KEY_COLUMNS,
        "user_id",
        "digest",
        "nonce",
        "reset",
        "used",
    }
    assert not hidden, "name these columns at the end of KEY_COLUMNS"
    assert not any(secret[17:] in printed for secret in (key, successor))
    aaron = new_user("aaron")
    lists = [done(cli.invoke(args=["key", "list", name])) for name in ("Ada", "aaron")]
    assert lists == [printed, ""]
    change(api_keys.create_key(aaron, "expired")[1], expires_at=models.now())
    made = [api_keys.create_key(aaron, "ci", created_at=age)[0].id for age in (3, 1, 2)]
    in_order = [line[:8] for line in done(cli.invoke(args=["key", "list"])).splitlines()]
    assert in_order == [key[8:16], successor[8:16], made[1], made[2], made[0]], "by user.id"


def test_list_has_a_header_on_a_terminal(shell: Shell, key: str) -> None:
    in_a_terminal = "import pty; pty.spawn(['sh', '-c', '$FLASK key list'])"
    header, row = shell(f'"$PYTHON" -c "{in_a_terminal}"').stdout.splitlines()
    assert (header, row[:8]) == ("\t".join(KEY_COLUMNS), key[8:16])


@pytest.fixture
def print_key(cli: FlaskCliRunner, capfd: pytest.CaptureFixture[str]) -> PrintKey:
    """Runs a command that writes a key, to the descriptor of standard output itself."""

    def run(*arguments: str) -> str:
        cli.app.cli.main(["key", *arguments], standalone_mode=False)
        return capfd.readouterr().out

    return run


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("15m", 900), ("24h", 86_400), ("90d", 7_776_000)]
)
def test_key_lasts_as_long_as_told(print_key: PrintKey, text: str, seconds: int) -> None:
    made = row(key := print_key("create", "ada", "ci", "--expires", text))
    assert made.expires_at - made.created_at in (seconds - 1, seconds)
    print_key("rotate", made.id)  # of which the grace is a day
    ends = pytest.approx(min(seconds, 86_400), abs=60)
    assert row(key).expires_at - made.created_at == ends


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("key create ada ci --tier gold", "gold"),
        ("key tier KEY gold", "gold"),
        ("user password ada --password-stdin", "password: Use 10 to 256 characters."),
        ("user create bob nowhere --password-stdin", "email: Enter an address"),
    ],
)
def test_wrong_option_is_one_line(cli: FlaskCliRunner, key: str, command: str, words: str) -> None:
    before = row(key).__data__
    arguments = command.replace("KEY", key[:16]).split()
    assert words in refused(cli.invoke(args=arguments, input="too short\n"))
    assert (count(), row(key).__data__) == (1, before)


def stored_keys() -> list[tuple[object, ...]]:
    with models.db.connection_context():
        return list(ApiKey.select().tuples())


@pytest.mark.parametrize("command", ["revoke KEY", "tier KEY pro", "rotate KEY"])
@pytest.mark.parametrize("length", [16, 55])
def test_key_stands_for_its_id(print_key: PrintKey, key: str, command: str, length: int) -> None:
    before = stored_keys()
    print_key(*command.replace("KEY", key[:length]).split())
    assert stored_keys() != before


def test_change_of_a_key_is_said(cli: FlaskCliRunner, key: str) -> None:
    id, tier = key[8:16], cli.invoke(args=["key", "tier", key, "pro"])
    assert done(tier, f"The tier of key {id} is pro.") == ""
    assert done(cli.invoke(args=["key", "revoke", id]), f"Key {id} was revoked.") == ""


@pytest.mark.parametrize("command", ["revoke ID", "tier ID pro", "rotate ID"])
def test_only_a_valid_key_can_be_changed(cli: FlaskCliRunner, key: str, command: str) -> None:
    change(key, expires_at=1)
    for key_id in ("nobody's", key[8:16], key):
        arguments = [part.replace("ID", key_id) for part in command.split()]
        printed = refused(cli.invoke(args=["key", *arguments]))
        assert printed == "There is no valid key with this ID."
    assert count() == 1


@pytest.mark.parametrize("command", ["user create --help", "key --help", "user create"])
def test_help_creates_no_database(cli: FlaskCliRunner, config: Settings, command: str) -> None:
    assert config.sqlite
    config.sqlite.unlink()
    assert "Usage: " in cli.invoke(args=command.split()).output
    assert not config.sqlite.exists()


@pytest.mark.parametrize("command", ["list", "revoke"])
def test_bytes_that_are_not_utf_8_are_one_line(cli: FlaskCliRunner, command: str) -> None:
    assert "utf-8" in refused(cli.invoke(args=["key", command, "\udcff"]))


def test_only_a_new_user_makes_a_database(shell: Shell, tmp_path: Path) -> None:
    other = f"DATABASE_URL=sqlite:///{tmp_path}/other.db $FLASK"
    result = shell(f"{other} key list")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert f"{tmp_path}/other.db does not exist. If the service has never run" in result.stderr
    heading = re.findall('"(.*)" in docs/operating.md', result.stderr)[0]
    assert f"## {heading}\n" in (REPOSITORY / "docs/operating.md").read_text()
    assert not (tmp_path / "other.db").exists()
    words = "user create bob bob@example.com --password-stdin"
    assert shell(f"echo long enough words | {other} {words}").returncode == 0
    assert "bob" in shell(f"{other} user list").stdout


def test_locked_database_is_one_line(
    cli: FlaskCliRunner, key: str, config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "COMMAND_SECONDS", 0.1)
    with writing(str(config.database_url), "BEGIN IMMEDIATE"):
        printed = refused(cli.invoke(args=["key", "revoke", key[8:16]]))
    assert printed == "DATABASE_URL: database is locked"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("create ada ci > /dev/full", "No space left on device"),
        ("rotate KEY > /dev/full", "No space left on device"),
        ("rotate KEY >&-", "standard output is closed, so nothing was done"),
        ("create ada ci --expires 0", "This key would have expired already."),
    ],
)
def test_key_that_nobody_could_use_is_not_made(
    shell: Shell, key: str, command: str, words: str
) -> None:
    before = row(key).__data__
    result = shell(f"$FLASK key {command.replace('KEY', key[:16])}")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert words in result.stderr
    assert (count(), row(key).__data__) == (1, before)


@pytest.mark.parametrize("command", ["create ada ci", "rotate KEY"])
def test_command_that_waits_for_its_reader_keeps_nobody_from_storing(
    config: Settings, key: str, command: str
) -> None:
    reader, output = os.pipe()
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        while True:  # fill the pipe
            os.write(output, b"\n")
    os.set_blocking(output, True)
    arguments = [sys.executable, "-m", "flask", "key", *command.replace("KEY", key[:16]).split()]
    env = clean_environment(DATABASE_URL=f"sqlite:///{config.database_url}")
    how: dict[str, Any] = {"cwd": HERE, "env": env, "stdout": output}
    with subprocess.Popen(arguments, **how) as process, open(reader) as printed:
        wait_channel = Path(f"/proc/{process.pid}/wchan")
        eventually(lambda: re.search("select|poll|pipe", wait_channel.read_text()), 30)
        with writing(str(config.database_url), "BEGIN IMMEDIATE"):
            assert count() == 1
        os.close(output)
        made = printed.read().strip()
    assert row(made).name == "ci"


def test_backup_is_whole_and_private_and_replaces_nothing(
    cli: FlaskCliRunner, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is a path, even if it looks like a URI."""
    copy, link = tmp_path / "file:copy.db", tmp_path / "link.db"
    link.symlink_to(tmp_path / "nothing.db")
    monkeypatch.chdir(tmp_path)
    said = f"The database was copied to {copy}."
    assert done(cli.invoke(args=["backup", copy.name]), said) == ""
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with contextlib.closing(sqlite3.connect(copy)) as opened:
        assert opened.execute("SELECT id FROM api_key").fetchall() == [(key[8:16],)]
    before = copy.read_bytes()
    for taken in (copy, link):
        printed = refused(cli.invoke(args=["backup", str(taken)]))
        assert printed == f"{taken} exists, and is not replaced"
    assert (copy.read_bytes(), link.exists()) == (before, False)


def test_backup_on_a_full_disk_leaves_nothing(shell: Shell, owner: User, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    with models.db.connection_context():
        User.update(password_hash="x" * 2_000_000).execute()
    result = shell(f"ulimit -f 1000; $FLASK backup {tmp_path}/full/copy.db")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "no backup was made: disk I/O error" in result.stderr
    assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_backup_that_is_interrupted_leaves_no_file_of_that_name(
    config: Settings, owner: User, tmp_path: Path, number: signal.Signals
) -> None:
    """Just before the finished copy gets its name."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        f"import os; os.link = lambda *_: os.kill(os.getpid(), {int(number)})"
    )
    env = clean_environment(
        DATABASE_URL=f"sqlite:///{config.database_url}", PYTHONPATH=str(tmp_path)
    )
    command = [sys.executable, "-m", "flask", "backup", str(tmp_path / "kept" / "copy.db")]
    done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert not list((tmp_path / "kept").glob("[!.]*"))


def test_list_whose_reader_pauses_holds_up_no_checkpoint_and_is_complete(
    config: Settings, owner: User
) -> None:
    """Whatever the encoding of the output."""
    bob = new_user("bob")
    api_keys.create_key(owner, "é" + "x" * 60)
    with models.db.connection_context():
        (row,) = ApiKey.select().dicts()
        of_bob = row | {"user": bob.id}
        for n in range(2000):
            ApiKey.insert(of_bob | {"id": f"{n:08}"}).execute()
    expected = count()
    command = [sys.executable, "-m", "flask", "key", "list"]
    env = clean_environment(
        DATABASE_URL=f"sqlite:///{config.database_url}", PYTHONIOENCODING="ascii"
    )
    how: dict[str, Any] = {"cwd": HERE, "env": env, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **how) as process:
        assert process.stdout
        process.stdout.read(1)  # it has begun to print, and the pipe is full
        change(secret := api_keys.create_key(owner, "late")[1], name="later")
        with contextlib.closing(sqlite3.connect(str(config.database_url))) as other:
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        lines = process.stdout.read().decode("ascii").splitlines()
    assert len(lines) == expected
    assert secret[8:16] not in "".join(lines)
