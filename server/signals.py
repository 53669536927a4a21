"""Which signals stop the service, and which are ignored; what a stop does is in lifecycle.py.

This module is imported before gevent's patches, and before the version of Python is checked.
"""

import os
import signal
from typing import Any

STOPS = (signal.SIGINT, signal.SIGQUIT)  # these stop the service as SIGTERM does
IGNORES_HANGUP = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # it was started with nohup


def end_silently() -> None:
    """While a process starts, Ctrl-C ends it without a traceback, even if it was held back."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def hold_back(arbiter: object = None) -> None:
    """Hold signals back until `let_through` is called, also by the program that is started next.

    A Python that is just starting would print a traceback, and gunicorn forget the signal. One that
    is just ending would be killed by it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS, signal.SIGTERM, signal.SIGHUP})


def let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def handle_in_master(serves_alone: bool) -> None:
    """Replace gunicorn's handlers, which stop workers at once, or kill them after two seconds.

    With SQLite, the master `serves_alone`: no other process may use the same file.
    """
    for number in STOPS:
        signal.signal(number, terminate)
    if serves_alone:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if IGNORES_HANGUP else terminate)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it would start a second master
    let_through()  # what has come during the start


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def handle_in_worker(stop: Any) -> None:
    """A terminal sends Ctrl-C and a hangup to all processes; the master decides on a hangup."""
    for number in STOPS:
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
