"""Compare requests to an API through Caddy and nginx, with the gate of deploy/ and without.

The API is a server of nginx that answers 200. Where nginx only looks the key up in a `map`, nothing
is counted: that is the least that any gate costs. Processor time is that of all processes but wrk's
and the API's. TLS is left out, because it is the same for all.
"""

import re
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from servers import HERE, Case, Server, arguments, in_turns

DEPLOY = HERE.parent / "deploy"
TLS = r"\n *(ssl_certificate|access_log|error_log).*"
PROXY = "location / {{ {more} proxy_pass http://127.0.0.1:{api}; }}"
NGINX = "daemon off; master_process off; pid pid; events {{}} http {{ access_log off; {http} }}"
CADDY = "{{\n admin off\n auto_https off\n}}\nhttp://:{port} {{\n reverse_proxy 127.0.0.1:{api}\n}}"


class Proxy(Server):
    """nginx or Caddy with this configuration; its processor time includes that of the service."""

    def __init__(
        self, folder: Path, program: str, text: str, service: Server | None = None
    ) -> None:
        command = {
            "nginx": ["nginx", "-p", str(folder), "-e", "stderr", "-c", "config"],
            "caddy": ["caddy", "run", "--adapter", "caddyfile", "--config", f"{folder}/config"],
        }
        super().__init__(folder, *command[program], checkout=HERE, XDG_DATA_HOME=str(folder))
        self.service = service
        (folder / "config").write_text(text.replace("PORT", str(self.port)))

    def processor_seconds(self) -> float:
        service = self.service.processor_seconds() if self.service else 0
        return super().processor_seconds() + service


def gate(name: str, service: int, api: int) -> str:
    """The file in deploy/, for one plain port, and without logs."""
    text = (DEPLOY / name).read_text().replace("127.0.0.1:8000", f"127.0.0.1:{service}")
    text = text.replace("127.0.0.1:9000", f"127.0.0.1:{api}")
    if name == "gate.Caddyfile":
        text = text.replace("{\n", "{\n\tadmin off\n\tauto_https off\n", 1)
        return text.replace("example.org", "http://:PORT").replace(
            "keys.example.com", "http://keys"
        )
    http = re.sub(TLS, "", text).replace("443 ssl", "PORT").replace("example.org", "localhost")
    return NGINX.format(http=http)


def main() -> None:
    options = arguments(__doc__, rounds=8)
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)

        def start(title: str, program: str, text: str, server: Server | None = None) -> Server:
            return stack.enter_context(Proxy(folder / title, program, text, server))

        answer = "server {{ listen PORT; location / {{ return 200 ok; }} }}"
        api = start("api", "nginx", NGINX.format(http=answer.format())).port
        service = stack.enter_context(
            Server(folder / "service", checkout=HERE.parent, PROXY_HOPS="1")
        )
        keys = service.make_keys(1)
        known = (
            f"map_hash_bucket_size 128; map $http_x_api_key $known {{ {keys[0]} 1; default 0; }}"
        )
        check = "if ($known = 0) { return 401; }"

        def plain(http: str, more: str) -> str:
            site = f"server {{ listen PORT; {PROXY.format(api=api, more=more)} }}"
            return NGINX.format(http=f"{http} {site}")

        texts: dict[str, tuple[str, str, Server | None]] = {
            "nginx": ("nginx", plain("", ""), None),
            "nginx, map of keys": ("nginx", plain(known, check), None),
            "nginx, gate": ("nginx", gate("gate.nginx.conf", service.port, api), service),
            "Caddy": ("caddy", CADDY.format(port="PORT", api=api), None),
            "Caddy, gate": ("caddy", gate("gate.Caddyfile", service.port, api), service),
        }
        cases = [Case("the service alone", service, keys)]
        for title, (program, text, server) in texts.items():
            cases.append(Case(title, start(title, program, text, server), keys, of=cases[0]))
        in_turns(cases, options.rounds)


if __name__ == "__main__":
    main()
