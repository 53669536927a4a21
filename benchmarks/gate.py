"""Compare requests to an API through Caddy and nginx, with the gate of deploy/ and without.

The API is a server of nginx that answers 200. Where nginx only looks the key up in a `map`, nothing
is counted: that is the least that any gate costs. Processor time is that of the proxy and of the
service, whose part comes last. The service has a core for itself, as without a proxy; with
`--core 0`, it shares that with the others. At the end comes how many connections to the service
were opened for some thousand requests.
"""

import re
import subprocess
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from servers import HERE, Case, Server, arguments, in_turns, random_key

DEPLOY = HERE.parent / "deploy"
CERTIFICATE = "req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout privkey.pem"
CADDY_OPTIONS = "admin off\nlocal_certs\nskip_install_trust\n"
PROXY = "location / {{ {more} proxy_pass http://127.0.0.1:{api}; }}"
NGINX = "daemon off; master_process off; pid pid; events {{}} http {{ access_log off; {http} }}"
CADDY = "{{\n admin off\n auto_https off\n}}\nhttp://:{port} {{\n reverse_proxy 127.0.0.1:{api}\n}}"


class Proxy(Server):
    """nginx or Caddy with this configuration."""

    def __init__(
        self, folder: Path, program: str, text: str, service: Server | None = None
    ) -> None:
        command = {
            "nginx": ["nginx", "-p", str(folder), "-e", "stderr", "-c", "config"],
            "caddy": ["caddy", "run", "--adapter", "caddyfile", "--config", f"{folder}/config"],
        }
        super().__init__(folder, *command[program], checkout=HERE, XDG_DATA_HOME=str(folder))
        self.service = service
        certificate = ["openssl", *CERTIFICATE.split(), "-out", "fullchain.pem"]
        subprocess.run(certificate, cwd=folder, check=True, capture_output=True)
        (folder / "config").write_text(text.replace("PORT", str(self.port)))


def gate(name: str, service: int, api: int, tls: bool) -> str:
    """The file in deploy/, for one port, with TLS or without."""
    text = (DEPLOY / name).read_text().replace("127.0.0.1:8000", f"127.0.0.1:{service}")
    text = text.replace("127.0.0.1:9000", f"127.0.0.1:{api}")
    if name == "gate.Caddyfile":
        site = "https://localhost:PORT" if tls else "http://:PORT"
        text = text.replace("\n{\n", f"\n{{\n{CADDY_OPTIONS}", 1)
        return text.replace("example.org", site).replace("keys.example.com", "http://keys:81")
    text = text.replace("/etc/letsencrypt/live/example.org/", "")
    text = text.replace("/var/log/nginx/", "").replace("example.org", "localhost")
    if not tls:
        text = re.sub("\nssl_certificate.*", "", text)
    return NGINX.format(http=text.replace("443 ssl http2", "PORT ssl" if tls else "PORT"))


def connections(port: int) -> set[frozenset[str]]:
    """Those to this port, also those that have ended in the last minute."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    pairs = [line.split()[1:3] for line in lines]
    return {frozenset(pair) for pair in pairs if any(end.endswith(f":{port:04X}") for end in pair)}


def main() -> None:
    options = arguments(__doc__, rounds=8, core=1)
    Proxy.cores = str(options.core)
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)

        answer = "server {{ listen PORT; location / {{ return 200 ok; }} }}"
        server = Proxy(folder / "api", "nginx", NGINX.format(http=answer.format()))
        api = stack.enter_context(server).port
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

        cases = [Case("the service alone", service, keys)]

        def measure(title: str, program: str, text: str, **how: Any) -> Server:
            server = Proxy(folder / title, program, text, service if "gate" in title else None)
            cases.append(Case(title, stack.enter_context(server), keys, of=cases[0], **how))
            return server

        measure("nginx", "nginx", plain("", ""))
        measure("nginx, map of keys", "nginx", plain(known, check))
        measure("Caddy", "caddy", CADDY.format(port="PORT", api=api))
        for name, tls in product(("gate.nginx.conf", "gate.Caddyfile"), (False, True)):
            program, title = name[5:10].lower(), f"{name}, TLS" if tls else name
            origin = "https://localhost" if tls else "http://127.0.0.1"
            server = measure(title, program, gate(name, service.port, api, tls), origin=origin)
            refused = {"origin": origin, "is_refused": True, "of": cases[-1]}
            cases.append(Case(f"{title}, refused", server, [random_key()], **refused))
        in_turns(cases, options.rounds)
        for case in cases:
            before = connections(service.port)
            case.measure()
            print(f"{case.name:44} {len(connections(service.port) - before):6} connections")


if __name__ == "__main__":
    main()
