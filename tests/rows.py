"""Stored keys, as another process sees and changes them: nothing is forgotten in this one."""

from contextlib import suppress

import api_keys
import models
from models import ApiKey


def row(key: str) -> ApiKey:
    with models.database.connection_context():
        found: ApiKey = ApiKey.get_by_id(key[8:16])
    return found


def change(key: str, **columns: object) -> bool:
    with models.database.connection_context(), suppress(models.Changed):
        api_keys.change_key(key[8:16], **columns)
        return True
    return False


def count() -> int:
    with models.database.connection_context():
        keys: int = ApiKey.select().count()
    return keys
