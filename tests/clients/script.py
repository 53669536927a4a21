"""What every Python script in this directory shares: where to ask, and how to report.

A script runs each step that its client can do, and prints one line of JSON for each:

- `answers`: the body at each path.
- `limited`: the timestamp in each answer to a key of one request a second; null if there is none.
- `refused`: what the client can see of a refused socket.
- `ticks`: the types of the first messages of the time socket.
- `closed`: the close code when the server stops.
"""

import json
import os

URL = os.environ["URL"]
WS_URL = "ws" + URL.removeprefix("http")
KEY = os.environ["KEY"]
LIMITED_KEY = os.environ["LIMITED_KEY"]
API = "/api/v1"
PATHS = [
    f"{API}/demo/year",
    f"{API}/status",
    f"{API}/protected/test",
    f"{API}/user/me",
    f"{API}/usage/stats",
]
LIMITED = f"{API}/protected/test"
CALLS = 3  # with the limited key
TIME = f"{WS_URL}{API}/ws/time"
MESSAGES = 4  # one greeting and three seconds


def report(step: str, value: object) -> None:
    """Tell the test what the client saw."""
    print(json.dumps({step: value}), flush=True)
