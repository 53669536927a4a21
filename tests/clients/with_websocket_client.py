# mypy: disable-error-code="import-not-found, import-untyped"
"""websocket-client: a refusal has the status and the problem."""

import json

import websocket
from script import KEY, MESSAGES, TIME, report

try:
    websocket.create_connection(TIME, timeout=10)
except websocket.WebSocketBadStatusException as refused:
    code = json.loads(refused.resp_body or b"{}").get("code")
    report("refused", {"status": refused.status_code, "code": code})

ws = websocket.create_connection(TIME, timeout=10, header={"X-API-Key": KEY})
report("ticks", [json.loads(ws.recv())["type"] for _ in range(MESSAGES)])
opcode, data = ws.recv_data()
while opcode != websocket.ABNF.OPCODE_CLOSE:
    opcode, data = ws.recv_data()
report("closed", int.from_bytes(data[:2], "big"))
