"""Compare /api/v1/protected/test with /demo/year, /user/me, the console, many keys, and rivals.

A ratio compares the processor time of a request with that of /protected/test with one key. What
/demo/year takes less, for the same request, is what a key, a count, and the limit's headers cost.
The Flask view runs under plain gunicorn, without what makes the service's own gunicorn faster.
Besides, it prints how long `python app.py` takes until the first answer, and its worker's memory.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from servers import GUNICORN, HERE, Case, Server, arguments, checkouts, in_turns

from helpers.paths import ME, YEAR

DEMO = (sys.executable, "app.py")
GEVENT = (*GUNICORN, "-k", "gevent")
UVICORN = (sys.executable, "-m", "uvicorn", "--no-access-log", "--log-level", "warning")
RIVALS = {
    "one-line Flask view": [*GEVENT, "plain:app"],
    "FastAPI + slowapi + sqlite3": [*UVICORN, "--port", "{port}", "fastapi_slowapi:app"],
    "Flask-Limiter + peewee": [*GEVENT, "flask_limiter_peewee:app"],
}


def measure_start(checkout: Path) -> tuple[float, float]:
    """Seconds and MiB."""
    with TemporaryDirectory() as folder, Server(Path(folder), *DEMO, checkout=checkout) as server:
        return server.start_seconds, server.resident_mib()


def main() -> None:
    options = arguments(__doc__, rounds=12, stored=1_000_000, used=20_000)
    cases: list[Case] = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for name, checkout in checkouts(options).items():
            seconds, mib = min(measure_start(checkout) for _ in range(5))
            print(
                f"{name}: {seconds:.2f} s from `python app.py` to the first answer, {mib:.1f} MiB"
            )
            one, many = (Server(Path(folder, name, n), checkout=checkout) for n in ("one", "many"))
            keys, used = one.make_keys(1), many.make_keys(options.stored)[: options.used]
            single = Case(name, stack.enter_context(one), keys, of=cases[0] if cases else None)
            large = Case(f"{name}, many keys", stack.enter_context(many), used, of=single)
            rate = large.measure()[1]
            large.measure(1 + 1.2 * options.used / rate)  # until all used keys have been seen
            cases += [single, large]
            for path in (YEAR, ME, "/"):
                cases.append(Case(f"{name}, {path}", one, keys, of=single, path=path))
        database = f"{cases[0].server.folder}/service.db"
        for name, command in RIVALS.items():
            server = Server(Path(folder, name), *command, checkout=HERE, DATABASE=database)
            cases.append(Case(name, stack.enter_context(server), cases[0].keys, of=cases[0]))
        in_turns(cases, options.rounds)


if __name__ == "__main__":
    main()
