"""Each setting of gunicorn is supported and documented, or refused, or has no option."""

import re
import sys

import pytest
from gunicorn.config import Config

from helpers.documents import DOCUMENTS, section
from helpers.server import REPOSITORY
from server.lifecycle import SUPPORTED_OPTIONS, check_options
from settings import Settings, SettingsError

# Of gunicorn 27.0. For a new setting, decide whether all promises of the service hold, whatever its
# value. If so, add it to SUPPORTED_OPTIONS and docs/deploying.md, or else here. Check its default.
REFUSED = re.findall(
    r"\w+",
    """
    access_log_format asgi_disconnect_grace_period asgi_lifespan asgi_loop backlog ca_certs
    capture_output casefold_http_method cert_reqs certfile chdir ciphers control_socket
    control_socket_disable control_socket_mode daemon dirty_apps dirty_graceful_timeout
    dirty_threads dirty_timeout dirty_workers disable_redirect_access_to_syslog
    do_handshake_on_connect dogstatsd_tags enable_backlog_metric enable_stdio_inheritance
    forwarded_allow_ips forwarder_headers graceful_timeout group header_map http2_cleartext
    http2_initial_window_size http2_max_concurrent_streams http2_max_frame_size
    http2_max_header_list_size http_parser http_protocols initgroups keepalive keyfile
    limit_request_field_size limit_request_fields limit_request_line logconfig logconfig_json
    logger_class max_requests max_requests_jitter paste permit_obsolete_folding
    permit_unconventional_http_method permit_unconventional_http_version protocol
    proxy_allow_ips proxy_protocol pythonpath raw_env raw_paste_global_conf reload reload_engine
    reload_extra_files reuse_port root_path sendfile spew ssl_version statsd_host statsd_prefix
    strip_header_spaces suppress_ragged_eofs syslog syslog_addr syslog_facility syslog_prefix
    threads timeout umask user uwsgi_allow_ips websocket_max_message_size worker_connections""",
)
WITHOUT_OPTION = re.findall(
    r"\w+",
    """
    child_exit default_proc_name dirty_post_fork dirty_worker_exit dirty_worker_init logconfig_dict
    nworkers_changed on_dirty_starting on_exit on_reload on_starting post_fork post_request
    post_worker_init pre_exec pre_fork pre_request secure_scheme_headers ssl_context tmp_upload_dir
    when_ready worker_abort worker_exit worker_int wsgi_app""",
)
OURS = re.findall(  # what gunicorn.conf.py sets
    r"\w+",
    """
    access_log_format backlog bind chdir control_socket_disable forwarded_allow_ips
    forwarder_headers graceful_timeout http_parser keepalive logger_class on_starting
    secure_scheme_headers when_ready worker_class worker_connections workers wsgi_app""",
)
SETTINGS = Config().settings
# Each command of the documents and of what deploys the service: its file, and what stands behind
# `gunicorn`, which in a Dockerfile is a list in JSON. Lines that are comments are left out.
WRITTEN = {
    (str(file.relative_to(REPOSITORY)), arguments.strip())
    for file in [
        *(*DOCUMENTS, *(REPOSITORY / "deploy").iterdir()),
        *(REPOSITORY / "Procfile", REPOSITORY / "compose.yaml"),
    ]
    for arguments in re.findall(
        r'(?m)(?:(?:^|[ /"`=])gunicorn|GUNICORN_CMD_ARGS(?:=|:|\n *value:) ?["\']?)(?![\w.])'
        r'([^"\'`#\n]*)',
        re.sub(r'(?m)^ *#.*|", *"', " ", file.read_text()),
    )
}


def test_each_setting_of_gunicorn_was_decided_on() -> None:
    assert sorted(SETTINGS) == sorted([*SUPPORTED_OPTIONS, *REFUSED, *WITHOUT_OPTION]), (
        "gunicorn has other settings: name each in SUPPORTED_OPTIONS, REFUSED or WITHOUT_OPTION"
    )
    assert {name for name in SETTINGS if not SETTINGS[name].cli} == {*WITHOUT_OPTION}
    assert SETTINGS.keys() & {
        *re.findall(r"(?m)^(\w+)[^=\n(]*=", (REPOSITORY / "gunicorn.conf.py").read_text())
    } == {*OURS}, (
        "gunicorn.conf.py sets other settings: do all promises of the service hold with them? "
        "Then edit OURS"
    )


def test_documents_list_the_supported_options() -> None:
    listed = re.findall(
        r"(?m)^\| `(--[a-z-]+)",
        section("Options of gunicorn", (REPOSITORY / "docs/deploying.md").read_text()),
    )
    names = {option: name for name in SETTINGS for option in SETTINGS[name].cli or []}
    assert sorted(names[option] for option in listed) == sorted(SUPPORTED_OPTIONS), (
        "edit the list in docs/deploying.md, Options of gunicorn"
    )


@pytest.mark.parametrize("value", ["1", "0"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_option_is_one_line(
    config: Settings, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    option = SETTINGS[name].cli[-1]
    values = [] if SETTINGS[name].action in ("store_true", "store_const") else [value]
    monkeypatch.setattr(sys, "argv", ["gunicorn", "app:app", option, *values])
    with pytest.raises(SettingsError, match=f"^gunicorn: {option} is not supported; [^\n]*$"):
        check_options(config)


@pytest.mark.parametrize(
    ("config", "file", "arguments"),
    [
        *(({}, *each) for each in sorted(WRITTEN)),
        ({"DATABASE_URL": "postgresql://localhost/demo"}, "docs/deploying.md", "--workers 4"),
    ],
    indirect=["config"],
)
def test_written_command_has_supported_options(
    config: Settings, monkeypatch: pytest.MonkeyPatch, file: str, arguments: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gunicorn", *arguments.split()])
    check_options(config)
