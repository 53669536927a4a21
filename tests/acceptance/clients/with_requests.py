# mypy: disable-error-code="import-not-found, import-untyped"
"""requests: retries nothing by itself, but takes urllib3's Retry, which waits for Retry-After."""

import requests
from requests.adapters import HTTPAdapter
from script import CALLS, KEY, LIMITED, LIMITED_KEY, PATHS, URL, report
from urllib3 import Retry

session = requests.Session()
session.mount("http://", HTTPAdapter(max_retries=Retry(3)))


def get(path: str, key: str) -> requests.Response:
    return session.get(URL + path, headers={"X-API-Key": key}, timeout=10)


report("answers", {path: get(path, KEY).json() for path in PATHS})
report("limited", [get(LIMITED, LIMITED_KEY).json().get("timestamp") for _ in range(CALLS)])
