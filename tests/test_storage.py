"""Both stores: keys found, counts saved, old rows deleted. The second needs `pytest --postgres`."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import gevent
import peewee
import pytest
from werkzeug.exceptions import TooManyRequests

import accounts
import auth
import models
from models import DAY, HOUR, ApiKey, HourlyUsage, User
from ratelimit import Allowance, Limiter, Quota, Usage
from serving import patience, writing
from settings import Settings, SettingsError, load
from storage import Store, outage
from storage.database import create_tables, open_database, open_store
from storage.outage import Outage

LONG = Quota("long", 5, 10**9)  # no window turns during a test
NewId = Callable[..., str]
END = (int(time.time()) // LONG.seconds + 1) * LONG.seconds


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    """Each database in turn, with empty tables."""
    if request.param == "postgres":
        url = request.getfixturevalue("cluster").new_database()
    else:
        url = f"sqlite:///{tmp_path}/test.db"
    settings = load({"DATABASE_URL": url})
    create_tables(settings)
    open_database(settings, patience=10)
    yield settings
    models.database.close_all()


in_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


@pytest.fixture
def store(place: Settings) -> Iterator[Store]:
    opened = open_store(place)
    yield opened
    opened.close()


@pytest.fixture
def new_id(place: Settings) -> Callable[..., str]:
    """Makes keys of a user with these columns; returns the id."""
    with models.database.connection_context():
        grace = User.create(username="grace", email="grace@example.com", password_hash="")

    def create(**columns: object) -> str:
        key_id: str = auth.create_key(grace, "ci", "production")[0].id
        with models.database.connection_context():
            if columns:
                ApiKey.update(**columns).where(ApiKey.id == key_id).execute()
        return key_id

    return create


def key_of(store: Store, key_id: str) -> ApiKey:
    store.forget()
    found = store.find(key_id)
    assert found
    return found


def save(store: Store) -> None:
    """Save, as soon as the thread that makes a checkpoint lets it."""
    while True:
        try:
            return store.save()
        except peewee.OperationalError:
            gevent.sleep(0.01)


def remaining(allowance: Allowance | None) -> int | None:
    assert allowance
    return allowance.remaining if allowance.accepted else None


def hours() -> list[tuple[int, str, int]]:
    with models.database.connection_context():
        rows = HourlyUsage.select(HourlyUsage.hour, HourlyUsage.key_id, HourlyUsage.requests)
        return sorted(rows.tuples())


def test_start_waits_for_nobody_who_is_writing(place: Settings, new_id: NewId) -> None:
    new_id()
    with writing(str(place.database_url), "UPDATE api_key SET name = 'new'"):
        started = time.monotonic()
        create_tables(place)
        assert time.monotonic() - started < patience(2)
    open_database(place)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_column_without_default_is_refused(
    place: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApiKey.name, "column_name", "new")
    with pytest.raises(SettingsError, match=r"^models.py: <CharField: ApiKey.name> must have"):
        create_tables(place)
    open_database(place)


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
    store: Store, new_id: NewId, stored: Usage, granted: list[int | None], after: Usage
) -> None:
    key = key_of(store, new_id(**stored._asdict()))
    assert [remaining(store.hit(key.id, LONG)) for _ in range(2)] == granted
    save(store)
    assert key_of(store, key.id).usage == after

    limiter = Limiter()
    assert [remaining(limiter.hit(key.id, LONG, stored)) for _ in range(2)] == granted
    assert stored.plus(limiter.counted.get(key.id, Usage())) == after


def test_what_is_left_is_told_without_counting(store: Store, new_id: NewId) -> None:
    key = key_of(store, new_id(**Usage(7, END, 3)._asdict()))
    for _ in range(2):
        left = store.left(key, LONG)
        assert left._replace(seconds_left=0) == (LONG, True, 2, END, 0, 7)


def test_store_model_and_condition_agree_which_keys_have_ended(store: Store, new_id: NewId) -> None:
    live = {new_id(), new_id(expires_at=models.now() + 60), new_id(rotated_at=1)}
    ended = {new_id(expires_at=models.now()), new_id(revoked_at=1), "deleted!"}
    assert store.ended(live | ended) == ended
    with models.database.connection_context():
        keys = list(ApiKey.select())
        assert {key.id for key in keys if not key.has_ended()} == live
        assert {key.id for key in ApiKey.select().where(ApiKey.live())} == live


def test_old_keys_and_old_hours_are_deleted(store: Store, new_id: NewId) -> None:
    """Keys 30 days after they have ended, hours after a day."""
    long_ago, lately = models.now() - 30 * DAY - 60, models.now() - 30 * DAY + 60
    kept = [
        new_id(created_at=0, last_used_at=1),
        new_id(revoked_at=lately),
        new_id(rotated_at=long_ago, expires_at=lately),
    ]
    gone = [new_id(revoked_at=long_ago), new_id(expires_at=long_ago)]
    this = models.now() // HOUR * HOUR
    with models.database.connection_context():
        for age in (0, 24, 26):
            HourlyUsage.create(hour=this - age * HOUR, key_id="a" * 8, requests=1)
    save(store)
    assert [key_id for key_id in kept + gone if store.find(key_id)] == kept
    assert [(this - hour) // HOUR for hour, _, _ in hours()] == [24, 0]


def test_each_save_deletes_more_old_hours_than_a_million_keys_make_between_two(
    store: Store,
) -> None:
    """Of 7200 saves an hour, 139 rows each; but not so many at once that others wait."""
    rows = [{"hour": 0, "key_id": str(number), "requests": 1} for number in range(2000)]
    with models.database.connection_context():
        HourlyUsage.insert_many(rows).execute()
    for _ in range(2):
        before = len(hours())
        save(store)
        assert 139 < before - len(hours()) <= 1000


def test_save_of_nothing_needs_no_lock(store: Store, place: Settings) -> None:
    with writing(str(place.database_url), "UPDATE api_key SET name = 'new'"):
        store.save()


def rotated(key: ApiKey) -> bool:
    try:
        return bool(auth.rotate_key(key, per_hour=3))
    except (accounts.Invalid, TooManyRequests):
        return False


def test_of_rotations_at_once_one_makes_a_successor(place: Settings, new_id: NewId) -> None:
    """All have read the key before the first of them changes it."""
    with models.database.connection_context():
        key = ApiKey.get_by_id(new_id())
    with ThreadPoolExecutor(4) as threads:  # with SQLite, each transaction runs without a break
        run = map if place.sqlite else threads.map
        assert sorted(run(rotated, [key] * 4)) == [False, False, False, True]
    with models.database.connection_context():
        assert ApiKey.select().count() == 2


@pytest.mark.parametrize("place", ["postgres"], indirect=True)  # which lets others work meanwhile
def test_two_rotations_at_once_do_not_both_make_the_last_key_of_the_hour(new_id: NewId) -> None:
    with models.database.connection_context(), ThreadPoolExecutor(1) as thread:
        first, second = (ApiKey.get_by_id(new_id()) for _ in range(2))
        with models.database.atomic():
            assert rotated(first)
            other = thread.submit(rotated, second)
            wait([other], timeout=0.5)  # it has to wait for the end of this transaction
        assert not other.result()


@pytest.fixture
def other(place: Settings) -> Iterator[sqlite3.Connection]:
    """Another program's connection to the same file."""
    with closing(sqlite3.connect(place.database_url, isolation_level=None)) as connection:
        yield connection


@contextmanager
def locked(connection: sqlite3.Connection) -> Iterator[None]:
    """For a while, another program writes."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")


def saved(connection: sqlite3.Connection) -> list[tuple[int, int | None]]:
    """The total of each key, and that of its hours."""
    query = "SELECT total, (SELECT sum(requests) FROM hourly_usage WHERE key_id = id) FROM api_key"
    return connection.execute(query).fetchall()


@in_sqlite
def test_half_a_save_saves_nothing(store: Store, new_id: NewId, other: sqlite3.Connection) -> None:
    store.hit(new_id(), LONG)
    other.execute("ALTER TABLE hourly_usage RENAME COLUMN requests TO away")
    with pytest.raises(peewee.OperationalError):
        store.save()
    other.execute("ALTER TABLE hourly_usage RENAME COLUMN away TO requests")
    assert saved(other) == [(0, None)]
    save(store)
    assert saved(other) == [(1, 1)]


@in_sqlite
def test_usage_changed_by_hand_stays(
    store: Store, new_id: NewId, other: sqlite3.Connection
) -> None:
    key_id = new_id()
    store.hit(key_id, LONG)
    save(store)
    store.hit(key_id, LONG)
    other.execute("UPDATE api_key SET used = 3, total = 500")
    save(store)
    assert key_of(store, key_id).usage == Usage(501, END, 4)


def test_outage_is_logged_when_it_begins_when_its_cause_changes_and_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, seen = SimpleNamespace(now=1000.0), Outage()
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: clock.now))
    seen.over()
    for cause in ["locked\nDETAIL: a value"] * 3 + ["password", "locked"] * 17:
        seen.note(OSError(cause))  # some requests fail, some do not
        clock.now += outage.QUIET_SECONDS
        seen.over()
    # Again for another cause, but once a minute at most.
    assert caplog.messages == [f"database unavailable: {why}" for why in ("locked", "password")]
    clock.now += 0.1
    seen.over()
    seen.over()
    assert caplog.messages[2:] == ["database available again"]
    seen.note(OSError("locked"))
    assert caplog.messages[3:] == ["database unavailable: locked"]
