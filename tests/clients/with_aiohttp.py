# mypy: disable-error-code="import-not-found, import-untyped"
"""aiohttp: requests and sockets; it retries no answer, and shows no body of a refused socket."""

import asyncio
from typing import Any

import aiohttp
from script import CALLS, KEY, LIMITED, LIMITED_KEY, MESSAGES, PATHS, TIME, URL, report


async def get(session: aiohttp.ClientSession, path: str, key: str) -> Any:
    """The body of the answer."""
    while True:
        async with session.get(URL + path, headers={"X-API-Key": key}) as response:
            if response.status != 429:
                return await response.json()
        await asyncio.sleep(int(response.headers["Retry-After"]))


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        report("answers", {path: await get(session, path, KEY) for path in PATHS})
        bodies = [await get(session, LIMITED, LIMITED_KEY) for _ in range(CALLS)]
        report("limited", [body.get("timestamp") for body in bodies])
        try:
            await session.ws_connect(TIME)
        except aiohttp.WSServerHandshakeError as refused:
            report("refused", {"status": refused.status})
        async with session.ws_connect(TIME, headers={"X-API-Key": KEY}) as ws:
            report("ticks", [(await ws.receive_json())["type"] for _ in range(MESSAGES)])
            async for _ in ws:
                pass
        report("closed", ws.close_code)


asyncio.run(main())
