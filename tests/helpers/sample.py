"""Endpoints that the service lacks, with their description: what is added later may be like these.

A body that is stored in a table of its own, a list, a row that is deleted, a stream.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
from flask import Blueprint, Flask, Response, current_app, request, stream_with_context
from flask.typing import ResponseReturnValue
from peewee import BigIntegerField, CharField, ForeignKeyField, IntegerField, IntegrityError

import auth
import describe
from auth import require_api_key
from helpers.described import operations
from helpers.documents import API
from models import TABLES, ApiKey, NumberField, Table, User, db, now
from ratelimit import Allowance
from service.responses import Problem
from service.timestamps import date_time
from storage.database import transaction
from ws.open_sockets import open_sockets_of

bp = Blueprint("sample", __name__, url_prefix="/api/v1/sample")


class SampleNote(Table):
    id = NumberField()
    user = ForeignKeyField(User, backref="sample_notes")
    text = CharField(max_length=100)
    stars = IntegerField(null=True)
    created_at = BigIntegerField(default=now)


SampleNote._meta.remove_ref(
    SampleNote.user
)  # or deleting a user would look for the table in every test


@contextmanager
def added(app: Flask) -> Iterator[None]:
    """Meanwhile, the sample's endpoints and its table are some of the service's."""
    app.register_blueprint(bp)
    described: dict[str, Any] = app.jinja_env.globals
    described["openapi"]["paths"] |= PATHS
    SampleNote._meta.add_ref(SampleNote.user)
    TABLES.append(SampleNote)
    with db.connection_context():
        db.create_tables([SampleNote])
    yield
    TABLES.remove(SampleNote)
    SampleNote._meta.remove_ref(SampleNote.user)


@bp.post("/notes")
@require_api_key
def create_note(key: ApiKey, allowance: Allowance) -> ResponseReturnValue:
    body = request.get_json(silent=True)
    text = body.get("text") if isinstance(body, dict) else None
    if not isinstance(text, str) or not 1 <= len(text) <= 100 or not text.isprintable():
        raise Problem(400, "invalid_text", "text must be 1 to 100 printable characters.")
    try:
        with transaction():
            note = SampleNote.create(user=key.user_id, text=text)
    except IntegrityError:  # the user was deleted after the key was found
        raise auth.invalid_key() from None
    return as_json(note), 201


@bp.get("/notes")
@require_api_key
def list_notes(key: ApiKey, allowance: Allowance) -> ResponseReturnValue:
    limit, before = request.args.get("limit", "20"), request.args.get("before", "9" * 18)
    if not re.fullmatch("([1-9]|[1-4][0-9]|50),[1-9][0-9]{0,17}", f"{limit},{before}"):
        raise Problem(400, "invalid_limit", "limit must be 1 to 50, and before an ID.")
    with db.connection_context():
        latest = [
            *SampleNote.select()
            .where(SampleNote.user == key.user_id, SampleNote.id < int(before))
            .order_by(SampleNote.id.desc())
            .limit(int(limit))
        ]
        return {
            "notes": [as_json(note) for note in latest],
            "next_before": latest[-1].id if len(latest) == int(limit) else None,
        }


@bp.delete("/notes/<int:note_id>")
@require_api_key
def delete_note(key: ApiKey, allowance: Allowance, note_id: int) -> ResponseReturnValue:
    with transaction():
        is_own = (SampleNote.id == note_id) & (SampleNote.user == key.user_id)
        if note_id >= 2**63 or not SampleNote.delete().where(is_own).execute():
            raise Problem(404)
    return "", 204


@bp.get("/ticks")
@require_api_key
def ticks(key: ApiKey, allowance: Allowance) -> ResponseReturnValue:
    """A part each second, until the key has ended, or the service is stopping."""

    def parts() -> Iterator[str]:
        sockets = open_sockets_of(current_app)
        while not sockets.is_stopping and auth.find_key(request.headers["X-API-Key"]):
            yield f"data: {now()}\n\n"
            gevent.sleep(0.5)

    return Response(stream_with_context(parts()), mimetype="text/event-stream")


def as_json(note: SampleNote) -> dict[str, object]:
    return {
        "id": note.id,
        "text": note.text,
        "stars": note.stars,
        "created_at": date_time(note.created_at),
    }


ENTRIES = json.loads(Path(__file__).with_suffix(".json").read_text())
CODES = [row for entry in ENTRIES.values() for row in entry.get("codes", ())]
alone = Flask(__name__)
alone.register_blueprint(bp)
PATHS = describe.paths_of(alone, ENTRIES, API["components"]["responses"])
OPERATIONS = [*operations(API | {"paths": PATHS, "x-codes": API["x-codes"] + CODES})]
