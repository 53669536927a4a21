"""The protected endpoint with Flask-Limiter and peewee, as their documentation shows them."""

import os
from datetime import UTC, datetime
from hashlib import sha256

import peewee
from flask import Flask, abort, request
from flask_limiter import Limiter

database = peewee.SqliteDatabase(os.environ["DATABASE"], pragmas={"journal_mode": "wal"})
app = Flask(__name__)
limiter = Limiter(
    lambda: request.headers.get("X-API-Key", ""),
    app=app,
    storage_uri="memory://",
    headers_enabled=True,
)


class ApiKey(peewee.Model):
    id = peewee.CharField(primary_key=True)
    name = peewee.CharField()
    type = peewee.CharField()
    tier = peewee.CharField()
    digest = peewee.CharField()

    class Meta:
        database = database
        table_name = "api_key"


@app.get("/api/v1/protected/test")
@limiter.limit("1000000000/day")
@database.connection_context()
def test() -> dict[str, object]:
    presented = request.headers.get("X-API-Key", "")
    digest = sha256(presented.encode()).hexdigest()
    key = ApiKey.get_or_none(ApiKey.id == presented[8:16], ApiKey.digest == digest)
    if not key:
        abort(401)
    return {
        "success": True,
        "message": "Your API key is valid.",
        "api_key_name": key.name,
        "api_key_type": key.type,
        "rate_limit_tier": key.tier,
        "timestamp": datetime.now(UTC).isoformat(),
    }
