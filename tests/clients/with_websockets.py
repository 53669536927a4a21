"""websockets: a refusal has the status and the problem."""

import contextlib
import json

from script import KEY, MESSAGES, TIME, report
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

try:
    connect(TIME)
except InvalidStatus as refused:
    answer = refused.response
    code = json.loads(answer.body or b"{}").get("code")
    report("refused", {"status": answer.status_code, "code": code})

key = {"X-API-Key": KEY}
with connect(TIME, additional_headers=key, subprotocols=[Subprotocol("demo")]) as ws:
    report("subprotocol", ws.subprotocol)

with connect(TIME, additional_headers=key) as ws:
    report("ticks", [json.loads(ws.recv())["type"] for _ in range(MESSAGES)])
    with contextlib.suppress(ConnectionClosed):
        while True:
            ws.recv()
    report("closed", ws.close_code)
