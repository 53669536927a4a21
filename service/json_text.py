"""JSON as this service writes it: compact, in responses and in frames."""

import json

from flask.json.provider import DefaultJSONProvider

# The encoder is made once, because json.dumps would make one each time.
json_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class CompactJson(DefaultJSONProvider):
    """Writes what views return in the same form."""

    ensure_ascii = False
    sort_keys = False
