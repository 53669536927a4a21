"""websockets: a refusal has the status and the problem."""

import json

from script import KEY, MESSAGES, TIME, report
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

try:
    connect(TIME)
except InvalidStatus as refused:
    answer = refused.response
    code = json.loads(answer.body or b"{}").get("code")
    report("refused", {"status": answer.status_code, "code": code})

with connect(TIME, additional_headers={"X-API-Key": KEY}) as ws:
    report("ticks", [json.loads(ws.recv())["type"] for _ in range(MESSAGES)])
    for _ in ws:
        pass  # until it is closed
    report("closed", ws.close_code)
