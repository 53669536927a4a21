"""The files in deploy/, run as shipped but for names, paths and ports.

Not run here: Docker, Render, Fly and systemd itself. Their files are parsed and compared with the
service; what they would start is started without them.
"""

import contextlib
import fnmatch
import http.client
import json
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import serving
from conftest import StartServer
from rawsocket import RawSocket, close_frame, frame
from serving import REPOSITORY, Server, clean_environment, eventually, listens, serve_command

DEPLOY = REPOSITORY / "deploy"
ECHO, TIME, STATUS = "/api/v1/ws/echo", "/api/v1/ws/time", "/api/v1/status"
TEXT = 1
UPSTREAM = "127.0.0.1:8000"  # where both proxies expect the service
UNIT_FOLDER = "/srv/demo-service"
PROXIES = ["nginx", "caddy"]


def quiet_port() -> int:
    """A free port below 32768: above, the kernel may give it to a client at any moment."""
    for port in random.sample(range(20_000, 32_768), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@pytest.fixture(autouse=True, scope="module")
def quiet_ports() -> Iterator[None]:
    """Let the servers of these tests choose quiet ports, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "free_port", quiet_port)
        yield


class Program:
    """A program that serves a port, with its log; `close` leaves nothing of it running."""

    def __init__(
        self, command: list[str], port: int, env: dict[str, str], cwd: Path, log_file: Path
    ) -> None:
        self.port, self._log = port, log_file
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_port(self) -> "Program":
        try:
            eventually(self._listens, 15)
        except AssertionError:
            self.close()
            raise AssertionError(f"it does not listen:\n{self.log()}") from None
        return self

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)

    def _listens(self) -> bool:
        assert self.process.poll() is None
        return listens("127.0.0.1", self.port)


def ask(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> int:
    """Ask over this connection and read the answer; returns its status."""
    connection.request(method, path)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def need(*programs: str) -> None:
    """Skip the test where one of these programs is missing."""
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not in PATH")


def shipped(name: str, changes: dict[str, str]) -> str:
    """The text of a shipped file with these parts replaced; each must be there."""
    text = (DEPLOY / name).read_text()
    for old, new in changes.items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return text


class Proxy(Program):
    """nginx or Caddy with the shipped file, TLS on a port of its own, and the service behind it."""

    def __init__(self, name: str, folder: Path, upstream: int, **changes: str) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True)
        port = quiet_port()
        changed = {UPSTREAM: f"127.0.0.1:{upstream}", **changes}
        command = getattr(self, f"_{name}")(port, changed)
        env = clean_environment(HOME=str(folder), XDG_DATA_HOME=str(folder))
        super().__init__(command, port, env, folder, folder / "output.log")
        self.wait_for_port()

    def connect(self, source: str = "127.0.0.1") -> ssl.SSLSocket:
        """A TLS connection from this address; nobody has signed the certificate."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection(("127.0.0.1", self.port), 10, source_address=(source, 0))
        return context.wrap_socket(plain, server_hostname="localhost")

    @contextlib.contextmanager
    def http(self, source: str = "127.0.0.1") -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("localhost", self.port)
        connection.sock = self.connect(source)
        with contextlib.closing(connection):
            yield connection

    def websocket(self, source: str = "127.0.0.1") -> RawSocket:
        return RawSocket.over(self.connect(source))

    def logs(self) -> str:
        """All that it wrote to any log."""
        return "".join(path.read_text() for path in self.folder.rglob("*.log"))

    def _listens(self) -> bool:
        """Caddy listens before it has made its certificate."""
        if not super()._listens():
            return False
        with contextlib.suppress(ssl.SSLError), self.connect():
            return True
        return False

    def _nginx(self, port: int, changes: dict[str, str]) -> list[str]:
        need("nginx", "openssl")
        certificate = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        names = ["-nodes", "-subj", "/CN=localhost", "-keyout", "site.key", "-out", "site.pem"]
        subprocess.run(
            ["openssl", "req", *certificate, *names],
            cwd=self.folder,
            check=True,
            capture_output=True,
        )
        changes |= {
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "listen 80": f"listen 127.0.0.1:{quiet_port()}",
            "/etc/ssl/example.org": f"{self.folder}/site",
            "/var/log/nginx": str(self.folder),
            "example.org": "localhost",
        }
        (self.folder / "site.conf").write_text(shipped("nginx.conf", changes))
        # What Debian's nginx.conf has around it, with nothing outside this folder.
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = " ".join(f"{kind}_temp_path {self.folder}/{kind};" for kind in kinds)
        (self.folder / "main.conf").write_text(
            f"daemon off; master_process off; pid {self.folder}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{ {paths} include {self.folder}/site.conf; }}\n"
        )
        return ["nginx", "-p", str(self.folder), "-c", "main.conf", "-e", "stderr"]

    def _caddy(self, port: int, changes: dict[str, str]) -> list[str]:
        need("caddy")
        # Its own certificate, and no port beside this one.
        options = "\tadmin off\n\tlocal_certs\n\tskip_install_trust\n"
        options += "\tauto_https disable_redirects\n"
        changes |= {
            "example.org": f"https://localhost:{port}",
            "\tlog {": f"{options}\tlog {{",
        }
        (self.folder / "Caddyfile").write_text(shipped("Caddyfile", changes))
        return ["caddy", "run", "--adapter", "caddyfile", "--config", "Caddyfile"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The service as it runs behind one proxy; one echo socket an address, to see addresses."""
    folder = tmp_path_factory.mktemp("service")
    server = Server(folder, PROXY_HOPS="1", MAX_SOCKETS_PER_CALLER="1")
    with contextlib.closing(server):
        yield server.start()


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest, service: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy") / "run"
    with contextlib.closing(Proxy(request.param, folder, service.port)) as running:
        yield running


class TestProxies:
    def test_sign_up_through_a_proxy_logs_in(self, proxy: Proxy) -> None:
        """Origin must fit Host; the cookie is Secure only if X-Forwarded-Proto arrives."""
        origin = {"Origin": f"https://localhost:{proxy.port}"}
        with proxy.http() as connection:
            status, cookie = sign_up(connection, f"{proxy.name}-user", origin)
            assert status == 303
            assert "Secure" in cookie
            connection.request("GET", "/settings/security", headers={"Cookie": cookie})
            page = connection.getresponse()
            assert page.status == 200
            assert "Create New API Key" in page.read().decode()

    def test_sign_up_from_another_site_is_refused(self, proxy: Proxy) -> None:
        with proxy.http() as connection:
            elsewhere = {"Origin": "https://mallory.example"}
            assert sign_up(connection, f"{proxy.name}-mallory", elsewhere)[0] == 403

    def test_echo_socket_through_a_proxy_answers(self, proxy: Proxy) -> None:
        with proxy.websocket() as client:
            client.open(ECHO)
            client.send(frame(TEXT, "grüße".encode()))
            assert client.frame().json()["message"] == "grüße"
            client.send(close_frame(1000))
            assert client.frame().close_code == 1000

    def test_time_socket_through_a_proxy_streams(self, proxy: Proxy, service: Server) -> None:
        with proxy.websocket() as client:
            client.open(f"{TIME}?api_key={service.new_key('time')}")
            types = [client.frame().json()["type"] for _ in range(3)]
        assert types == ["auth_success", "time_update", "time_update"]

    def test_client_address_reaches_the_service_and_cannot_be_forged(self, proxy: Proxy) -> None:
        """Each address may have one echo socket: the second address gets in, the first no more."""
        forged = {"X-Forwarded-For": "198.51.100.7"}
        first, second = (f"127.0.{PROXIES.index(proxy.name)}.{number}" for number in (2, 3))
        with (
            proxy.websocket(first) as one,
            proxy.websocket(second) as other,
            proxy.websocket(first) as again,
        ):
            one.open(ECHO)
            other.open(ECHO)
            assert again.handshake(ECHO, {**forged}).status == 429

    def test_answers_keep_upstream_connections_open(self, proxy: Proxy, service: Server) -> None:
        with proxy.http() as connection:
            assert [ask(connection, STATUS) for _ in range(5)] == [200] * 5
            before = connections(service)
            assert [ask(connection, STATUS) for _ in range(20)] == [200] * 20
            assert connections(service) <= before

    @pytest.mark.parametrize("name", PROXIES)
    def test_failed_request_leaves_no_key_in_a_log(self, tmp_path: Path, name: str) -> None:
        """Proxies quote a request that fails; here all do, for nothing runs behind the proxy."""
        in_query, in_header = secrets.token_hex(), secrets.token_hex()
        with contextlib.closing(Proxy(name, tmp_path / name, quiet_port())) as proxy:
            with proxy.websocket() as client:
                changes: dict[str, str | None] = {"X-API-Key": in_header}
                assert client.handshake(f"{TIME}?api_key={in_query}", changes).status == 502
            eventually(lambda: TIME in proxy.logs(), what="no log mentions the request")
            assert in_query not in proxy.logs()
            assert in_header not in proxy.logs()


def sign_up(
    connection: http.client.HTTPConnection, username: str, headers: dict[str, str]
) -> tuple[int, str]:
    """Sign up; returns the status and the cookie."""
    person = {
        "username": username,
        "email": f"{username}@example.com",
        "password": secrets.token_urlsafe(),
    }
    form = {"Content-Type": "application/x-www-form-urlencoded", **headers}
    connection.request("POST", "/sign-up", urlencode(person), form)
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.headers.get("Set-Cookie", "")


def connections(server: Server, only_open: bool = False) -> set[str]:
    """The clients' ends of the server's connections; those that ended a minute ago count, too."""
    port, ends = f":{server.port:04X}", set[str]()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if port in (local[-5:], remote[-5:]) and (state == "01" or not only_open):
            ends.add(remote if local.endswith(port) else local)
    return ends


def keep_alive_of_the_service(folder: Path) -> int:
    """How many seconds the service keeps an idle connection of a proxy, as gunicorn reads it."""
    settings = {"PROXY_HOPS": "1", "SECRET_KEY": secrets.token_hex()}
    settings["DATABASE_URL"] = f"sqlite:///{folder}/unused.db"
    done = subprocess.run(
        [*serve_command(), "--print-config"],
        cwd=REPOSITORY,
        env=clean_environment(**settings),
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"^keepalive\s*=\s*(\d+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return int(found[1])


def keep_alive_of(name: str) -> int:
    """How many seconds the shipped proxy keeps an idle connection to the service."""
    file, pattern = {
        "nginx": ("nginx.conf", r"^ +keepalive_timeout (\d+)s;$"),
        "caddy": ("Caddyfile", r"^\t+keepalive (\d+)s$"),
    }[name]
    (seconds,) = re.findall(pattern, (DEPLOY / file).read_text(), re.MULTILINE)
    return int(seconds)


class TestIdleConnections:
    @pytest.mark.parametrize("name", PROXIES)
    def test_idle_upstream_connection_is_ended_by_the_proxy(
        self, tmp_path: Path, name: str
    ) -> None:
        """Compares two numbers: what the service says of itself and what the file says."""
        assert keep_alive_of(name) + 5 <= keep_alive_of_the_service(tmp_path)

    def test_post_while_an_idle_connection_ends_is_answered(
        self, start_server: StartServer, tmp_path: Path
    ) -> None:
        """The race that gives 502, made certain, with both times shortened by one factor to 3 s.

        nginx is held up just before the service would end an idle connection, and goes on when the
        service has ended it. If nginx still had that connection then, it would send the request
        on it and answer 502: nginx sends no POST a second time. Not for Caddy: it does so.
        """
        need("nginx", "openssl")
        short = 3
        server = start_server(PROXY_HOPS="1", GUNICORN_CMD_ARGS=f"--keep-alive {short}")
        idle = keep_alive_of("nginx")
        shortened = f"{idle * 1000 * short // keep_alive_of_the_service(tmp_path)}ms"
        changes = {f"keepalive_timeout {idle}s": f"keepalive_timeout {shortened}"}
        with (
            contextlib.closing(Proxy("nginx", tmp_path / "nginx", server.port, **changes)) as proxy,
            proxy.http() as connection,
        ):
            assert ask(connection, STATUS) == 200
            (upstream,) = connections(server, only_open=True)
            time.sleep(short - 0.25)
            proxy.process.send_signal(signal.SIGSTOP)
            connection.request("POST", STATUS)
            eventually(lambda: upstream not in connections(server, only_open=True))
            proxy.process.send_signal(signal.SIGCONT)
            answer = connection.getresponse()
            answer.read()
        assert answer.status == 405


def dockerfile(instruction: str) -> str:
    """What follows this instruction, which must be there once."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (rest,) = [line.removeprefix(instruction) for line in lines if line.startswith(instruction)]
    return rest.strip()


def is_ignored(path: str) -> bool:
    """As Docker decides for the kinds of patterns that we use: a path, and **/ with a name."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    anywhere = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    top, *_, name = [part for part in path.split("/") if part] * 2
    return any(fnmatch.fnmatchcase(top, pattern) for pattern in patterns) or name in anywhere


def copy_for_image(target: Path) -> None:
    """Copy the project as COPY would."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if is_ignored(str((Path(folder) / n).relative_to(REPOSITORY)))]

    shutil.copytree(REPOSITORY, target, ignore=ignored)


# $1 is the folder that stays writable, the rest is the command.
READ_ONLY = """
data=$1; shift
mount --bind "$data" "$data"
while read -r _ folder _; do
    case $folder in /dev|/dev/*|/proc|/proc/*|/sys|/sys/*|"$data") continue;; esac
    mount -o remount,bind,ro "$folder" || exit 77
done < /proc/self/mounts
for folder in . /tmp; do
    if touch "$folder/written" 2>/dev/null; then echo "$folder is writable"; exit 77; fi
done
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""


def read_only(data: Path, command: list[str]) -> list[str]:
    """Runs it as PID 1 without privileges, on a root where only this folder can be written."""
    namespaces = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    return [*namespaces, "sh", "-c", READ_ONLY, "sh", str(data), *command]


class TestImage:
    def test_image_run_read_only_serves_and_stops(self, tmp_path: Path) -> None:
        """As `docker run --read-only --cap-drop ALL`: the Dockerfile's files, ENV and CMD."""
        need("unshare", "mount", "setpriv")
        app, data, port = tmp_path / "app", tmp_path / "data", quiet_port()
        data.mkdir()
        copy_for_image(app)
        trial = subprocess.run(read_only(data, ["true"]), cwd=app, capture_output=True, text=True)
        if trial.returncode:
            pytest.skip(f"no read-only root can be made here: {trial.stdout or trial.stderr}")

        assert json.loads(dockerfile("CMD")) == ["gunicorn"]
        env = image_environment(data, PORT=str(port), SECRET_KEY=secrets.token_hex())
        command = read_only(data, serve_command())
        program = Program(command, port, env, app, tmp_path / "output.log")
        with contextlib.closing(program.wait_for_port()):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            with contextlib.closing(connection):
                assert ask(connection, STATUS) == 200
                assert sign_up(connection, "ada", {})[0] == 303
            assert healthy(port)
            os.kill(child_of(program.process.pid), signal.SIGTERM)
            assert program.process.wait(timeout=10) == 0

        assert "Traceback" not in program.log()
        assert (data / "demo.db").is_file()
        assert not healthy(port)

    @pytest.mark.parametrize(
        "path", [".env", ".git", "demo.db", "demo.db-wal", ".venv", "web/__pycache__", "tests"]
    )
    def test_image_does_not_get_what_is_private_or_large(self, path: str) -> None:
        assert is_ignored(path)


def image_environment(data: Path, **settings: str) -> dict[str, str]:
    """The Dockerfile's ENV with this folder as /data; coverage could not write there."""
    shipped_env = dict(pair.split("=", 1) for pair in shlex.split(dockerfile("ENV")))
    assert shipped_env["DATABASE_URL"].startswith("sqlite:////data/")
    shipped_env["DATABASE_URL"] = shipped_env["DATABASE_URL"].replace("/data", str(data))
    env = clean_environment(**shipped_env, **settings)
    return {name: value for name, value in env.items() if not name.startswith("COVERAGE")}


def healthy(port: int) -> bool:
    """What the Dockerfile's HEALTHCHECK says."""
    program, *arguments = json.loads(dockerfile("HEALTHCHECK CMD"))
    assert program == "python"
    env = clean_environment(PORT=str(port))
    return not subprocess.run([sys.executable, *arguments], env=env, capture_output=True).returncode


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The systemd unit, for a folder that is there."""
    program = tmp_path / "srv" / ".venv" / "bin" / "gunicorn"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "demo-service.service"
    path.write_text(shipped(path.name, {UNIT_FOLDER: f"{tmp_path}/srv"}))
    return path


class TestUnit:
    def test_unit_verified_by_systemd_has_no_mistake(self, unit: Path) -> None:
        need("systemd-analyze")
        command = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "manager" in done.stderr:
            pytest.skip(f"systemd-analyze does not work here: {done.stderr}")
        assert (done.returncode, done.stdout + done.stderr) == (0, "")

    def test_unit_measured_by_systemd_is_hardened(self, unit: Path) -> None:
        """Below 1.5 of 10; a unit without any protection has 9.6."""
        need("systemd-analyze")
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized option" in done.stderr:
            pytest.skip("this systemd-analyze cannot measure a file")
        assert done.returncode == 0, done.stdout + done.stderr

    def test_unit_command_tells_systemd_and_listens_for_the_proxy_only(
        self, tmp_path: Path
    ) -> None:
        """Its ExecStart and Environment, with another port and folder; started without systemd."""
        section = unit_section()
        assert section["Type"] == "notify"
        path, *arguments = shlex.split(section["ExecStart"])
        assert path == f"{UNIT_FOLDER}/.venv/bin/gunicorn"
        port = quiet_port()
        assert UPSTREAM in arguments
        arguments[arguments.index(UPSTREAM)] = f"127.0.0.1:{port}"
        database = {"DATABASE_URL": f"sqlite:///{tmp_path}/demo.db"}
        given = dict(line.split("=", 1) for line in section["Environment"].splitlines())
        assert given["DATABASE_URL"].startswith("sqlite:////var/lib/demo-service/")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(f"{tmp_path}/notify")
            systemd.settimeout(15)
            told = {"NOTIFY_SOCKET": f"{tmp_path}/notify", "SECRET_KEY": secrets.token_hex()}
            env = clean_environment(**{**given, **database, **told})
            command = [*serve_command(), *arguments]
            program = Program(command, port, env, REPOSITORY, tmp_path / "output.log")
            with contextlib.closing(program.wait_for_port()):
                assert b"READY=1" in systemd.recv(1000)
                assert listens("127.0.0.1", port)
                assert not listens("127.0.0.2", port)


def unit_section() -> dict[str, str]:
    """[Service]; what is given several times has a line for each."""
    lines = (DEPLOY / "demo-service.service").read_text().partition("[Service]")[2].splitlines()
    section: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            section[name] = f"{section[name]}\n{value}" if name in section else value
    return section


class TestPlatforms:
    def test_render_file_fits_the_service(self, server: Server) -> None:
        reason = "PyYAML is not installed"
        yaml: Any = pytest.importorskip("yaml", reason=reason)
        (web,) = yaml.safe_load((DEPLOY / "render.yaml").read_text())["services"]
        env = {variable["key"]: variable for variable in web["envVars"]}
        assert [web["startCommand"]] == [procfile()]
        assert answers(server, web["healthCheckPath"])
        assert env["SECRET_KEY"] == {"key": "SECRET_KEY", "generateValue": True}
        assert env["DATABASE_URL"]["value"].startswith(f"sqlite:///{web['disk']['mountPath']}/")

    def test_fly_file_fits_the_service(self, server: Server) -> None:
        tomllib: Any = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
        fly = tomllib.loads((DEPLOY / "fly.toml").read_text())
        (check,) = fly["http_service"]["checks"]
        folder = fly["mounts"]["destination"]
        assert answers(server, check["path"])
        assert fly["env"]["DATABASE_URL"].startswith(f"sqlite:///{folder}/")
        assert str(fly["http_service"]["internal_port"]) == dockerfile("EXPOSE")
        assert all((DEPLOY / fly["build"][name]).is_file() for name in ("dockerfile", "ignorefile"))
        assert fly["kill_timeout"] > 5


def procfile() -> str:
    name, _, command = (REPOSITORY / "Procfile").read_text().partition(":")
    assert name == "web"
    return command.strip()


def answers(server: Server, path: str) -> bool:
    with contextlib.closing(server.connection()) as connection:
        return ask(connection, path) == 200
