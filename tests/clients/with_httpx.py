# mypy: disable-error-code="import-not-found, import-untyped"
"""httpx: retries no answer by itself; a loop of five lines does."""

import time

import httpx
from script import CALLS, KEY, LIMITED, LIMITED_KEY, PATHS, URL, report

client = httpx.Client(base_url=URL)


def get(path: str, key: str) -> httpx.Response:
    while True:
        response = client.get(path, headers={"X-API-Key": key})
        if response.status_code != 429:
            return response
        time.sleep(int(response.headers["Retry-After"]))


report("answers", {path: get(path, KEY).json() for path in PATHS})
report("limited", [get(LIMITED, LIMITED_KEY).json().get("timestamp") for _ in range(CALLS)])
