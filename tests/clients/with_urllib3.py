# mypy: disable-error-code="import-not-found, import-untyped"
"""urllib3: its default retries wait for Retry-After; nothing has to be set."""

import urllib3
from script import CALLS, KEY, LIMITED, LIMITED_KEY, PATHS, URL, report

http = urllib3.PoolManager()


def get(path: str, key: str) -> urllib3.BaseHTTPResponse:
    return http.request("GET", URL + path, headers={"X-API-Key": key})


report("answers", {path: get(path, KEY).json() for path in PATHS})
report("limited", [get(LIMITED, LIMITED_KEY).json().get("timestamp") for _ in range(CALLS)])
