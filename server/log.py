"""The log: gunicorn's own, without API keys, and with the lines of the service."""

import logging
import re
from typing import Any

from gunicorn.glogging import Logger

from models import PREFIXES

PREFIX = "|".join(map(re.escape, PREFIXES.values()))
# An API key, and whatever follows a percent escape, because it may be an encoded key.
SECRET = re.compile(rf"({PREFIX}|api_key=|%[0-9a-f]{{2}})[^\s&'\"]+", re.IGNORECASE)
LINE_CHARACTERS = 1000  # longer lines are truncated
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class RedactingFormatter(logging.Formatter):
    """Redacts every line: gunicorn quotes request lines that it cannot parse.

    Control characters are removed before that: they might break a key, or begin a forged line in
    a message. Long lines are cut off, or a client could fill the disk with them.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines = [CONTROL.sub("", line) for line in super().format(record).split("\n")]
        return "\n".join(SECRET.sub(r"\1[redacted]", line)[:LINE_CHARACTERS] for line in lines)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """A message is one line, of which `format` removes the other control characters."""
        return super().formatMessage(record)[:LINE_CHARACTERS].replace("\n", "")


class RedactingLogger(Logger):
    """gunicorn's logger, redacted, and used for the whole process."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers + self.access_log.handlers:
            handler.setFormatter(RedactingFormatter(self.error_fmt, self.datefmt))
        logging.root.handlers = list(self.error_log.handlers)
        logging.root.setLevel(self.loglevel)
        # At level DEBUG, peewee would log password hashes and addresses.
        logging.getLogger("peewee").setLevel(logging.INFO)
