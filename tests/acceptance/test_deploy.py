"""What the files in deploy/ and the platforms of docs/deploying.md start, on one machine."""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paths import ECHO, STATUS, TEST, TIME
from postgresql import Cluster
from rawsocket import TEXT, RawSocket, form_bytes, frame
from serving import (
    REPOSITORY,
    Server,
    bash,
    clean_environment,
    eventually,
    free_port,
    listens,
    serve_command,
    working_tree,
)
from settings import load

DEPLOY = REPOSITORY / "deploy"
DEPLOYING = (REPOSITORY / "docs/deploying.md").read_text()
UPSTREAM = "127.0.0.1:8000"  # where both proxies expect the service
PROXIES = ["nginx", "caddy"]
ON_POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)


def need(*programs: str) -> None:
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")


def shipped(name: str, changes: dict[str, str]) -> str:
    """The text of a file in deploy/ with these parts replaced; each must be there."""
    text = (DEPLOY / name).read_text()
    for old, new in changes.items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return text


def nginx(folder: Path, port: int, changes: dict[str, str]) -> list[str]:
    need("nginx", "openssl")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-keyout", "site.key", "-out", "site.pem"]
    subprocess.run(["openssl", "req", "-x509", *key, *names], cwd=folder, check=True)
    changes |= {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "listen 80": f"listen 127.0.0.1:{free_port()}",
        "/etc/ssl/example.org": f"{folder}/site",
        "/var/log/nginx": str(folder),
        "example.org": "localhost",
    }
    (folder / "site.conf").write_text(shipped("nginx.conf", changes))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "main.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ {paths} include {folder}/site.conf; }}\n"
    )
    return ["nginx", "-p", str(folder), "-c", "main.conf", "-e", "stderr"]


def caddy(folder: Path, port: int, changes: dict[str, str]) -> list[str]:
    need("caddy")
    # Its own certificate, and no other port.
    options = "\tadmin off\n\tlocal_certs\n\tskip_install_trust\n\tauto_https disable_redirects\n"
    changes |= {"example.org": f"https://localhost:{port}", "\tlog {": f"{options}\tlog {{"}
    (folder / "Caddyfile").write_text(shipped("Caddyfile", changes))
    return ["caddy", "run", "--adapter", "caddyfile", "--config", "Caddyfile"]


@contextlib.contextmanager
def running_proxy(name: str, folder: Path, upstream: int) -> Iterator[int]:
    """nginx or Caddy with the shipped file; gives its port for TLS."""
    folder.mkdir()
    port, commands = free_port(), {"nginx": nginx, "caddy": caddy}
    command = commands[name](folder, port, {UPSTREAM: f"127.0.0.1:{upstream}"})
    env = clean_environment(HOME=str(folder), XDG_DATA_HOME=str(folder))
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: speaks_tls(port), 30, f"{name} does not start")
        yield port
    finally:
        process.kill()
        process.wait()


def tls(port: int, source: str = "127.0.0.1") -> ssl.SSLSocket:
    """A TLS connection from this address; nobody has signed the certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
    return context.wrap_socket(plain, server_hostname="localhost")


def speaks_tls(port: int) -> bool:
    """Caddy listens before it has made its certificate."""
    with contextlib.suppress(OSError), tls(port):
        return True
    return False


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """In front of the service; one echo socket per address, to see addresses."""
    folder = tmp_path_factory.mktemp("proxy")
    server = Server(folder, PROXY_HOPS="1", MAX_SOCKETS_PER_CALLER="1")
    with (
        contextlib.closing(server),
        running_proxy(request.param, folder / "run", server.port) as port,
    ):
        server.start()
        yield port


class TestProxies:
    def test_sign_up_through_a_proxy_logs_in(self, proxy: int) -> None:
        """Origin must match Host, and the cookie is Secure only if X-Forwarded-Proto arrives."""
        name, host = f"user-{secrets.token_hex(4)}", f"localhost:{proxy}"
        user = {"username": name, "email": f"{name}@example.com", "password": "x" * 10}
        ours = f"Host: {host}\r\nOrigin: https://{host}".encode()
        with RawSocket.over(tls(proxy)) as client:
            client.send(form_bytes("/sign-up", **user).replace(b"Host: a", ours))
            answer = client.answer()
        assert answer.status == 303
        assert "Secure" in answer.headers["Set-Cookie"]

    def test_sockets_pass_and_addresses_cannot_be_forged(self, proxy: int) -> None:
        """Each address may have one echo socket: the second gets one, the first no other."""
        first, second = (f"127.0.{proxy % 250}.{number}" for number in (2, 3))
        with RawSocket.over(tls(proxy, first)) as one, RawSocket.over(tls(proxy, second)) as other:
            for client in (one, other):
                client.open(ECHO).send(frame(TEXT, "grüße".encode()))
                assert client.frame().json()["message"] == "grüße"
            with RawSocket.over(tls(proxy, first)) as again:
                assert again.handshake(ECHO, {"X-Forwarded-For": "198.51.100.7"}).status == 429

    @pytest.mark.parametrize("name", PROXIES)
    def test_a_failed_request_leaves_no_key_in_a_log(self, tmp_path: Path, name: str) -> None:
        """Proxies quote failed requests; here all fail, as nothing runs behind the proxy."""
        query, header = secrets.token_hex(), secrets.token_hex()
        with running_proxy(name, tmp_path / name, free_port()) as port:
            with RawSocket.over(tls(port)) as client:
                path = f"{TIME}?api_key={query}"
                assert client.handshake(path, {"X-API-Key": header}).status == 502
            eventually(lambda: any(TIME in log.read_text() for log in tmp_path.rglob("*.log")))
        logs = "".join(path.read_text() for path in (tmp_path / name).rglob("*.log"))
        assert query not in logs
        assert header not in logs

    @pytest.mark.parametrize("line", ["nginx.conf keepalive_timeout", "Caddyfile keepalive"])
    def test_idle_connections_are_closed_by_the_proxy_first(self, line: str) -> None:
        """Or a request that arrives just then would get a 502."""
        file, option = line.split()
        (seconds,) = re.findall(rf"^\s+{option} (\d+)s", shipped(file, {}), re.MULTILINE)
        env = clean_environment(PROXY_HOPS="1", SECRET_KEY=secrets.token_hex())
        command = [*serve_command(), "--print-config"]
        config = subprocess.check_output(command, cwd=REPOSITORY, env=env, text=True)
        (of_the_service,) = re.findall(r"^keepalive +=? *(\d+)", config, re.MULTILINE)
        assert int(seconds) + 5 <= int(of_the_service)


def dockerfile(instruction: str) -> str:
    """What follows this instruction, which must be there once."""
    (rest,) = re.findall(rf"^{instruction} (.*)", shipped("Dockerfile", {}), re.MULTILINE)
    return str(rest)


def healthy(port: int) -> bool:
    _, *arguments = json.loads(dockerfile("HEALTHCHECK --interval=5s CMD"))
    env = clean_environment(PORT=str(port))
    return not subprocess.run([sys.executable, *arguments], env=env, capture_output=True).returncode


# In new namespaces; $1 is the folder that stays writable, the rest is the command.
READ_ONLY = """
data=$1; shift
mount --bind "$data" "$data"
while read -r _ folder _; do
    case $folder in /dev|/dev/*|/proc|/proc/*|/sys|/sys/*|"$data") continue;; esac
    mount -o remount,bind,ro "$folder" || exit 77
done < /proc/self/mounts
if touch written /tmp/written 2>/dev/null; then exit 77; fi
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""


class TestImage:
    def test_image_run_read_only_serves_and_stops(self, tmp_path: Path) -> None:
        """As `docker run --read-only --cap-drop ALL`: the Dockerfile's files, ENV, and CMD."""
        app, data = tmp_path / "app", tmp_path / "data"
        app.mkdir()
        data.mkdir()
        nothing, *listed = shipped("Dockerfile.dockerignore", {}).splitlines()[1:]
        assert nothing == "*", "only what is listed gets into the image"
        assert {"**/.*", "**/*.db*"} <= set(listed), "and of that neither settings nor databases"
        for name in [line[1:] for line in listed if line.startswith("!")]:
            for source in REPOSITORY.glob(name):
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, app / source.relative_to(REPOSITORY))
        unshare = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        in_app = ["env", f"--chdir={app}", *unshare, "sh", "-c", READ_ONLY, "sh", str(data)]
        if subprocess.run([*in_app, "true"], capture_output=True).returncode:
            pytest.skip("no read-only root can be made here")
        env = dict(pair.split("=", 1) for pair in shlex.split(dockerfile("ENV")))
        env["DATABASE_URL"] = env["DATABASE_URL"].replace("/data", str(data))
        command = [*in_app, sys.executable, "-m", *json.loads(dockerfile("CMD"))]
        server = Server(tmp_path, *command, **env)
        with contextlib.closing(server):
            server.start()
            assert healthy(server.port)
            assert server.ask("/openapi.json").status == server.ask("/asyncapi.json").status == 200
            os.kill(server.worker_pids[0], signal.SIGTERM)
            assert server.wait() == 0
        assert "Traceback" not in server.log()
        assert (data / "demo.db").is_file()
        assert not healthy(server.port)


class TestUnit:
    @pytest.mark.parametrize("check", ["verify --man=no", "security --offline=true --threshold=15"])
    def test_systemd_finds_no_mistake_and_little_exposure(self, tmp_path: Path, check: str) -> None:
        """Exposure below 1.5 of 10; a unit without any protection has 9.6."""
        need("systemd-analyze")
        gunicorn, unit = tmp_path / ".venv/bin/gunicorn", tmp_path / "demo-service.service"
        gunicorn.parent.mkdir(parents=True)
        gunicorn.touch(0o755)
        unit.write_text(shipped(unit.name, {"/srv/demo-service": str(tmp_path)}))
        command = ["systemd-analyze", *check.split(), str(unit)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout

    def test_unit_notifies_systemd_and_listens_for_the_proxy_only(self, tmp_path: Path) -> None:
        unit, port = shipped("demo-service.service", {}), free_port()
        (start,) = re.findall("ExecStart=/srv/demo-service/.venv/bin/(gunicorn .*)", unit)
        start = start.replace(UPSTREAM, f"127.0.0.1:{port}")
        command = [sys.executable, "-m", *start.split()]
        env = dict(re.findall(r"^Environment=(\w+)=(.*)", unit, re.MULTILINE))
        env["DATABASE_URL"] = env["DATABASE_URL"].replace("/var/lib/demo-service", str(tmp_path))
        server = Server(tmp_path, *command, **env, NOTIFY_SOCKET=f"{tmp_path}/notify")
        server.port = port
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(f"{tmp_path}/notify")
            systemd.settimeout(30)
            with contextlib.closing(server):
                server.start()
                assert b"READY=1" in systemd.recv(1000)
                assert not listens("127.0.0.2", port)


def test_files_give_the_service_what_it_needs() -> None:
    """A user that is not root, enough open files, and a check that needs no key."""
    image, unit = shipped("Dockerfile", {}), shipped("demo-service.service", {})
    fly, render = shipped("fly.toml", {}), shipped("render.yaml", {})
    assert re.search(rf"useradd .*--uid [1-9]\d+ {dockerfile('USER')} ", image)
    assert re.search("^User=demo-service$", unit, re.MULTILINE)
    checked = re.findall(r'^ +(?:path = "|healthCheckPath: )([^"\n]+)', fly + render, re.MULTILINE)
    assert checked == [STATUS, STATUS]
    (files,) = re.findall("^LimitNOFILE=(.*)", unit, re.MULTILINE)
    assert int(files) > 2 * load({}).max_sockets


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder below a mount point, like a platform's disk."""
    if not Path("/dev/shm").is_mount():
        pytest.skip("/dev/shm is not a mount point here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def serves_without_complaint(server: Server, how: signal.Signals = signal.SIGTERM) -> None:
    with contextlib.closing(server):
        key = server.start().new_key()
        assert [server.ask(TEST, X_API_Key=key).status for _ in range(3)] == [200] * 3
        assert server.stop(how)[0] == 0
        assert not re.search(r"\[(WARNING|ERROR|CRITICAL)\]|Traceback|Exception", server.log())
        assert server.start().total(key) == 3


class TestPlatforms:
    @pytest.mark.parametrize("database", ["disk", ON_POSTGRES])
    def test_render(self, request: pytest.FixtureRequest, tmp_path: Path, database: str) -> None:
        """With the GUNICORN_CMD_ARGS that Render sets for each Python service."""
        yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
        (web,) = yaml.safe_load(shipped("render.yaml", {}))["services"]
        (url,) = (entry["value"] for entry in web["envVars"] if entry["key"] == "DATABASE_URL")
        assert url.startswith(f"sqlite:///{web['disk']['mountPath']}/")
        env = {"RENDER": "true", "WEB_CONCURRENCY": "1"}
        if database == "postgres":
            cluster: Cluster = request.getfixturevalue("cluster")
            env |= {"WEB_CONCURRENCY": "2", "DATABASE_URL": cluster.new_database()}
        else:
            tmp_path = request.getfixturevalue("volume")
        server = Server(tmp_path, sys.executable, "-m", web["startCommand"], **env)
        options = "--preload --access-logfile - --bind=0.0.0.0:10000"
        server.env["GUNICORN_CMD_ARGS"] = options.replace("10000", str(server.port))
        serves_without_complaint(server)

    def test_fly(self, volume: Path) -> None:
        tomllib: Any = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
        fly = tomllib.loads(shipped("fly.toml", {}))
        assert fly["env"]["DATABASE_URL"].startswith(f"sqlite:///{fly['mounts']['destination']}/")
        assert str(fly["http_service"]["internal_port"]) == dockerfile("EXPOSE")
        assert all((DEPLOY / fly["build"][name]).is_file() for name in ("dockerfile", "ignorefile"))
        assert f"-r {fly['primary_region']} " in DEPLOYING
        server = Server(volume, FLY_APP_NAME=fly["app"])
        serves_without_complaint(server, signal.Signals[fly["kill_signal"]])

    def test_heroku_from_its_documented_block(self, tmp_path: Path, cluster: Cluster) -> None:
        """Pasted with a `heroku` that only notes the settings; what is pushed then is served."""
        block = DEPLOYING.split("## Heroku")[1].split("```")[1].removeprefix("sh\n")
        app, config = tmp_path / "app", tmp_path / "config"
        script = f"""cd {tmp_path}; git init -q --bare heroku.git
            cd {working_tree(tmp_path)}; git remote add heroku ../heroku.git
            heroku() {{ [ "$1" != config:set ] || echo "$2" >> {config}; }}
            {block}
            git clone -q -b main ../heroku.git {app}"""
        bash(script, tmp_path)
        assert "\npsycopg[binary,pool]" in (app / "requirements.txt").read_text()
        env = dict(line.split("=") for line in config.read_text().splitlines())
        env |= {"DYNO": "web.1", "WEB_CONCURRENCY": "2", "FORWARDED_ALLOW_IPS": "*"}
        env["DATABASE_URL"] = cluster.new_database().replace("postgresql://", "postgres://")
        command = ["env", f"--chdir={app}", *serve_command()]
        server = Server(tmp_path, *command, GUNICORN_CMD_ARGS="--access-logfile -", **env)
        serves_without_complaint(server)


@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.postgres)], ids=["SQLite", "PostgreSQL"]
)
def test_a_backup_is_restored(request: pytest.FixtureRequest, tmp_path: Path, number: int) -> None:
    if number:
        need("pg_dump")
    url = {"DATABASE_URL": request.getfixturevalue("cluster").new_database()} if number else {}
    server = Server(tmp_path, **url)

    def paste(title: str) -> None:
        page = (REPOSITORY / "docs/operating.md").read_text().split(f"## {title}\n")[1]
        block = re.findall("```sh\n(.*?)```", page, re.DOTALL)[number]
        flask = f"{sys.executable} -m flask --app {REPOSITORY}/app.py"
        block = block.replace("demo.db", "service.db").replace(".venv/bin/flask", flask)
        bash(block, tmp_path / "data", server.env)

    with contextlib.closing(server):
        key = server.start().new_key()
        paste("Backup")
        server.execute("DELETE FROM api_key")
        server.stop()
        paste("Restore")
        assert server.start().ask(TEST, X_API_Key=key).status == 200


def test_a_sqlite_file_moves_to_postgresql(tmp_path: Path, cluster: Cluster) -> None:
    need("psql", "sqlite3")
    page = (REPOSITORY / "docs/growing.md").read_text().split("## Moving an existing file")[1]
    page = page.partition("\n## ")[0]
    blocks = (block.partition("```")[0] for block in page.split("```sh\n")[1:])
    old = Server(tmp_path / "old")
    new = Server(tmp_path / "new", DATABASE_URL=cluster.new_database())
    script = "\n".join(blocks)
    script = script.replace(".venv/bin/flask", f"{sys.executable} -m flask")
    with contextlib.closing(old), contextlib.closing(new):
        key = old.new_key(name='an odd ", name')
        assert old.start().ask(TEST, X_API_Key=key).status == 200
        old.stop()
        script = script.replace("demo.db", str(old.database))
        bash(script, REPOSITORY, new.env)
        assert new.start().total(key) == 1
        assert new.sign_up("grace").status == 303
        assert new.execute('SELECT max(id) FROM "user"') == [(1001,)]
