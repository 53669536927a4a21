"""Both stores: keys found, counts saved, old rows deleted; then what only one of them does.

PostgreSQL needs `pytest --postgres`; test_wire_postgres.py has what a client sees.
"""

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import peewee
import pytest

from accounts import api_keys
from helpers.clock import Clock
from helpers.postgresql import Cluster
from helpers.server import eventually, patience, within, writing
from helpers.stored import add_rows, change, left_behind, rotate_key
from helpers.stored import outage as broken_disk
from models import DAY, HOUR, ApiKey, HourlyUsage, InvalidInput, User, db, now
from ratelimit import Allowance, Quota, Usage, window_end
from settings import Settings, SettingsError, load
from storage import key_store, outage, postgres
from storage.database import backend, command_connection, prepare_database, transaction
from storage.key_store import KeyStore

LONG = Quota("long", 5, 10**9)  # no window turns during a test
NewId = Callable[..., str]
END = (int(time.time()) // LONG.seconds + 1) * LONG.seconds


POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)


@pytest.fixture(params=["sqlite", POSTGRES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    """Each database in turn, with empty tables."""
    url = (
        request.getfixturevalue("cluster").new_database(synchronous_commit="off")
        if request.param == "postgres"
        else f"sqlite:///{tmp_path}/test.db"
    )
    settings = load({"DATABASE_URL": url})
    prepare_database(settings)
    with command_connection(settings):
        yield settings


in_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
in_postgres = pytest.mark.parametrize("place", [POSTGRES], indirect=True)


@pytest.fixture
def store(place: Settings) -> Iterator[KeyStore]:
    opened: KeyStore = backend(place).Store(place.database_url)
    yield opened
    opened.save_and_close()


@pytest.fixture
def new_id(place: Settings) -> NewId:
    """Makes keys of a user with these columns; returns the id.

    Texts are as long as they may be: PostgreSQL refuses what is too long for its column.
    """
    with db.connection_context():
        grace = User.create(username="g" * 32, email="g" * 254, password_hash="x" * 162)

    def create(**columns: object) -> str:
        made, key = api_keys.create_key(grace, "c" * 64, "production", tier="t" * 32)
        assert not columns or change(key, **columns)
        return str(made.id)

    return create


def key_of(store: KeyStore, key_id: str) -> ApiKey:
    store.clear_cache()
    found = store.find(key_id)
    assert found, f"there is no row of the key {key_id}, or `find` does not find it"
    return found


def remaining(allowance: Allowance | None) -> int | None:
    assert allowance, "`hit` does not find the key, or takes it for one that was deleted"
    return allowance.remaining if allowance.accepted else None


@db.connection_context()
def by_hand(sql: str) -> list[tuple[Any, ...]]:
    """The rows with which the database answers, if it does."""
    cursor = db.execute_sql(sql)
    return list(cursor.fetchall()) if cursor.description else []


def test_start_and_save_of_nothing_wait_for_nobody_who_is_writing(
    store: KeyStore, new_id: NewId, place: Settings
) -> None:
    new_id()
    with writing(str(place.database_url), "UPDATE api_key SET name = 'new'"):
        store.save()
        with within(2):
            prepare_database(place)


@pytest.mark.parametrize(
    ("stored", "left", "after"),
    [
        pytest.param(Usage(), [5, 4, 3], Usage(2, END, 2), id="never used"),
        pytest.param(
            Usage(2**40, END, 3), [2, 1, 0], Usage(2**40 + 2, END, 5), id="used in this window"
        ),
        pytest.param(Usage(7, END, 4), [1, 0, None], Usage(8, END, 5), id="one is left"),
        pytest.param(Usage(7, END, 2**39), [0, None, None], Usage(7, END, 2**39), id="used up"),
        pytest.param(Usage(7, END - 10**9, 5), [5, 4, 3], Usage(9, END, 2), id="a past window"),
        pytest.param(Usage(7, END - 1, 5), [5, 4, 3], Usage(9, END, 2), id="of another tier"),
        pytest.param(
            Usage(7, END + 10**9, 5), [5, 4, 3], Usage(9, END, 2), id="the clock was ahead"
        ),
    ],
)
def test_limiter_and_database_have_the_same_rule_for_a_window(
    store: KeyStore, new_id: NewId, stored: Usage, left: list[int | None], after: Usage
) -> None:
    """What is `left` of the window before two requests, and after each, if it was accepted."""
    key = key_of(store, new_id(created_at=1, **stored._asdict()))
    assert [
        store.peek(key, LONG).remaining,
        *(remaining(store.hit(key.id, LONG)) for _ in range(2)),
    ] == left, "see peek, or Limiter.hit for SQLite and HIT for PostgreSQL"
    store.save()
    saved = key_of(store, key.id)
    assert (saved.usage, by_hand("SELECT coalesce(sum(requests), 0) FROM hourly_usage")) == (
        after,
        [(after.total - stored.total,)],
    ), "the chart has each request that was counted, and none that was refused"
    assert saved.last_used_at == (pytest.approx(now(), abs=60) if after != stored else None), (
        "it is when a request was last counted, or saved"
    )


def test_store_model_and_condition_agree_which_keys_have_ended(
    store: KeyStore, new_id: NewId
) -> None:
    live_ids = [new_id(), new_id(expires_at=now() + 60), new_id(rotated_at=1)]
    many = [
        {"user": 1, "name": "ci", "type": "", "digest": f"{n}", "id": f"{n:08}"} for n in range(600)
    ]  # more than one query takes
    new_id(expires_at=now())
    ApiKey.insert_many(many).execute()
    live = list(ApiKey.select().where(ApiKey.valid()))
    (expired,) = ApiKey.select().where(~ApiKey.valid())
    assert {key.id for key in live} == {*live_ids, *(row["id"] for row in many)}, "see valid()"
    assert [key for key in (expired, *live) if key.has_expired] == [expired], "see has_expired"
    ended = [
        expired,
        ApiKey(id="deleted!", digest="deleted"),
        ApiKey(id=live[0].id, digest="of a row that was edited by hand"),
    ]
    assert store.ended_digests(live + ended) == {key.digest for key in ended}, (
        "keys that have expired, are deleted or have another digest: see VALID and ended_digests"
    )


SESSIONS = {  # the settings of SQLite's (2 is `full`), and of PostgreSQL's
    "Store": (
        {"busy_timeout": 50, "synchronous": 1, "cache_size": -32_000, "foreign_keys": 1},
        {"synchronous_commit": "off", "statement_timeout": "500ms"},
    ),
    "PageDatabase": (
        {"busy_timeout": 50, "synchronous": 2, "foreign_keys": 1},
        {"synchronous_commit": "on", "statement_timeout": "500ms"},
    ),
    "CommandDatabase": (
        {"busy_timeout": 10_000, "synchronous": 2, "foreign_keys": 1},
        {"synchronous_commit": "on", "statement_timeout": "0", "lock_timeout": "0"},
    ),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_session_is_as_promised(place: Settings, name: str) -> None:
    """Whatever the database says of its sessions."""
    opened = getattr(backend(place), name)(place.database_url)
    how, wanted = ("PRAGMA", SESSIONS[name][0]) if place.sqlite else ("SHOW", SESSIONS[name][1])
    ask = getattr(opened, "_query", lambda sql: opened.execute_sql(sql).fetchall())
    with getattr(opened, "connection_context", nullcontext)():
        found = {asked: ask(f"{how} {asked}")[0][0] for asked in wanted}
    next(
        getattr(opened, end)
        for end in ("save_and_close", "close_all", "close")
        if hasattr(opened, end)
    )()
    assert found == wanted, f"{name}: see PRAGMAS or SESSION"


@in_postgres
def test_process_has_at_most_10_connections(store: KeyStore, place: Settings) -> None:
    """However many requests and pages wait for one at once."""
    pages = postgres.PageDatabase(str(place.database_url))
    wait(
        ThreadPoolExecutor(1).submit(ask, "SELECT pg_sleep(0.3)")
        for ask in (store._query, pages.connection_context()(pages.execute_sql)) * 12
    )
    assert by_hand(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ) <= [(10,)], (
        "docs/growing.md promises at most 10: see KEY_CONNECTIONS and PAGE_CONNECTIONS where "
        "storage/postgres.py makes a connection_pool"
    )
    pages.close_all()


@in_postgres
def test_start_that_adds_a_column_waits_for_nobody(place: Settings) -> None:
    """All requests would wait behind it: see ONE_AT_A_TIME."""
    by_hand("ALTER TABLE api_key DROP COLUMN predecessor")
    with (
        ThreadPoolExecutor(1) as thread,
        writing(str(place.database_url), "SELECT 1 FROM api_key"),
        pytest.raises(SettingsError, match="lock"),
    ):
        thread.submit(prepare_database, place).result(patience(1))


def test_row_whose_query_began_before_a_change_is_not_remembered(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = new_id()
    query = store._query

    def query_while_it_changes(*sql: Any) -> Any:
        rows = query(*sql)
        store.clear_cache()
        return rows

    monkeypatch.setattr(store, "_query", query_while_it_changes)
    old = store.find(key_id)
    monkeypatch.undo()
    assert store.find(key_id) is not old, "see `rows` in KeyStore.find"
    monkeypatch.setattr(
        db.obj, "commit", lambda commit=db.obj.commit: store.find(key_id) and commit()
    )
    with transaction():
        by_hand("UPDATE api_key SET name = 'new'")
    assert getattr(store.find(key_id), "name", "") == "new", "clear the cache after the commit"


def test_row_is_not_remembered_for_long_whoever_asks_for_whatever(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [key_of(store, new_id()).id, new_id(), "unknown!"]
    monkeypatch.setattr(key_store, "monotonic", (clock := Clock(time.monotonic() - 60)).time)
    key_of(store, asked[0])
    by_hand("UPDATE api_key SET name = 'new'")
    for key_id in asked * 7:
        clock.now += 0.1
        store.find(key_id)
    assert getattr(store.find(asked[0]), "name", "") == "new", (
        "after 2 s, a changed key is still as it was, because it, another, or an unknown one is "
        "looked up meanwhile: see KeyStore.find"
    )


def test_nothing_that_a_store_asks_waits_for_connections_of_pages(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = new_id()
    monkeypatch.setattr(db, "obj", None)
    assert store.owner(key_of(store, key_id))
    assert store.hit(key_id, LONG)
    assert store.ended_digests([key_of(store, key_id)]) == set()
    store.flush()


def test_expired_keys_and_old_hours_are_deleted_after_a_save(
    store: KeyStore, new_id: NewId
) -> None:
    this = now() // HOUR * HOUR
    kept = {new_id(created_at=0, last_used_at=1), new_id(rotated_at=1, expires_at=now() + 60)}
    new_id(rotated_at=1, expires_at=now() - 1)
    add_rows(ApiKey.get_by_id(new_id(expires_at=1)), "x", 1)
    HourlyUsage.insert_many((this - age * HOUR, "a" * 8, 1) for age in (0, 24, 26)).execute()
    store.flush()
    assert len(by_hand("SELECT 1 FROM api_key")) == 4, "without requests, the database may sleep"
    for _ in range(2):  # it goes on
        new_id(expires_at=1)
        store.hit(min(kept), LONG)
        store.flush()
        assert {key_id for (key_id,) in by_hand("SELECT id FROM api_key")} == kept, (
            "see delete_old_rows: keys that have expired"
        )
    assert {*by_hand("SELECT hour FROM hourly_usage")} == {(this - DAY,), (this,)}, (
        "the chart counts a request for the hour in which it is saved, and keeps no hour that it "
        "does not show: see _store in storage/sqlite.py and `save` in storage/postgres.py, and "
        "delete_old_rows"
    )
    assert not left_behind(), f"the end of a key {left_behind()}"


one_form = partial(api_keys.create_key, nonce="one")


def succeeds(make: Callable[[User, str], object], key: ApiKey) -> bool:
    with suppress(InvalidInput, api_keys.AlreadyMade), transaction():
        return bool(make(key.user, key.id))
    return False


@in_postgres  # which lets others work meanwhile
@pytest.mark.parametrize(
    ("begun", "make", "keys", "most"),
    [
        pytest.param(rotate_key, rotate_key, 2, 3, id="for the last key"),
        pytest.param(rotate_key, api_keys.create_key, 2, 3, id="for the last key, which is new"),
        pytest.param(rotate_key, rotate_key, 1, 50, id="for a successor of the same key"),
        pytest.param(one_form, one_form, 1, 50, id="the same form"),
    ],
)
def test_of_two_forms_at_once_one_is_refused(
    new_id: NewId,
    monkeypatch: pytest.MonkeyPatch,
    begun: Callable[[User, str], object],
    make: Callable[[User, str], object],
    keys: int,
    most: int,
) -> None:
    monkeypatch.setattr(api_keys, "MAX_KEYS", most)
    with ThreadPoolExecutor(1) as thread:
        read = [ApiKey.get_by_id(new_id()) for _ in range(keys)]
        with db.atomic():
            assert succeeds(begun, read[0])
            other = thread.submit(succeeds, make, read[-1])
            wait([other], timeout=0.5)  # it has to wait for the end of this transaction
        assert not other.result(), "both forms succeed: look at the rows inside transaction(user)"


@in_sqlite
def test_transaction_is_alone_from_its_start(place: Settings) -> None:
    """So what it has read is still true when it writes."""
    with (
        closing(sqlite3.connect(str(place.sqlite), timeout=0)) as other,
        transaction(),
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")


@in_sqlite
def test_usage_changed_by_hand_stays(store: KeyStore, new_id: NewId) -> None:
    key_id = new_id()
    store.hit(key_id, LONG)
    store.save()
    # The row was forgotten together with the count.
    assert remaining(store.hit(key_id, LONG)) == LONG.limit - 2, (
        "what was saved is forgotten, or counts twice: clear the cache with each save"
    )
    by_hand("UPDATE api_key SET used = 3, total = 500")
    store.save()
    assert key_of(store, key_id).usage == Usage(501, END, 4), "see SAVE"


@in_postgres
@pytest.mark.parametrize("ahead", [1, 20, -20])
@pytest.mark.parametrize("seconds", [60, HOUR, DAY])
def test_clocks_that_differ_open_no_window_twice(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch, seconds: int, ahead: int
) -> None:
    """Two processes, at the turn of a window: each admits as much as it can."""
    monkeypatch.setattr(postgres, "time", clock := Clock())
    key_id = new_id()
    quota = Quota("free", 5, seconds)
    turn = window_end(time.time(), DAY)
    granted = [
        remaining(store.hit(key_id, quota)) is not None
        for moment in range(turn - 25, turn + 25, 2)
        for clock.now in (moment, moment + ahead)
    ]
    assert sum(granted) == 2 * quota.limit, (
        "a window opens twice where clocks differ: see SAME_WINDOW and Quota.window_ends"
    )


@in_postgres
def test_request_that_waited_for_the_database_opens_no_window(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted in the window that others have begun meanwhile."""
    key_id = new_id()
    monkeypatch.setattr(postgres, "time", clock := Clock(now := 1000.0 * int(time.time() / 1000)))
    assert [
        remaining(store.hit(key_id, Quota("free", 5, 1)))
        for clock.now in (now + 2, now, now + 2, now + 2, now, now + 1, now, now + 2)
    ] == [4, 3, 2, 1, 0, None, None, None], "see SAME_WINDOW in storage/postgres.py"


@in_postgres
def test_request_that_finds_the_next_window_begun_is_counted_in_it(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has begun it between the statement that refuses and the one that reads."""
    turn = window_end(time.time(), HOUR)
    monkeypatch.setattr(postgres, "time", clock := Clock(turn - 0.1))
    key_id = new_id(reset=turn, used=5)
    look_up = store._look_up

    def turn_and_look_up(key_id: str) -> ApiKey | None:
        clock.now = turn + 0.1
        by_hand(f"UPDATE api_key SET reset = {turn + HOUR}, used = 1")
        return look_up(key_id)

    monkeypatch.setattr(store, "_look_up", turn_and_look_up)
    assert remaining(store.hit(key_id, Quota("free", 5, HOUR))) == 3, (
        "it is refused in a window in which something is left: see the second look in `hit`"
    )


def test_save_that_fails_saves_nothing_and_the_next_one_all(store: KeyStore, new_id: NewId) -> None:
    """In the rows and in the chart; at the latest when the store is closed."""
    saved = """SELECT total, (SELECT sum(requests) FROM hourly_usage WHERE key_id = id)
        FROM api_key ORDER BY total"""
    key_id = new_id()
    hits = [
        *((new_id(), LONG), (key_id, LONG), (key_id, LONG)),
        (key_id, LONG._replace(seconds=10**8)),  # another window begins before the save
    ]
    assert all(store.hit(*each) for each in hits)
    by_hand("CREATE UNIQUE INDEX one_key ON hourly_usage (hour)")  # so the second key fails
    with pytest.raises(peewee.PeeweeException):
        store.save()
    by_hand("DROP INDEX one_key")
    assert [store.save(), store.save()] == [True, False], (
        "an idle service asks the database: forget a key once all its requests are saved"
    )
    assert by_hand(saved) == [(1, 1), (3, 3)], (
        "a save that failed counts twice, or not at all: save all keys in one transaction, and see "
        "SAVE and SAVE_HOUR"
    )
    store.hit(key_id, LONG)
    with broken_disk():  # whatever fails besides, a stop ends in order
        store.save_and_close()
    assert by_hand(saved) == [(1, 1), (4, 4)], "a stop loses what was counted: see save_and_close"


def test_keys_are_saved_in_one_order(store: KeyStore, new_id: NewId, place: Settings) -> None:
    """In different orders, processes would wait for each other, and SQLite would write more."""
    ids = sorted(new_id() for _ in range(5))
    assert all(store.hit(key_id, LONG) for key_id in reversed(ids))
    store.save()
    assert by_hand(
        f"SELECT key_id FROM hourly_usage ORDER BY {'rowid' if place.sqlite else 'ctid'}"
    ) == [(n,) for n in ids], (
        "a save stores keys in the order of their ids: see save in ratelimit.py or postgres.py"
    )


@in_postgres
@mock.patch("storage.postgres.ANSWER_SECONDS", 20)
@mock.patch("storage.postgres.MAX_SAVED", 1)
def test_request_before_or_during_a_save_is_in_the_chart_once(
    place: Settings, new_id: NewId
) -> None:
    store = postgres.Store(str(place.database_url))
    with ThreadPoolExecutor(1) as thread:
        assert store.hit(new_id(), LONG)
        with writing(str(place.database_url), "LOCK TABLE hourly_usage IN EXCLUSIVE MODE"):
            saving = thread.submit(store.save)
            eventually(lambda: by_hand("SELECT 1 FROM pg_locks WHERE NOT granted"))
            assert not store.save(), "two greenlets save the same requests: see `save`"
            assert all(store.hit(new_id(), LONG) for _ in range(4))
            store.save_to_keys()  # or a key could not be revoked now
        assert [saving.result(), store.save(), store.save()] == [True, True, True], (
            "a save of very many keys takes too long, and so does each one after it: see MAX_SAVED"
        )
    store.save_and_close()
    assert by_hand("SELECT sum(requests) FROM hourly_usage") == [(5,)], (
        "a save forgets what is counted meanwhile, or a stop saves only a part: see save_and_close"
    )


@in_postgres
@pytest.mark.parametrize(
    ("act", "acts_on", "counted_for"),
    [
        pytest.param(rotate_key, 1, 1, id="rotate it"),
        pytest.param(rotate_key, 1, 0, id="rotate it, and count for the one that it replaced"),
        pytest.param(
            partial(api_keys.revoke_key, save_counts=list), 0, 0, id="revoke what it replaced"
        ),
    ],
)
def test_request_that_is_counted_while_a_key_ends_is_in_the_window_of_its_successor(
    place: Settings, new_id: NewId, act: Any, acts_on: int, counted_for: int
) -> None:
    first = ApiKey.get_by_id(new_id())
    ids = [each.id for each in rotate_key(first.user, first.id)[:2]]
    counted = f"id = '{ids[counted_for]}'"
    with (
        ThreadPoolExecutor(1) as thread,
        writing(
            str(place.database_url),
            f"UPDATE api_key SET reset = {END}, used = 3, total = 1 WHERE {counted}",
        ),
    ):
        acting = thread.submit(act, first.user, ids[acts_on])
        eventually(lambda: acting.done() or by_hand("SELECT 1 FROM pg_locks WHERE NOT granted"))
    found = acting.result() and by_hand(f"SELECT max(used) FROM api_key WHERE NOT {counted}")
    assert found == [(3,)], (
        "the successor's window lacks a request: read a key that ends or is replaced by `locked`"
    )


@in_postgres
@mock.patch("storage.key_store.CACHE_SECONDS", 60)
def test_deleted_key_is_a_bad_key(store: KeyStore, new_id: NewId) -> None:
    """Also while its row is remembered."""
    assert store.find(key_id := new_id())
    by_hand("DELETE FROM api_key")
    assert store.hit(key_id, LONG) is None, (
        "a RecursionError: `hit` asks the cache again; clear it before the second look"
    )


OUTAGES = "08006 25006 25P03 28000 3D000 40001 40P01 42501 53100 53300 55P03 57014 57P01 57P03"
MISTAKES = "22001 22P05 23505 42601 42703 42804 42P01"


@in_postgres
def test_errors_of_postgresql_are_outages_or_mistakes(store: KeyStore) -> None:
    """Whether the API or a page meets them."""
    for ask, code in product((store._query, by_hand), f"{OUTAGES} {MISTAKES}".split()):
        with pytest.raises(peewee.PeeweeException) as caught:
            ask(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$")
        assert outage.is_outage(caught.value) == (code in OUTAGES), (
            f"SQLSTATE {code} is {'an outage' if code in OUTAGES else 'a mistake'}: see is_outage"
        )


@pytest.mark.parametrize(
    "lacking",
    [
        ["DROP TABLE api_key"],
        ["DROP INDEX api_key_expires_at", "ALTER TABLE api_key DROP COLUMN expires_at"],
    ],
    ids=["table", "column"],
)
def test_many_may_start_at_once_and_add_what_is_missing(
    place: Settings, lacking: list[str]
) -> None:
    for sql in lacking:
        by_hand(sql)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(prepare_database, [place] * 3)) == [None] * 3
    assert ["expires_at"] in [index.columns for index in db.get_indexes("api_key")], (
        "a start adds no index that is missing: see create_missing in storage/database.py"
    )


@in_postgres
def test_role_that_may_create_nothing_can_start(cluster: Cluster, place: Settings) -> None:
    url = str(place.database_url)
    role = f"guest_of_{url.rpartition('/')[2]}"
    Cluster.query(url, f"CREATE ROLE {role} LOGIN PASSWORD '{cluster.password}'")
    Cluster.query(
        url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"
    )
    prepare_database(load({"DATABASE_URL": url.replace("demo:", f"{role}:")}))


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        ("demo:", "nobody:", "password authentication failed"),
        ("127.0.0.1", "nowhere.invalid", "nowhere.invalid"),
        ("127.0.0.1", "127.0.0.2", "refused"),
        ("/test_", "/absent_", "does not exist"),
        ("/test_", "?sslmode=require&dbname=test_", "SSL"),
    ],
)
def test_useless_server_is_one_line(cluster: Cluster, right: str, wrong: str, reason: str) -> None:
    url = cluster.new_database().replace(right, wrong, 1)
    with pytest.raises(SettingsError, match=f"^DATABASE_URL: PostgreSQL: .*{reason}.*$") as refusal:
        prepare_database(load({"DATABASE_URL": url}))
    assert cluster.password not in str(refusal.value), "the line has the password of the URL"


ICU = "ENCODING 'UTF8' LOCALE_PROVIDER icu ICU_LOCALE"


@pytest.mark.parametrize(
    ("options", "wrong"),
    {  # with what is wrong
        "ENCODING 'SQL_ASCII'": "server_encoding is SQL_ASCII, and must be UTF8",
        "ENCODING 'LATIN1'": "server_encoding is LATIN1, and must be UTF8",
        "ENCODING 'EUC_JP'": "server_encoding is EUC_JP, and must be UTF8",
        f"{ICU} 'tr-TR'": r"lower\('I'\) is \u0131, and must be i",
        f"{ICU} 'az'": r"lower\('I'\) is \u0131, and must be i",
        f"{ICU} 'lt-LT'": "",
        "ENCODING 'UTF8'": "",
    }.items(),
)
def test_encoding_or_collation_that_does_not_work_stops_the_start(
    cluster: Cluster, options: str, wrong: str
) -> None:
    """SQL_ASCII is what `initdb` takes without a locale; it would count bytes for characters."""
    url = cluster.new_database(f"{options} LOCALE 'C' TEMPLATE template0", client_encoding="LATIN1")
    refused = pytest.raises(SettingsError, match=f"^DATABASE_URL: PostgreSQL: {wrong}$")
    with refused if wrong else nullcontext():
        prepare_database(load({"DATABASE_URL": url}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_read_only", "on"),
        ("statement_timeout", "20"),
        ("lock_timeout", "20"),
        ("idle_in_transaction_session_timeout", "20"),
    ],
)
def test_default_that_no_session_can_change_stops_the_start(
    cluster: Cluster, name: str, value: str
) -> None:
    """Behind a pooler, that is any default with which requests would fail."""
    refused = f"^DATABASE_URL: PostgreSQL: {name} is {value}, and must be [^\n]*$"
    with cluster.pooled(**{name: value}) as url, pytest.raises(SettingsError, match=refused):
        prepare_database(load({"DATABASE_URL": f"{url}?target_session_attrs=any"}))


# The file of SQLite, in which all rows are stored


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [None, 0o640])
def test_file_is_for_its_owner(config: Settings, tmp_path: Path, mode: int | None) -> None:
    """A file that has another mode keeps it. Others could hold a lock that they can read."""
    if mode:
        (tmp_path / "test.db").touch()
        (tmp_path / "test.db").chmod(mode)
    prepare_database(config, is_service=True)
    with command_connection(config):
        User.create(username="ada", email="ada@example.com", password_hash="")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("test.db*")}
    assert modes == {
        **dict.fromkeys(("test.db", "test.db-wal", "test.db-shm"), mode or 0o600),
        "test.db-lock": 0o600,
    }, "the files are for their owner, unless another mode was given: see check_file and lock"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a user with no special permissions, also where root runs the tests."""
    if is_root := os.geteuid() == 0:
        os.setresuid(65534, 65534, 0)
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as made:
            yield Path(made)
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize("name", ["test.db", "."])
@pytest.mark.parametrize("mode", [0o111, 0o555])
def test_database_without_permission_is_one_line(folder: Path, name: str, mode: int) -> None:
    """For example, root has made it, and the service runs as another user."""
    prepare_database(config := load({"DATABASE_URL": f"sqlite:///{folder}/test.db"}))
    held = folder / name
    held.chmod(mode)
    with pytest.raises(SettingsError) as refusal:
        prepare_database(config)
    folder.chmod(0o700)
    assert str(refusal.value) == (
        f"DATABASE_URL: {folder}/test.db: no permission to read and write {held}; "
        "change its owner, or make its file system writable"
    )


def test_log_of_a_file_that_was_moved_away_is_not_taken_over(
    config: Settings, tmp_path: Path
) -> None:
    """Also if DATABASE_URL names a link to the file."""
    (tmp_path / "test.db").symlink_to(tmp_path / "moved.db")
    (tmp_path / "moved.db-wal").touch()
    with pytest.raises(SettingsError, match=r"is missing, but moved\.db-wal is there: put"):
        prepare_database(config)
    assert not (tmp_path / "moved.db").exists(), "a refused start creates a file: see check_file"


def test_file_that_is_no_database_stays_as_it_was(config: Settings, tmp_path: Path) -> None:
    file = tmp_path / "test.db"
    file.write_text(text := "This is no database. " * 100)
    file.chmod(0o644)
    with pytest.raises(SettingsError, match=f"^DATABASE_URL: {file}: file is not a database$"):
        prepare_database(config)
    assert (file.read_text(), file.stat().st_mode & 0o777) == (text, 0o644), (
        "a refused start changes a file that is no database"
    )


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("connected", [lambda _: db.connection_context(), command_connection])
def test_full_disk_is_named_as_the_reason(
    config: Settings, connected: Callable[[Settings], AbstractContextManager[None]]
) -> None:
    """SQLite ends the transaction by itself then, and peewee's rollback of it fails."""
    with connected(config):
        db.execute_sql("PRAGMA cache_size = 10")  # so that it writes before the end
        db.execute_sql("PRAGMA max_page_count = 1")
        with pytest.raises(peewee.OperationalError) as failure, db.atomic():
            [User.create(username=n, email=n, password_hash="x" * 4000) for n in range(300)]
    assert outage.reason_of(failure.value) == "database or disk is full", "see RollbackMixin"
