"""Stored rows, as another process sees and changes them: nothing is forgotten in this one."""

import re
from contextlib import suppress

from peewee import ForeignKeyField

import models
from accounts import api_keys, users
from models import HOUR, ApiKey, HourlyUsage

HIDDEN = re.compile(r"HIDDEN|777,?[78]\d\d")  # also if requests of others are added


def row(key: str) -> ApiKey:
    with models.db.connection_context():
        found: ApiKey = ApiKey.get_by_id(key[8:16])
    return found


def change(key: str, **columns: object) -> bool:
    with models.db.connection_context(), suppress(models.Changed):
        api_keys.change_key(key[8:16], **columns)
        return True
    return False


def count() -> int:
    with models.db.connection_context():
        return int(ApiKey.select().count())


def add_hidden_user() -> None:
    """Store a user with a row in each table; what others see must not match HIDDEN."""
    user = users.create("HIDDEN", "HIDDEN@example.com", "long enough")
    hour = models.now() // HOUR * HOUR
    key, _ = api_keys.create_key(
        user,
        "HIDDEN",
        created_at=0,
        last_used_at=hour,
        total=777_777,
        reset=hour + HOUR,
        used=777_777,
    )
    with models.db.connection_context():
        HourlyUsage.create(hour=hour, key_id=key.id, requests=777_777)
        for table in set(models.TABLES) - {models.User, ApiKey, HourlyUsage}:
            table.create(
                **{
                    field.name: user if isinstance(field, ForeignKeyField) else "HIDDEN"
                    for field in table._meta.sorted_fields
                    if not (field.null or field.primary_key) and field.default is None
                }
            )
