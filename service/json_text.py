"""JSON as this service writes it: compact, in responses and in frames."""

import json
from typing import Any

from flask.json.provider import DefaultJSONProvider

# Dates and UUIDs are written as Flask writes them. The encoder is made once, because json.dumps
# would make one each time.
json_text = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=DefaultJSONProvider.default
).encode


class CompactJson(DefaultJSONProvider):
    """Writes what views return in the same form; takes no options.

    It reads JSON that is nested too deeply as malformed JSON, which a view expects.
    """

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return json_text(obj)

    def loads(self, s: str | bytes, **kwargs: Any) -> Any:
        try:
            return super().loads(s, **kwargs)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
