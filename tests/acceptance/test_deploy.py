"""What the files in deploy/ start, and what the documents tell operators to run, on one machine."""

import contextlib
import json
import re
import resource
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from helpers.documents import blocks, section
from helpers.paths import ECHO, STATUS, TEST
from helpers.postgresql import Cluster
from helpers.rawsocket import TEXT, RawSocket, form_bytes, frame
from helpers.server import (
    REPOSITORY,
    Server,
    bash,
    clean_environment,
    eventually,
    find_program,
    free_port,
    random_key,
    serve_command,
)
from models import PREFIXES

DEPLOY = REPOSITORY / "deploy"
KEYS_HOST = "keys.localhost"
FLASK = f"{sys.executable} -m flask --app {REPOSITORY}/app.py"


OPEN_BLOCK = re.compile(r"(?ms)^[ \t]*# (?:@open|location = /health).*?^[ \t]*# }\n")


def shipped(name: str, changes: dict[str, str] | None = None) -> str:
    """The text of a file in deploy/ with these parts replaced; each must be there.

    The block for a path without a key is no comment here, nor are limits.
    """
    text = OPEN_BLOCK.sub(
        lambda block: re.sub(r"(?m)^([ \t]*)# ?", r"\1", block[0]), (DEPLOY / name).read_text()
    ).replace("# limit_req", "limit_req")
    for old, new in (changes or {}).items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return text


def written(page: str, title: str) -> list[str]:
    """The commands of a section of a document."""
    return blocks("sh", section(title, (REPOSITORY / "docs" / page).read_text()))


def nginx(folder: Path, name: str, port: int, changes: dict[str, str]) -> list[str]:
    request = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
        "-subj /CN=localhost -keyout site.key -out site.pem"
    )
    subprocess.run([find_program("openssl"), *request.split()], cwd=folder, check=True)
    changes |= {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/letsencrypt/live/example.org/fullchain.pem": f"{folder}/site.pem",
        "/etc/letsencrypt/live/example.org/privkey.pem": f"{folder}/site.key",
        "/var/log/nginx": str(folder),
        "example.org": "localhost",
    }
    site = shipped(name, changes).replace("listen 80", f"listen 127.0.0.1:{free_port()}")
    site = re.sub(r"listen \[::\].*?;", "", site)  # not every machine has IPv6
    (folder / "site.conf").write_text(site)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind}; "
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # Operators may have set these for all sites; Debian and Ubuntu set `gzip on`. The gate must not
    # depend on them.
    (folder / "main.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ underscores_in_headers on; ignore_invalid_headers off; gzip on;\n"
        f"proxy_intercept_errors on; ssl_protocols TLSv1.3; {paths}include {folder}/site.conf; }}\n"
    )
    return [find_program("nginx"), "-p", str(folder), "-c", "main.conf", "-e", "stderr"]


def caddy(folder: Path, name: str, port: int, changes: dict[str, str]) -> list[str]:
    # Its own certificate, and no other port.
    options = "\tadmin off\n\tlocal_certs\n\tskip_install_trust\n"
    if name == "Caddyfile":
        options += "\tauto_https disable_redirects\n"
    # Some operators serve all names under their own, so a name in TLS may contain a key.
    others = f", https://*.localhost:{port}" if name == "gate.Caddyfile" else ""
    changes |= {
        "example.org": f"https://localhost:{port}{others}",
        "\tlog {": f"{options}\tlog {{",
    }
    if "keys.example.com" in changes:
        changes["keys.example.com"] = f"https://{KEYS_HOST}:{port}"
    (folder / "Caddyfile").write_text(shipped(name, changes))
    return [find_program("caddy"), "run", "--adapter", "caddyfile", "--config", "Caddyfile"]


@contextlib.contextmanager
def proxy(
    name: str, folder: Path, service: int, api: int = 9000, more: dict[str, str] | None = None
) -> Iterator[int]:
    """A proxy runs with this file, with more changes, in front of these ports; gives its own."""
    (folder := folder / "proxy").mkdir()
    port, changes = free_port(), (more or {}) | {"127.0.0.1:8000": f"127.0.0.1:{service}"}
    if name.startswith("gate"):
        changes |= {"127.0.0.1:9000": f"127.0.0.1:{api}", "keys.example.com": KEYS_HOST}
    command = (nginx if "nginx" in name else caddy)(folder, name, port, changes)
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment(HOME=str(folder), XDG_DATA_HOME=str(folder)),
            stdout=log,
            stderr=log,
        )
        (folder / "pid").write_text(str(process.pid))
        try:
            eventually(lambda: process.poll() or speaks_tls(port), 30, "the proxy does not start")
            assert process.poll() is None, f"edit {name}: {(folder / 'output.log').read_text()}"
            yield port
        finally:
            process.kill()
            process.wait()


def tls(port: int, source: str = "127.0.0.1", name: str = "localhost") -> RawSocket:
    """A TLS connection from this address; nobody has signed the certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
    return RawSocket(sock=context.wrap_socket(plain, server_hostname=name))


def speaks_tls(port: int) -> bool:
    """Caddy listens before it has made its certificate."""
    with contextlib.suppress(OSError), tls(port):
        return True
    return False


def logged(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("proxy/*.log"))


@pytest.mark.parametrize(
    ("name", "host", "asked"),
    [
        ("nginx.conf", "localhost", 1),
        ("Caddyfile", "localhost", 1),
        ("gate.nginx.conf", KEYS_HOST, 1),
        ("gate.Caddyfile", KEYS_HOST, 1),
        ("gate.nginx.conf", "localhost", 2),  # a pre-flight asks the API
        ("gate.Caddyfile", "localhost", 2),
    ],
)
def test_no_key_is_logged_in_whatever_form_and_whatever_fails(
    tmp_path: Path, name: str, host: str, asked: int
) -> None:
    """The service and the API are away, or the proxy may open no connection to them.

    The log says whom the proxy has asked in vain.
    """
    keys = [*map(random_key, PREFIXES)]
    ports = (free_port(), free_port())
    headers = {
        **{"Host": host, "X_API_Key": keys[0], "Cookie": keys[0], "Referer": keys[0]},
        **{"Origin": "https://a", "Access_Control_Request_Method": "PUT"},  # of a pre-flight
    }
    # The keys follow without `sk_`, whose letters may be encoded, or be capitals.
    queries = [
        *("?", "#?", "%3F", "%253f", "%3fapi%5fkey%3D", "/sk_"),
        *("/%73k_", "/s%6B_", "/SK%5F", "/%53k_", "/s%4B_", "/sk%E2%80%8B_"),
    ]
    with proxy(name, tmp_path, *ports) as port:
        for (number, query), method, key in product(enumerate(queries), ("GET", "OPTIONS"), keys):
            with tls(port, name=host) as client:
                answer = client.request(f"/{number}{query}{key[3:]}", method, **headers)
                assert answer.status in (502, 503)
        for odd in (f"-X{key}", f"-HHost:{key}.test", f"https://{key}.localhost/odd"):
            curl = [find_program("curl"), "-sk", "--connect-to", f"::127.0.0.1:{port}"]
            subprocess.run([*curl, odd, f"https://{host}/odd"], check=True)
        with tls(port, name=host) as client:
            pid = int((tmp_path / "proxy/pid").read_text())
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1))
            client.request(f"/last?api_key={key}", **headers)
        eventually(lambda: "/last" in logged(tmp_path))
    named = {
        *(f"/{number}" for number in range(len(queries))),
        *(f"127.0.0.1:{each}" for each in ports[:asked]),
    }
    assert not [each for each in named if each not in logged(tmp_path)]
    assert not [key for key in keys if key[17:].lower() in logged(tmp_path).lower()], (
        f"edit deploy/{name}: the log, also of names, in which curl has no capitals"
    )
    assert "enabling automatic HTTP" not in logged(tmp_path), "Caddy has no port 80"


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile", "gate.nginx.conf", "gate.Caddyfile"])
def test_proxy_passes_forms_sockets_and_addresses(tmp_path: Path, name: str) -> None:
    """The gate does so under the name of its pages."""
    host = KEYS_HOST if name.startswith("gate") else "localhost"
    with (
        Server(tmp_path, PROXY_HOPS="1", MAX_SOCKETS_PER_CALLER="1").start() as server,
        proxy(name, tmp_path, server.port) as port,
    ):
        with tls(port, name=host) as client:
            ours = f"Host: {host}:{port}\r\nOrigin: https://{host}:{port}".encode()
            client.send(
                form_bytes(
                    "/sign-up", username="ada", email="a@b.example", password="long enough"
                ).replace(b"Host: a", ours)
            )
            answer = client.answer()
            assert answer.status == 303, "Origin is compared with Host"
            assert "Secure" in answer.headers["Set-Cookie"], "X-Forwarded-Proto says https"
            # The file names both ends of an open connection, and one end of a closed one.
            ends = [
                client.request("/log-in", Host=host)
                and Path("/proc/net/tcp").read_text().count(f":{server.port:04X} ")
                for _ in range(20)
            ]
            assert ends[-1] - ends[0] <= 4, (
                f"edit deploy/{name}: 20 requests open more than 2 connections: {ends}"
            )
        with tls(port, name=host) as client:
            client.send(b"GET /log-in HTTP/1.0\r\n\r\n")  # as simple health checks do
            assert name != "nginx.conf" or client.answer().status == 200
        with tls(port, "127.0.0.2", host) as one, tls(port, "127.0.0.3", host) as other:
            for client in (one, other):  # each address may have one
                assert client.handshake(ECHO, {"Host": host}).status == 101
                client.send(frame(TEXT, "grüße".encode()))
                assert client.frame().json()["message"] == "grüße"
            with tls(port, "127.0.0.2", host) as again:
                spoofed = again.handshake(ECHO, {"Host": host, "X-Forwarded-For": "198.51.100.7"})
                assert spoofed.status == 429


def test_files_of_the_image_serve_and_are_healthy(tmp_path: Path) -> None:
    """The Dockerfile's ENV, CMD and health check, in a folder with the files that it copies.

    It has no other settings than the documented `docker run` gives it.
    """
    app = tmp_path / "app"
    app.mkdir()
    for name in re.findall("^!(.*)", shipped("Dockerfile.dockerignore"), re.MULTILINE):
        for source in REPOSITORY.glob(name):
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, app / source.relative_to(REPOSITORY))
    settings, health, command = re.findall(
        r"(?m)^(?:ENV|HEALTHCHECK --interval=5s CMD|CMD) (.*)", shipped("Dockerfile")
    )
    env = dict(
        pair.split("=", 1)
        for pair in [
            *("SECRET_KEY=", *shlex.split(settings)),
            *bash(
                f"{FAKES}\n{written('deploying.md', 'Docker')[0]}", tmp_path, clean_environment()
            ).splitlines(),
        ]
    )
    env["DATABASE_URL"] = env["DATABASE_URL"].replace("/data", str(tmp_path))
    start = ["env", f"--chdir={app}", sys.executable, "-m", *json.loads(command)]
    # The check must not ask a proxy of the host.
    env |= {"SCRIPT_NAME": "/demo", "http_proxy": f"http://127.0.0.1:{free_port()}"}
    check = [sys.executable, *json.loads(health)[1:]]
    with Server(tmp_path, *start, **env).start() as server:
        subprocess.run(check, env=server.env, check=True)
        assert {server.ask(f"/demo/{name}api.json").status for name in ("open", "async")} == {200}
        server.stop()
    assert subprocess.run(check, env=server.env, stderr=-3).returncode == 1


# `docker` prints the settings that it hands to a container. `sudo` changes no user. `systemd-run`
# runs a command in this folder with these settings; later ones win, as in systemd.
FAKES = """
docker() {
    while shift; do
        [ "$1" != -e ] || echo "$2" | grep = || env | grep "^$2=" || :
    done
}
sudo() { [ "$1" != -u ] || shift 2; "$@"; }
systemctl() { :; }
systemd-run() (
    while [[ $1 == -* ]]; do
        case $2 in
            WorkingDirectory=*) cd "${2#*=}";;
            Environment=*) export "${2#*=}";;
            EnvironmentFile=*) while read -r line; do export "$line"; done < "${2#*=}";;
        esac
        [ "$1" != -p ] || shift
        shift
    done
    "$@"
)"""


def test_documented_commands_make_and_restore_a_backup(tmp_path: Path) -> None:
    _, commands, _, restore = written("deploying.md", "systemd")
    alias, create, backup = commands.splitlines()
    (data := tmp_path / "data").mkdir()
    (file := tmp_path / "demo-service.env").write_text("RATE_LIMITS=free=1/day, gold=7/day\n")

    def paste(commands: str) -> str:
        ours = f"shopt -s expand_aliases\n{FAKES}\n{alias}\n{commands}"
        for written_there, here in {
            "/srv/demo-service/.venv/bin/flask": f"{sys.executable} -m flask",
            "/srv/demo-service": REPOSITORY,
            "/var/lib/demo-service": data,
            "/etc/demo-service.env": file,
        }.items():
            ours = ours.replace(written_there, str(here))
        return bash(ours, tmp_path, clean_environment())

    paste(f"{create} --password-stdin <<< 'long enough words'\n{backup}")
    assert len(list(data.glob("backup-*.db"))) == 1, "where the unit's user may write"
    assert paste("demo key create ada ci --tier gold").startswith("sk_live_")
    paste(f"demo user delete ada\n{restore}")
    assert "ada@example.com" in paste("demo user list")


def test_systemd_finds_no_mistake(tmp_path: Path) -> None:
    """And what the service may do is as restricted as it was: what is not has a cross."""
    gunicorn, unit = tmp_path / ".venv/bin/gunicorn", tmp_path / "demo-service.service"
    gunicorn.parent.mkdir(parents=True)
    gunicorn.touch(0o755)
    unit.write_text(shipped(unit.name, {"/srv/demo-service": str(tmp_path)}))
    unit.with_suffix(".socket").write_text(shipped("demo-service.socket"))
    bash(
        f"""analyze={find_program("systemd-analyze")}
        $analyze verify --man=no {unit} 2>&1 | tee found; [ ! -s found ]
        $analyze security --no-pager --offline=true --threshold=12 {unit}""",
        tmp_path,
    )


def test_restart_fails_no_request(tmp_path: Path) -> None:
    """This test plays systemd's part: it listens, and is told when the service is ready."""
    unit, notify = shipped("demo-service.service"), str(tmp_path / "notify")
    (start,) = re.findall("ExecStart=/srv/demo-service/.venv/bin/(gunicorn.*)", unit)
    server = Server(tmp_path, NOTIFY_SOCKET=notify)
    listener = socket.create_server(("127.0.0.1", server.port))
    takes_over = f"export LISTEN_FDS=1 LISTEN_PID=$$; exec {sys.executable} -m {start} 3<&0"
    server.command, server.stdin = ["bash", "-c", takes_over], listener.fileno()
    done = threading.Event()

    def ask() -> set[int]:
        return {server.ask(STATUS).status for _ in iter(done.is_set, True)}

    with (
        listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        server,
        ThreadPoolExecutor(50) as threads,
    ):
        systemd.bind(notify)
        systemd.settimeout(30)
        server.start()
        assert b"READY=1" in systemd.recv(1000)
        clients = [threads.submit(ask) for _ in range(50)]
        with RawSocket(server.port).open(ECHO) as echo:
            server.stop()
            assert echo.close_code() == 1001
        server.start()
        done.set()
        assert [client.result() for client in clients] == [{200}] * 50


def test_heroku_from_its_documented_block(tmp_path: Path, cluster: Cluster) -> None:
    """Pasted with a `heroku` that only notes the settings; what is pushed then is served."""
    (block,) = written("deploying.md", "Heroku")
    app, config = tmp_path / "app", tmp_path / "config"
    bash(
        f"""git init -q --bare heroku.git; git clone -q {REPOSITORY} clone; cd clone
        git config user.name a; git config user.email a@b
        git -C {REPOSITORY} diff --binary HEAD | git apply --allow-empty --index
        git commit -q --allow-empty -m changes
        git remote add heroku ../heroku.git
        heroku() {{ [ "$1" != config:set ] || echo "$2" >> {config}; }}
        {block}
        git clone -q -b main ../heroku.git {app}""",
        tmp_path,
    )
    assert "\npsycopg[binary,pool]" in (app / "requirements.txt").read_text()
    env = dict(line.split("=") for line in config.read_text().splitlines())
    env |= {"DYNO": "web.1", "WEB_CONCURRENCY": "2", "FORWARDED_ALLOW_IPS": "*"}
    env["DATABASE_URL"] = cluster.new_database().replace("postgresql://", "postgres://")
    env["GUNICORN_CMD_ARGS"] = "--access-logfile -"
    with Server(tmp_path, "env", f"--chdir={app}", *serve_command(), **env) as server:
        key = server.start().new_key()
        assert [server.ask(TEST, X_API_Key=key).status for _ in range(3)] == [200] * 3
        server.stop()
        assert not re.search(r"\[(WARNING|ERROR|CRITICAL)\]|Traceback|Exception", server.log())
        assert server.start().total(key) == 3


@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.postgres)], ids=["SQLite", "PostgreSQL"]
)
def test_a_backup_is_restored(request: pytest.FixtureRequest, tmp_path: Path, number: int) -> None:
    if number:
        find_program("pg_dump")
    url = {"DATABASE_URL": request.getfixturevalue("cluster").new_database()} if number else {}
    server = Server(tmp_path, **url)

    def paste(title: str) -> None:
        bash(
            written("operating.md", title)[number]
            .replace("demo.db", "service.db")
            .replace(".venv/bin/flask", FLASK),
            tmp_path / "data",
            server.env,
        )

    with server:
        key = server.start().new_key()
        paste("Backup")
        server.execute("DELETE FROM api_key")
        server.stop()
        paste("Restore")
        assert server.start().ask(TEST, X_API_Key=key).status == 200


def test_a_sqlite_file_moves_to_postgresql(tmp_path: Path, cluster: Cluster) -> None:
    find_program("psql")
    find_program("sqlite3")
    old = Server(tmp_path / "old")
    new = Server(tmp_path / "new", DATABASE_URL=cluster.new_database())
    script = "\n".join(written("growing.md", "Moving an existing file"))
    script = script.replace(".venv/bin/flask", FLASK).replace("demo.db", str(old.database))
    with old, new:
        key = old.new_key(name='an odd ", name')
        assert old.start().ask(TEST, X_API_Key=key).status == 200
        old.stop()
        bash(script, tmp_path, new.env)
        assert new.start().total(key) == 1
        assert new.sign_up("grace").status == 303
        assert new.execute('SELECT max(id) FROM "user"') == [(1001,)]
