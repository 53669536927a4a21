# mypy: disable-error-code="import-not-found, import-untyped"
"""Call the service with the package `generated`, made of openapi.json by openapi-python-client."""

import json
import os

from generated import AuthenticatedClient, Client
from generated.api.protected import get_usage

url, key = os.environ["URL"], os.environ["KEY"]
known = AuthenticatedClient(url, token=key, prefix="", auth_header_name="X-API-Key")
good = get_usage.sync_detailed(client=known).parsed
bad = get_usage.sync_detailed(client=Client(url)).parsed
print(json.dumps({"remaining": good.requests_remaining, "code": bad.code}))
