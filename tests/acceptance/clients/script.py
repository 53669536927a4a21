"""What every Python script in this folder shares: where to ask, and how to report.

A script runs each step that its client can do, and prints one line of JSON for each:

- `answers`: the body at each path.
- `limited`: the timestamp in each response to a key of one request per second.
- `refused`: what the client can see of a refused socket.
- `ticks`: the types of the first messages of the time socket.
- `closed`: the close code when the server stops.
"""

import json
import os

URL, KEY, LIMITED_KEY = (os.environ[name] for name in ("URL", "KEY", "LIMITED_KEY"))
API = "/api/v1"
NAMES = ("demo/year", "status", "protected/test", "user/me", "usage/stats")
PATHS = [f"{API}/{name}" for name in NAMES]
LIMITED = f"{API}/protected/test"
CALLS = 3  # with the limited key
TIME = f"ws{URL.removeprefix('http')}{API}/ws/time"
MESSAGES = 4  # one greeting and three seconds


def report(step: str, value: object) -> None:
    """Tell the test what the client saw."""
    print(json.dumps({step: value}), flush=True)
