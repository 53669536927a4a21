"""Both stores: keys found, counts saved, old rows deleted; then what only one of them does.

PostgreSQL needs `pytest --postgres`; test_wire_postgres.py has what a client sees.
"""

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import gevent
import peewee
import psycopg
import pytest
from gevent.event import Event
from gevent.selectors import GeventSelector
from psycopg import waiting

import models
from accounts import api_keys
from helpers.clock import Clock
from helpers.postgresql import Cluster, connected
from helpers.server import eventually, patience, writing
from helpers.stored import change
from models import DAY, HOUR, ApiKey, HourlyUsage, InvalidInput, User
from ratelimit import Allowance, Limiter, Quota, Usage, window_end
from settings import Settings, SettingsError, load
from storage import key_store as stores
from storage import outage, postgres
from storage.database import backend, command_connection, prepare_database, transaction
from storage.key_store import KeyStore

LONG = Quota("long", 5, 10**9)  # no window turns during a test
NewId = Callable[..., str]
END = (int(time.time()) // LONG.seconds + 1) * LONG.seconds


POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)


@pytest.fixture(params=["sqlite", POSTGRES])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Settings]:
    """Each database in turn, with empty tables."""
    url = f"sqlite:///{tmp_path}/test.db"
    if request.param == "postgres":
        url = request.getfixturevalue("cluster").new_database()
        # Other greenlets run while psycopg waits, as under gunicorn, where gevent patches all.
        monkeypatch.setattr(waiting, "DefaultSelector", GeventSelector)
        monkeypatch.setattr(waiting, "wait", waiting.wait_selector)
    settings = load({"DATABASE_URL": url})
    prepare_database(settings)
    with command_connection(settings):
        yield settings


in_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
in_postgres = pytest.mark.parametrize("place", [POSTGRES], indirect=True)


@pytest.fixture
def store(place: Settings) -> Iterator[KeyStore]:
    opened: KeyStore = backend(place).key_store(place.database_url)
    yield opened
    opened.close()


@pytest.fixture
def new_id(place: Settings) -> NewId:
    """Makes keys of a user with these columns; returns the id."""
    with models.db.connection_context():
        grace = User.create(username="grace", email="grace@example.com", password_hash="")

    def create(**columns: object) -> str:
        made, key = api_keys.create_key(grace, "ci", "production")
        assert not columns or change(key, **columns)
        return str(made.id)

    return create


def key_of(store: KeyStore, key_id: str) -> ApiKey:
    store.clear_cache()
    found = store.find(key_id)
    assert found
    return found


def remaining(allowance: Allowance | None) -> int | None:
    assert allowance
    return allowance.remaining if allowance.accepted else None


def by_hand(sql: str) -> list[tuple[Any, ...]]:
    """The rows with which the database answers, if it does."""
    with models.db.connection_context():
        cursor = models.db.execute_sql(sql)
        return list(cursor.fetchall()) if cursor.description else []


def test_start_and_save_of_nothing_wait_for_nobody_who_is_writing(
    store: KeyStore, new_id: NewId, place: Settings
) -> None:
    new_id()
    with writing(str(place.database_url), "UPDATE api_key SET name = 'new'"):
        store.save()
        started = time.monotonic()
        prepare_database(place)
        assert time.monotonic() - started < patience(2)


@pytest.mark.parametrize(
    ("stored", "granted", "after"),
    [
        pytest.param(Usage(), [4, 3], Usage(2, END, 2), id="never used"),
        pytest.param(Usage(7, END, 3), [1, 0], Usage(9, END, 5), id="used in this window"),
        pytest.param(Usage(7, END, 4), [0, None], Usage(8, END, 5), id="one is left"),
        pytest.param(Usage(7, END, 6), [None, None], Usage(7, END, 6), id="used up"),
        pytest.param(Usage(7, END - 10**9, 5), [4, 3], Usage(9, END, 2), id="a past window"),
        pytest.param(Usage(7, END - 1, 5), [4, 3], Usage(9, END, 2), id="of another tier"),
        pytest.param(Usage(7, END + 10**9, 5), [4, 3], Usage(9, END, 2), id="the clock was ahead"),
    ],
)
def test_limiter_and_database_have_the_same_rule_for_a_window(
    store: KeyStore, new_id: NewId, stored: Usage, granted: list[int | None], after: Usage
) -> None:
    key = key_of(store, new_id(created_at=1, **stored._asdict()))
    assert [remaining(store.hit(key.id, LONG)) for _ in range(2)] == granted
    store.save()
    saved = key_of(store, key.id)
    assert saved.usage == after
    used_at = pytest.approx(models.now(), abs=60) if after != stored else None
    assert saved.last_used_at == used_at, "it is when a request was last counted, or saved"

    limiter = Limiter()
    assert [remaining(limiter.hit(key.id, LONG, stored)) for _ in range(2)] == granted
    counted = dict(limiter.unsaved()).get(key.id)
    assert (stored.plus(counted) if counted else stored) == after


def test_store_model_and_condition_agree_which_keys_have_ended(
    store: KeyStore, new_id: NewId
) -> None:
    for end, rotated_at in ((None, None), (models.now() + 60, None), (None, 1)):
        new_id(expires_at=end, rotated_at=rotated_at)
    many = [
        {"user": 1, "name": "ci", "type": "", "digest": f"{n}", "id": f"{n:08}"} for n in range(600)
    ]  # more than one query takes
    expired_id = new_id(expires_at=models.now())
    with models.db.connection_context():
        ApiKey.insert_many(many).execute()
        live = list(ApiKey.select().where(ApiKey.id != expired_id))
        expired = ApiKey.get_by_id(expired_id)
        keys = list(ApiKey.select())
        assert [key for key in keys if key.has_expired] == [expired]
        assert set(ApiKey.select().where(ApiKey.valid())) == set(live)
    again = ApiKey(id=live[0].id, digest="of a row that was edited by hand")
    ended = [expired, ApiKey(id="deleted!", digest="deleted"), again]
    assert store.ended_digests(live + ended) == {key.digest for key in ended}


def test_chart_has_each_request_once(store: KeyStore, new_id: NewId) -> None:
    ids = sorted(new_id() for _ in range(2))
    for hits in (1, 3):
        for key_id in ids + ids[:1]:
            for _ in range(hits):
                store.hit(key_id, LONG._replace(limit=100))
        assert remaining(store.hit(ids[0], LONG._replace(limit=1))) is None, "it is in no chart"
        store.save()
    store.save()
    saved = by_hand("SELECT key_id, sum(requests) FROM hourly_usage GROUP BY key_id")
    assert sorted(saved) == [(ids[0], 8), (ids[1], 4)]


@in_postgres
def test_chart_is_saved_in_the_order_of_its_table(
    store: KeyStore, new_id: NewId, place: Settings
) -> None:
    """Or two processes that save the same keys would wait for each other."""
    first, second = sorted(new_id() for _ in range(2))
    for _ in range(2):
        assert store.hit(second, LONG)
        assert store.hit(first, LONG)
        if not by_hand("SELECT 1 FROM hourly_usage"):
            store.save()
    take = "UPDATE hourly_usage SET requests = 0 WHERE key_id = %s"
    waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with psycopg.connect(str(place.database_url)) as other, ThreadPoolExecutor(1) as thread:
        other.execute("SET lock_timeout = '0.2s'")
        other.execute(take, [first])
        saving = thread.submit(store.save)
        eventually(lambda: by_hand(waits) or saving.done())
        other.execute(take, [second])
        other.rollback()
        wait([saving])


def test_owner_comes_with_the_number_of_valid_keys(store: KeyStore, new_id: NewId) -> None:
    new_id(expires_at=models.now()), new_id(rotated_at=1)
    key = key_of(store, new_id())
    owner = store.owner(key)
    assert owner
    *about, created_at, count = owner
    assert (about, count) == ([key.user_id, "grace", "grace@example.com"], 2)
    assert abs(created_at - models.now()) < 60
    with models.db.connection_context():
        ApiKey.delete().execute()
    assert store.owner(key) is None


def test_what_a_page_stores_is_on_the_disk_whatever_the_database_says(cluster: Cluster) -> None:
    settings = load({"DATABASE_URL": cluster.new_database(synchronous_commit="off")})
    database = backend(settings).page_database(settings.database_url)
    with database.connection_context():
        assert database.execute_sql("SHOW synchronous_commit").fetchall() == [("on",)]
    database.close_all()


def test_what_is_known_of_a_key_is_forgotten_by_the_store_itself(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nothing calls `clear_cache`, as after a change by a command."""
    now = time.monotonic() + 1
    monkeypatch.setattr(stores, "monotonic", lambda: now)
    key_id = new_id()
    found = store.find(key_id)
    assert found
    assert store.find(key_id) is found
    by_hand("DELETE FROM api_key")
    now += 1.5  # a revocation holds within two seconds
    assert store.find(key_id) is None


@in_postgres
def test_row_whose_query_began_before_a_change_is_not_remembered(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id, execute, may_go_on = new_id(), psycopg.Cursor.execute, Event()
    assert store.hit(key_id, LONG), "there is a connection"

    def slow(cursor: Any, query: Any, values: Any = None, **how: Any) -> Any:
        done = execute(cursor, query, values, **how)
        may_go_on.wait()
        return done

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", slow)
        finding = gevent.spawn(store.find, key_id)
        gevent.sleep(0.1)
        store.clear_cache()
        may_go_on.set()
        old = finding.get(timeout=30)
    assert old
    assert store.find(key_id) is not old


def test_nothing_that_a_store_asks_waits_for_connections_of_pages(
    store: KeyStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = new_id()
    monkeypatch.setattr(models.db.obj, "connect", mock.Mock(side_effect=AssertionError))
    assert store.owner(key_of(store, key_id))
    assert store.hit(key_id, LONG)
    assert store.ended_digests([key_of(store, key_id)]) == set()
    store.save()


def test_expired_keys_and_old_hours_are_deleted_after_a_save(
    store: KeyStore, new_id: NewId
) -> None:
    lately, soon = models.now() - 1, models.now() + 60
    kept = [new_id(created_at=0, last_used_at=1), new_id(rotated_at=1, expires_at=soon)]
    gone = [new_id(expires_at=1), new_id(rotated_at=1, expires_at=lately)]
    this = models.now() // HOUR * HOUR
    with models.db.connection_context():
        for age in (0, 24, 26):
            HourlyUsage.create(hour=this - age * HOUR, key_id="a" * 8, requests=1)
    store.save()
    assert len(by_hand("SELECT 1 FROM api_key")) == 4, "without requests, the database may sleep"
    store.hit(kept[0], LONG)
    store.save()
    assert [key_id for key_id in kept + gone if store.find(key_id)] == kept
    later = new_id(expires_at=1)
    store.hit(kept[0], LONG)
    store.save()
    assert store.find(later) is None, "it goes on"
    hours = by_hand("SELECT hour FROM hourly_usage")
    assert {(this - hour) // HOUR for (hour,) in hours} == {24, 0}


def test_each_look_deletes_more_old_hours_than_a_million_keys_make_between_two(
    store: KeyStore,
) -> None:
    """Of 7200 saves an hour, 139 rows each; but not so many at once that others wait."""
    rows = [{"hour": 0, "key_id": str(number), "requests": 1} for number in range(2000)]
    with models.db.connection_context():
        HourlyUsage.insert_many(rows).execute()
    stored = "SELECT 1 FROM hourly_usage"
    for _ in range(2):
        before = len(by_hand(stored))
        store.delete_old_rows()
        assert 139 < before - len(by_hand(stored)) <= 1000


def rotated(key: ApiKey) -> bool:
    with suppress(InvalidInput), transaction():
        return bool(api_keys.rotate_key(key.user, key.id, 60))
    return False


def test_of_rotations_at_once_one_makes_a_successor(place: Settings, new_id: NewId) -> None:
    """All have read the key before the first of them changes it."""
    with models.db.connection_context():
        key_id = new_id()
        keys = [ApiKey.get_by_id(key_id) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:  # with SQLite, each transaction runs without a break
        run = map if place.sqlite else threads.map
        assert sorted(run(rotated, keys)) == [False, False, True]
    with models.db.connection_context():
        assert ApiKey.select().count() == 2


def created(key: ApiKey) -> bool:
    with suppress(InvalidInput), transaction():
        return bool(api_keys.create_key(key.user, "ci"))
    return False


@in_postgres  # which lets others work meanwhile
@pytest.mark.parametrize("make", [rotated, created])
def test_two_forms_at_once_do_not_both_make_the_last_key_of_a_user(
    new_id: NewId, monkeypatch: pytest.MonkeyPatch, make: Callable[[ApiKey], bool]
) -> None:
    monkeypatch.setattr(api_keys, "MAX_KEYS", 3)
    with models.db.connection_context(), ThreadPoolExecutor(1) as thread:
        first, second = (ApiKey.get_by_id(new_id()) for _ in range(2))
        with models.db.atomic():
            assert rotated(first)
            other = thread.submit(make, second)
            wait([other], timeout=0.5)  # it has to wait for the end of this transaction
        assert not other.result()


@in_sqlite
def test_transaction_is_alone_from_its_start(place: Settings) -> None:
    """So what it has read is still true when it writes."""
    other, refused = sqlite3.connect(str(place.sqlite), timeout=0), sqlite3.OperationalError
    with closing(other), transaction(), pytest.raises(refused, match="locked"):
        other.execute("BEGIN IMMEDIATE")


@in_sqlite
def test_half_a_save_saves_nothing(store: KeyStore, new_id: NewId) -> None:
    saved = "SELECT total, (SELECT sum(requests) FROM hourly_usage WHERE key_id = id) FROM api_key"
    store.hit(new_id(), LONG)
    by_hand("ALTER TABLE hourly_usage RENAME COLUMN requests TO away")
    with pytest.raises(peewee.OperationalError):
        store.save()
    by_hand("ALTER TABLE hourly_usage RENAME COLUMN away TO requests")
    assert by_hand(saved) == [(0, None)]
    store.save()
    assert by_hand(saved) == [(1, 1)]


@in_sqlite
def test_usage_changed_by_hand_stays(store: KeyStore, new_id: NewId) -> None:
    key_id = new_id()
    store.hit(key_id, LONG)
    store.save()
    # The row was forgotten together with the count.
    assert remaining(store.hit(key_id, LONG)) == LONG.limit - 2
    by_hand("UPDATE api_key SET used = 3, total = 500")
    store.save()
    assert key_of(store, key_id).usage == Usage(501, END, 4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time by which windows are computed with PostgreSQL."""
    monkeypatch.setattr(postgres, "time", moment := Clock())
    monkeypatch.setattr(stores, "time", moment.time)
    return moment


@in_postgres
@pytest.mark.parametrize("ahead", [1, 20, -20])
@pytest.mark.parametrize("seconds", [60, HOUR, DAY])
def test_clocks_that_differ_open_no_window_twice(
    store: KeyStore, new_id: NewId, clock: Clock, seconds: int, ahead: int
) -> None:
    """Two processes, at the turn of a window: each admits as much as it can."""
    key_id, quota, granted = new_id(), Quota("free", 5, seconds), 0
    turn = window_end(time.time(), DAY)
    for moment in range(turn - 25, turn + 25, 2):
        for clock.now in (moment, moment + ahead):
            granted += remaining(store.hit(key_id, quota)) is not None
    assert granted == 2 * quota.limit


@in_postgres
def test_refusal_is_of_the_window_that_was_asked_about(
    store: KeyStore, new_id: NewId, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the next one has begun when the answer comes."""
    key_id, quota = new_id(), Quota("once", 1, 60)
    assert store.hit(key_id, quota)
    monkeypatch.setattr(stores, "time", lambda: clock.now + 60)
    refused = store.hit(key_id, quota)
    assert refused
    assert (refused.accepted, refused.remaining) == (False, 0)
    assert refused.reset == window_end(clock.now, 60)


@in_postgres
def test_statement_that_waited_over_the_turn_goes_on_with_the_new_window(
    store: KeyStore, new_id: NewId, clock: Clock, place: Settings
) -> None:
    key_id, quota, turn = new_id(), Quota("free", 5, HOUR), window_end(time.time(), HOUR)
    clock.now = turn - 0.01
    new = f"UPDATE api_key SET reset = {turn + HOUR}, used = 4 WHERE id = '{key_id}'"
    with connected(str(place.database_url)) as other:
        other.execute("BEGIN")
        other.execute(new.encode())
        hits = [gevent.spawn(store.hit, key_id, quota) for _ in range(2)]
        gevent.sleep(0.03)
        other.execute("COMMIT")
        answers = [hit.get(timeout=30) for hit in hits]
    assert {remaining(allowance) for allowance in answers} == {0, None}
    assert {allowance.reset for allowance in answers} == {turn + HOUR}


@in_postgres
def test_chart_is_saved_with_the_next_save_that_succeeds(store: KeyStore, new_id: NewId) -> None:
    """At the latest when the store is closed. A connection that failed is not used again."""
    key_id, chart = new_id(), "SELECT sum(requests) FROM hourly_usage"
    open_ones = "FROM pg_stat_activity WHERE datname = current_database()"
    store.hit(key_id, LONG)
    by_hand("ALTER TABLE hourly_usage RENAME TO away")
    ((pid,),) = by_hand(f"SELECT pid {open_ones} AND pid <> pg_backend_pid()")
    with pytest.raises(peewee.PeeweeException):
        store.save()
    eventually(lambda: by_hand(f"SELECT pid {open_ones} AND pid = {pid}") == [])
    store.hit(key_id, LONG)
    by_hand("ALTER TABLE away RENAME TO hourly_usage")
    store.save()
    assert by_hand(chart) == [(2,)]
    store.hit(key_id, LONG)
    store.close()
    assert by_hand(chart) == [(3,)]


@in_postgres
def test_connections_that_the_server_has_closed_fail_no_request(
    store: KeyStore, new_id: NewId
) -> None:
    """As after a restart. They are detected without a query."""
    key_id, others = new_id(), "datname = current_database() AND pid <> pg_backend_pid()"
    end_all = f"SELECT pg_terminate_backend(pid, 9000) FROM pg_stat_activity WHERE {others}"
    for _ in range(2):
        gevent.joinall([gevent.spawn(store.hit, key_id, LONG) for _ in range(5)], raise_error=True)
        assert len(by_hand(end_all)) > 1


@in_postgres
def test_deleted_key_is_a_bad_key(store: KeyStore, new_id: NewId) -> None:
    """Also while its row is remembered."""
    assert store.find(key_id := new_id())
    by_hand("DELETE FROM api_key")
    assert store.hit(key_id, LONG) is None


OUTAGES = "08006 25006 25P03 28000 3D000 40001 40P01 42501 53100 53300 55P03 57014 57P01 57P03"
MISTAKES = "22001 22P05 23505 42601 42703 42804 42P01"


@in_postgres
def test_errors_of_postgresql_are_outages_or_mistakes(store: KeyStore) -> None:
    """Whether the API or a page meets them."""
    for ask, code in product((store._query, by_hand), f"{OUTAGES} {MISTAKES}".split()):
        with pytest.raises(peewee.PeeweeException) as caught:
            ask(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$")
        assert outage.is_outage(caught.value) == (code in OUTAGES), code


def test_waits_of_a_request_add_up_to_what_is_promised() -> None:
    """Each wait has its own limit; `user_me` waits for most, as does a refusal of `usage_stats`."""
    for_a_turn = for_a_connection = postgres.CONNECTION_SECONDS
    query = for_a_connection + postgres.ANSWER_SECONDS
    assert for_a_turn + query < 4, "away or frozen: the first answer is waited for, and none comes"
    look_up, hit, owner = for_a_turn + query, query, query
    assert look_up + hit + owner < 8, "slow: each answer comes just in time"


def test_many_may_start_at_once_on_an_empty_database(cluster: Cluster) -> None:
    settings = load({"DATABASE_URL": cluster.new_database()})
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(prepare_database, [settings] * 3)) == [None] * 3


@in_postgres
def test_role_that_may_create_nothing_can_start(cluster: Cluster, place: Settings) -> None:
    url, role = str(place.database_url), f"guest_{secrets.token_hex(4)}"
    Cluster.query(url, f"CREATE ROLE {role} LOGIN PASSWORD '{cluster.password}'")
    grants = "SELECT, INSERT, UPDATE, DELETE"
    Cluster.query(url, f"GRANT {grants} ON ALL TABLES IN SCHEMA public TO {role}")
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
    with pytest.raises(SettingsError) as refusal:
        prepare_database(load({"DATABASE_URL": url}))
    line = str(refusal.value)
    assert line.startswith("DATABASE_URL: PostgreSQL: ")
    assert reason in line
    assert "\n" not in line
    assert cluster.password not in line


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "EUC_JP", "UTF8"])
def test_database_of_another_encoding_stops_the_start(cluster: Cluster, encoding: str) -> None:
    """SQL_ASCII is what `initdb` takes without a locale; it would count bytes for characters."""
    options = f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
    url = cluster.new_database(options, client_encoding="LATIN1")
    if encoding != "UTF8":
        with pytest.raises(SettingsError) as refusal:
            prepare_database(load({"DATABASE_URL": url}))
        needed = f"server_encoding is {encoding}, and must be UTF8"
        assert str(refusal.value) == f"DATABASE_URL: PostgreSQL: {needed}"
    else:
        prepare_database(load({"DATABASE_URL": url}))


def test_cause_of_an_outage_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "time", clock := Clock())
    monkeypatch.setattr(outage, "_quiet_until", {})
    for cause in ["locked\nDETAIL: a value"] * 3 + ["password"]:
        outage.log_outage(OSError(cause))
        clock.now += 19
    outage.log_outage(OSError("password"))
    assert caplog.messages == [f"database unavailable: {why}" for why in ("locked", "password")]
