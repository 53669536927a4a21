"""What the service prints: gunicorn's log and its own, without API keys, and without waiting."""

import io
import logging
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from select import PIPE_BUF, POLLOUT
from typing import Any, TextIO

from gevent.monkey import get_original
from gunicorn.glogging import Logger

from models import PREFIXES

# An API key, and everything after a percent escape, because that may be an encoded key. The second
# alternative finds the end of a key by its length, whatever is in its prefix, such as an invisible
# character.
STARTS = "|".join([*PREFIXES.values(), "api_key=", "%[0-9a-f]{2}"])
SECRET = re.compile(rf"({STARTS})[^\s&'\"]+|(?<![0-9a-z])[0-9a-z]{{38,}}", re.IGNORECASE | re.ASCII)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# gevent's own would let other greenlets run, even in the middle of a transaction.
poll = get_original("select", "poll")


class Output(io.TextIOWrapper):
    """Writes redacted lines to a file, pipe or terminal, and neither fails nor waits.

    What cannot be written at once is lost, because requests and stops must not depend on a full
    disk, or on a reader that has ended or pauses.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            io.FileIO(open_again(stream.fileno()), "w"), stream.encoding, "backslashreplace"
        )

    def write(self, text: str) -> int:
        data = "\n".join(map(redact, text.split("\n"))).encode(self.encoding, "backslashreplace")
        with suppress(OSError, ValueError):  # ValueError: it was closed
            poller = poll()  # for files that could not be opened again, whose `write` might wait
            poller.register(self, POLLOUT)
            while data and poller.poll(0):
                # If there is any room in a pipe, there is room for PIPE_BUF bytes.
                data = data[os.write(self.fileno(), data[:PIPE_BUF]) :]
        return len(text)


def open_again(number: int) -> int:
    """Open the same pipe or terminal without waiting.

    Other programs have the given one open, too, and would not expect O_NONBLOCK. Sockets, and pipes
    of another user, cannot be opened again.
    """
    if not stat.S_ISREG(os.fstat(number).st_mode):  # a file would get a second position
        with suppress(OSError):
            return os.open(f"/dev/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return os.dup(number)


def redact(line: str) -> str:
    """Remove control characters (one inside a key would hide it from the pattern), then keys.

    A line that is still long is cut off then, or a client could fill the disk.
    """
    return SECRET.sub(r"\1[redacted]", CONTROL.sub("", line))[:1000]


def protect_output() -> None:
    """Send everything that this process prints through an Output."""
    logging.raiseExceptions = False  # or it would print the arguments of a line that failed
    sys.stdout = sys.stdout and Output(sys.stdout)  # None if it is closed
    sys.stderr = sys.stderr and Output(sys.stderr)


class LineFormatter(logging.Formatter):
    """Writes each message as one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Remove line breaks: a client could send them to break up a key, or to forge a line."""
        return super().formatMessage(record).replace("\n", "")


class RedactingLogger(Logger):
    """gunicorn's logger, redacted, and used for the whole process."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers + self.access_log.handlers:
            handler.setFormatter(LineFormatter(self.error_fmt, self.datefmt))
        self.reopen_files()  # as an Output
        logging.root.handlers = list(self.error_log.handlers)
        # At level DEBUG, packages log password hashes and addresses.
        logging.root.setLevel(max(self.loglevel, logging.INFO))

    def reopen_files(self) -> None:
        """Open the files again, which may have been renamed.

        If a file can't be opened, the log goes on in the old one; gunicorn itself would end.
        """
        for handler in self.error_log.handlers + self.access_log.handlers:
            if isinstance(handler, logging.FileHandler):
                try:
                    with Path(handler.baseFilename).open("a") as file:
                        handler.setStream(Output(file))
                except OSError as error:
                    self.error("could not open a log file again: %s", error)
