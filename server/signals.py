"""Which signals stop the service, and which are ignored; what a stop does is in lifecycle.py."""

import os
import signal
from typing import Any

STOPS = (signal.SIGINT, signal.SIGQUIT)  # these stop the service as SIGTERM does
# Whether the service was started with nohup; read before gunicorn sets its own handler.
IGNORES_HANGUP = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def handle_in_master(serves_alone: bool) -> None:
    """Replace gunicorn's handlers, which stop workers at once, or kill them after two seconds.

    With SQLite, the master `serves_alone`: no other process may use the same file.
    """
    for number in STOPS:
        signal.signal(number, terminate)
    if serves_alone:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if IGNORES_HANGUP else terminate)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it would start a second master


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def handle_in_worker(stop: Any) -> None:
    """Stop a worker at SIGINT and SIGQUIT, too: a terminal sends these to all processes.

    A terminal that is closed sends SIGHUP to all processes; the master decides what that means.
    """
    for number in STOPS:
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
