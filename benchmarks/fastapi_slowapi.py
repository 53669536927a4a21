"""The protected endpoint with FastAPI and slowapi; one sqlite3 connection stays open."""

import os
import sqlite3
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded

FIND = "SELECT name, type, tier FROM api_key WHERE id = ? AND digest = ?"

database = sqlite3.connect(os.environ["DATABASE"], check_same_thread=False)
limiter = Limiter(lambda request: request.headers.get("x-api-key", ""), headers_enabled=True)
app = FastAPI()
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)


async def owner(x_api_key: Annotated[str, Header()]) -> tuple[str, str, str]:
    row = database.execute(FIND, (x_api_key[8:16], sha256(x_api_key.encode()).hexdigest()))
    if found := row.fetchone():
        return found
    raise HTTPException(401)


@app.get("/api/v1/protected/test")
@limiter.limit("1000000000/day")
async def test(
    request: Request, response: Response, key: Annotated[tuple[str, str, str], Depends(owner)]
) -> dict[str, object]:
    return {
        "success": True,
        "message": "Your API key is valid.",
        "api_key_name": key[0],
        "api_key_type": key[1],
        "rate_limit_tier": key[2],
        "timestamp": datetime.now(UTC).isoformat(),
    }
