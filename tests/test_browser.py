"""The web application in a real browser, as a person uses it, against the real server."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from serving import REPOSITORY, Server, eventually

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
AXE = Path(os.environ.get("AXE", REPOSITORY / "node_modules/axe-core/axe.min.js"))
PASSWORD = secrets.token_urlsafe()
# Each context would start one more process, for the popup of an address bar that nobody sees.
UNSEEN = "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup"

Page = Any
Browser = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not path:
        pytest.skip(f"no browser found: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as runner:
        yield runner.chromium.launch(executable_path=path, args=["--no-sandbox", UNSEEN])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all; each browser has an address of its own, for the limits on sign-ups."""
    running = Server(tmp_path_factory.mktemp("pages"), PROXY_HOPS="1")
    try:
        yield running.start()
        running.close(signal.SIGTERM)
        assert "Traceback" not in running.log()
    finally:
        running.close()


def address() -> dict[str, str]:
    return {"X-Forwarded-For": f"2001:db8::{secrets.token_hex(2)}"}


@pytest.fixture(params=["light"])
def page(request: pytest.FixtureRequest, browser: Browser, server: Server) -> Iterator[Page]:
    """An empty page of a new person; no script error and no CSP violation may happen in it."""
    context = browser.new_context(
        base_url=server.url,
        color_scheme=request.param,
        extra_http_headers=address(),
        permissions=["clipboard-read", "clipboard-write"],
    )
    page, complaints = context.new_page(), []
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    context.close()
    harmless = re.compile("Failed to load resource|WebSocket connection to .* failed|\\[DOM\\] ")
    assert [text for text in complaints if not harmless.match(text)] == []


@pytest.fixture
def plain_page(browser: Browser, server: Server) -> Iterator[Page]:
    """An empty page of a browser without scripts."""
    context = browser.new_context(
        base_url=server.url, java_script_enabled=False, extra_http_headers=address()
    )
    context.set_default_timeout(10_000)
    yield context.new_page()
    context.close()


@pytest.fixture(params=["with a script", "without a script"])
def any_page(request: pytest.FixtureRequest, browser: Browser, server: Server) -> Iterator[Page]:
    context = browser.new_context(
        base_url=server.url,
        java_script_enabled=request.param == "with a script",
        extra_http_headers=address(),
    )
    context.set_default_timeout(10_000)
    yield context.new_page()
    context.close()


def sign_up(page: Page, prefix: str = "ada") -> str:
    """Returns the user name."""
    name = f"{prefix}-{secrets.token_hex(4)}"
    page.goto("/sign-up")
    page.get_by_label("User name").fill(name)
    page.get_by_label("Email").fill(f"{name}@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign up").click()
    page.wait_for_url("**/settings/security")
    return name


def create_key(page: Page, name: str = "ci", kind: str = "Production", end: str = "Never") -> str:
    page.goto("/settings/security")
    form = page.get_by_role("region", name="Create New API Key")
    form.get_by_label("Name").fill(name)
    form.get_by_label("Type").select_option(kind)
    form.get_by_label("Expires").select_option(end)
    form.get_by_role("button", name="Create key").click()
    secret: str = page.get_by_label("API key", exact=True).inner_text()
    page.wait_for_load_state()
    return secret


def copy(page: Page, name: str) -> str:
    page.get_by_role("button", name=f"Copy {name}").click()
    expect(page.get_by_role("button", name=f"Copied {name}")).to_be_visible()
    copied: str = page.evaluate("navigator.clipboard.readText()")
    return copied


def rows(page: Page) -> Page:
    return page.get_by_role("region", name="Table of API keys").locator("tbody tr")


def works(page: Page, key: str) -> bool:
    answer = page.request.get("/api/v1/protected/test", headers={"X-API-Key": key})
    return bool(answer.ok)


@contextlib.contextmanager
def paused(server: Server) -> Iterator[None]:
    """The server does nothing meanwhile, and then all that it was asked."""
    os.kill(server.worker_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.worker_pid, signal.SIGCONT)


def middle_of(element: Page) -> tuple[float, float]:
    box = element.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def card(page: Page, path: str) -> Page:
    return page.get_by_role("article").filter(has_text=path).first


def socket_status(page: Page, path: str) -> Page:
    return card(page, path).get_by_role("status")


def try_it(page: Page, path: str) -> str:
    """What the console shows for an endpoint."""
    here = card(page, path)
    here.get_by_role("button", name="Try it").click()
    expect(here.get_by_role("status")).to_have_text(re.compile(r"^\d{3} "))
    shown: str = here.locator(".answer").inner_text()
    return shown


def test_person_makes_uses_and_revokes_keys(page: Page, server: Server) -> None:
    sign_up(page)
    key = create_key(page, "my laptop")
    assert key.startswith("sk_live_")
    assert copy(page, "API key") == key
    assert key in copy(page, "curl line")

    page.reload()
    expect(page.get_by_role("row", name="my laptop")).to_contain_text(key[:16])
    assert key not in page.content()
    assert page.get_by_role("row").count() == 1 + 1  # the reload made no second key

    page.goto("/")
    page.get_by_label("API key", exact=True).fill(key)
    assert '"year"' in try_it(page, "/demo/year")
    assert '"authenticated": true' in try_it(page, "/status")
    assert "x-ratelimit-remaining: 999" in try_it(page, "/protected/test")
    expect(page.get_by_text("1 of 1000 requests used")).to_be_visible()
    assert '"api_key_count": 1' in try_it(page, "/user/me")
    assert '"requests_remaining": 997' in try_it(page, "/usage/stats")
    assert '"requests_remaining": 996' in try_it(page, "/usage/stats")

    echo = card(page, "/ws/echo")
    echo.get_by_role("button", name="Connect").click()
    expect(echo.get_by_role("status")).to_have_text("Connected")
    echo.get_by_label("Message", exact=True).fill("Grüße")
    echo.get_by_role("button", name="Send").click()
    expect(echo.get_by_role("log")).to_contain_text('"message":"Grüße"')
    echo.get_by_role("button", name="Disconnect").click()
    expect(echo.get_by_role("status")).to_contain_text("Disconnected")

    clock = card(page, "/ws/time")
    clock.get_by_role("button", name="Connect").click()
    expect(clock.get_by_role("log")).to_contain_text('"api_key_name":"my laptop"')
    expect(clock.get_by_role("log").get_by_text("time_update")).to_have_count(2)
    expect(clock.get_by_role("timer")).to_have_text(re.compile(r"^\d{4}-\d\d-\d\d .* UTC$"))

    settings = page.context.new_page()
    assert create_key(settings, "a test", "Development").startswith("sk_test_")
    settings.get_by_role("link", name="Done").click()
    settings.get_by_role("link", name="Revoke my laptop").click()
    settings.get_by_role("button", name="Revoke this key").click()
    expect(settings.get_by_text("The key my laptop is revoked.")).to_be_visible()
    expect(clock.get_by_role("status")).to_contain_text("The key has been revoked")
    expect(clock.get_by_role("status")).to_have_class(re.compile("bad"))
    assert '"code": "invalid_api_key"' in try_it(page, "/protected/test")

    settings.get_by_role("button", name="Log out").click()
    settings.goto("/settings/security")
    expect(settings).to_have_url(f"{server.url}/log-in?next=/settings/security")


def test_secret_is_nowhere_once_the_page_is_left(page: Page, server: Server) -> None:
    sign_up(page)
    secret = create_key(page, "quiet")[-38:]
    page.goto("/")
    page.get_by_label("API key", exact=True).fill("sk_live_12345678_" + secret)
    try_it(page, "/protected/test")
    card(page, "/ws/time").get_by_role("button", name="Connect").click()
    expect(card(page, "/ws/time").get_by_role("log")).to_be_hidden()
    for path in ["/", "/settings/profile", "/settings/security"]:
        page.goto(path)
        assert secret not in page.content()
    stored = "JSON.stringify([document.cookie, localStorage, sessionStorage, history.state])"
    assert secret not in page.evaluate(stored)
    assert secret not in str(page.context.cookies())
    files = [path for path in server.directory.rglob("*") if path.is_file()]
    assert {"server.log", "service.db"} <= {path.name for path in files}
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_log_of_a_socket_is_bounded(page: Page) -> None:
    page.goto("/")
    echo = card(page, "/ws/echo")
    for _ in range(30):
        echo.get_by_role("button", name="Send").click()
    expect(echo.get_by_role("log")).to_contain_text('"type":"echo"')
    expect(echo.get_by_role("log").locator("p")).to_have_count(50)


def test_key_can_be_looked_at_and_hidden_again(page: Page) -> None:
    page.goto("/")
    key = page.get_by_label("API key", exact=True)
    page.get_by_role("button", name="Show").click()
    expect(key).to_have_attribute("type", "text")
    page.get_by_role("button", name="Hide").click()
    expect(key).to_have_attribute("type", "password")


def test_bad_form_leads_the_focus_to_the_first_mistake(page: Page) -> None:
    page.goto("/sign-up")
    page.get_by_label("User name").fill("ada")
    page.get_by_label("Email").fill("nowhere")
    page.get_by_role("button", name="Sign up").click()
    expect(page.get_by_label("Email")).to_be_focused()
    expect(page.get_by_label("Email")).to_have_accessible_description(
        "Enter an address like ada@example.com."
    )
    expect(page.get_by_label("User name")).to_have_value("ada")


def test_connecting_can_be_given_up(page: Page, server: Server) -> None:
    page.goto("/")
    echo = card(page, "/ws/echo")
    with paused(server):
        echo.get_by_role("button", name="Connect").click()
        echo.get_by_role("button", name="Cancel").click()
        expect(echo.get_by_text("Not connected")).to_be_visible()


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_keys_of_any_name_are_seen_without_scrolling(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    sign_up(page)
    key = create_key(page, "n" * 64, "Development")
    page.request.get("/api/v1/protected/test", headers={"X-API-Key": key})
    table = page.get_by_role("region", name="Table of API keys")
    page.goto("/settings/security")
    eventually(lambda: page.reload() and "never used" not in table.inner_text())
    assert table.evaluate("table => table.scrollWidth == table.clientWidth")


def test_form_on_another_site_changes_nothing(page: Page, server: Server) -> None:
    sign_up(page)
    port = server.url.rpartition(":")[2]
    form = f'<form method="post" action="{server.url}/log-out"><button>Win</button></form>'
    trap = f"http://localhost:{port}/trap"
    page.route(trap, lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto(trap)
    page.get_by_role("button", name="Win").click()
    expect(page.get_by_text("sent from another site")).to_be_visible()
    page.goto("/settings/security")
    expect(page).to_have_url(f"{server.url}/settings/security")


def test_pages_work_without_a_script(plain_page: Page) -> None:
    """The whole journey but for the console."""
    page = plain_page
    name = sign_up(page)
    key = create_key(page, "plain", end="30 days")
    assert works(page, key)
    expect(page.get_by_role("button", name="Copy")).to_have_count(0)
    page.get_by_role("link", name="Done").click()
    page.get_by_text("Rename", exact=True).click()
    page.get_by_label("New name of plain").fill("simple")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("link", name="Rotate simple").click()
    page.get_by_label("The old key ends").select_option("Now")
    page.get_by_role("button", name="Rotate this key").click()
    successor = page.get_by_label("API key", exact=True).inner_text()
    assert (works(page, key), works(page, successor)) == (False, True)
    page.get_by_role("link", name="Done").click()
    page.get_by_role("link", name="Revoke simple").click()
    page.get_by_role("button", name="Revoke this key").click()
    expect(page.get_by_text("The key simple is revoked.")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    assert "turn on JavaScript" in page.locator("noscript").inner_html()
    expect(page.get_by_role("button", name="Try it")).to_have_count(0)
    page.get_by_role("link", name="Log in", exact=True).click()
    page.get_by_label("User name or email").fill(f"{name}@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text(name)).to_be_visible()


def test_whole_journey_by_keyboard(page: Page) -> None:
    def tab_to(wanted: Page) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if wanted.evaluate("element => element == document.activeElement"):
                return
        raise AssertionError(f"{wanted} cannot be reached")

    def press_on(role: str, name: str) -> None:
        wanted = page.get_by_role(role, name=name).first
        expect(wanted).to_be_visible()
        tab_to(wanted)
        page.keyboard.press("Enter")

    def fill(*texts: str) -> None:
        for text in texts:
            page.keyboard.press("Tab")
            page.keyboard.type(text)

    name = f"ada-{secrets.token_hex(4)}"
    page.goto("/")
    press_on("link", "Sign up")
    page.wait_for_url("**/sign-up")
    tab_to(page.get_by_label("User name"))
    page.keyboard.type(name)
    fill(f"{name}@example.com", PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/settings/security")
    tab_to(page.get_by_label("Name", exact=True))
    page.keyboard.type("keyed")
    fill("Production", "1 year")
    press_on("button", "Create key")
    expect(page.get_by_role("heading", name="Your new production key: keyed")).to_be_visible()
    press_on("button", "Try it")
    expect(page.get_by_text("200 OK")).to_be_visible()
    press_on("link", "Done")
    press_on("link", "Rotate keyed")
    press_on("button", "Rotate this key")
    press_on("link", "Done")
    press_on("link", "Revoke keyed")
    press_on("button", "Revoke this key")
    expect(page.get_by_text("The key keyed is revoked.")).to_be_visible()
    press_on("button", "Log out")
    expect(page.get_by_role("link", name="Log in").first).to_be_visible()


# One form, one account, one key


def test_every_page_names_the_account(page: Page) -> None:
    name = sign_up(page)
    for path in ["/", "/settings/profile", "/settings/security", "/nowhere"]:
        page.goto(path)
        expect(page.get_by_role("banner")).to_contain_text(f"Logged in as {name}")


def test_form_of_an_old_tab_makes_no_key_in_another_account(page: Page) -> None:
    sign_up(page)
    other_tab = page.context.new_page()
    other_tab.goto("/")
    other_tab.get_by_role("button", name="Log out").click()
    bob = sign_up(other_tab, "bob")
    page.get_by_label("Name", exact=True).fill("whose?")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("alert")).to_have_text(
        "This form was made for another account, or before you logged in. "
        f"You are now logged in as {bob}."
    )
    other_tab.reload()
    expect(other_tab.get_by_text("You have no API keys.")).to_be_visible()


def test_revoking_asks_and_can_be_cancelled(page: Page) -> None:
    sign_up(page)
    key = create_key(page, "my laptop")
    page.goto("/settings/security")
    page.get_by_role("link", name="Revoke my laptop").click()
    expect(page.get_by_role("heading", name="Revoke the key my laptop?")).to_be_visible()
    assert works(page, key)
    page.get_by_role("link", name="Cancel").click()
    expect(rows(page)).to_have_count(1)


def test_double_click_on_a_slow_server_makes_one_key_and_shows_it(
    any_page: Page, server: Server
) -> None:
    page = any_page
    sign_up(page)
    page.get_by_label("Name", exact=True).fill("once")
    with paused(server):
        page.mouse.dblclick(*middle_of(page.get_by_role("button", name="Create key")), delay=80)
    assert works(page, page.get_by_label("API key", exact=True).inner_text())
    page.goto("/settings/security")
    expect(rows(page)).to_have_count(1)


def test_reload_makes_no_second_key(any_page: Page) -> None:
    page = any_page
    sign_up(page)
    create_key(page)
    page.reload()
    page.goto("/settings/security")
    expect(rows(page)).to_have_count(1)


def test_back_and_forward_after_a_new_key_end_in_no_browser_error(any_page: Page) -> None:
    page = any_page
    sign_up(page)
    create_key(page)
    page.get_by_role("link", name="Done").click()
    page.get_by_role("link", name="Rotate ci").click()
    page.get_by_role("button", name="Rotate this key").click()
    page.get_by_role("link", name="Done").click()
    expect(rows(page)).to_have_count(2)
    for go in [page.go_back] * 3 + [page.go_forward] * 3:
        go()
        expect(page.get_by_role("heading", level=1)).to_have_text("Profile Settings")
    expect(rows(page)).to_have_count(2)


def test_log_in_says_why_and_leads_back(page: Page, server: Server) -> None:
    name = sign_up(page)
    page.get_by_role("button", name="Log out").click()
    page.goto("/settings/profile")
    expect(page.get_by_text("Log in to open Profile Settings.")).to_be_visible()
    page.get_by_label("User name or email").fill(f"{name}@example.com")
    page.get_by_label("Password").fill("a wrong password")
    page.get_by_role("button", name="Log in").click()
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{server.url}/settings/profile")


# Keys and their usage


def test_new_key_is_tried_with_one_click(page: Page) -> None:
    sign_up(page)
    create_key(page)
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_text("200 OK")).to_be_visible()
    expect(page.get_by_role("group", name="Answer")).to_contain_text('"api_key_name": "ci"')


def test_code_is_switched_for_the_whole_page_without_a_script(plain_page: Page) -> None:
    plain_page.goto("/")
    plain_page.get_by_role("radio", name="Python").check()
    expect(plain_page.get_by_role("group", name="Python code")).to_have_count(7)
    for block in plain_page.get_by_role("group", name="Python code").all():
        expect(block).to_be_visible()
    expect(plain_page.locator("pre:visible")).to_have_count(7)


def wait_for_the_next_second() -> None:
    now = int(time.time())
    eventually(lambda: time.time() > now + 1)


def test_newest_keys_come_first(page: Page) -> None:
    sign_up(page)
    for name in ["first", "second"]:
        create_key(page, name)
        wait_for_the_next_second()
    page.goto("/settings/security")
    expect(rows(page).get_by_role("rowheader")).to_contain_text(["second", "first"])


def test_end_of_a_key_is_shown_warned_of_and_told(page: Page, server: Server) -> None:
    sign_up(page)
    ids = [create_key(page, name, end="1 year")[8:16] for name in ["far", "near", "over"]]
    for key_id, seconds in zip(ids[1:], [3 * 86400 + 60, -60], strict=True):
        change(
            server, "UPDATE api_key SET expires_at = ? WHERE id = ?", time.time() + seconds, key_id
        )
    page.goto("/settings/security")
    far, near, over = (rows(page).filter(has_text=name) for name in ["far", "near", "over"])
    expect(far).to_contain_text("in 365 days")
    expect(near.locator(".error")).to_contain_text("in 3 days")
    expect(over.locator(".error")).to_have_text("expired")
    expect(over.get_by_role("link")).to_have_count(0)


def test_exact_moments_are_there_on_hover_and_for_screen_readers(page: Page) -> None:
    sign_up(page)
    create_key(page)
    page.goto("/settings/security")
    moment = rows(page).locator("time").first
    expect(moment).to_have_text(re.compile("^just now, .* UTC$"))
    expect(moment).to_have_attribute("title", re.compile("^2.* UTC$"))


def test_every_hour_with_requests_is_seen_in_the_chart(page: Page, server: Server) -> None:
    sign_up(page)
    key_id = create_key(page)[8:16]
    hour = int(time.time()) // 3600 * 3600
    for ago, requests in enumerate([5000, 40, 3, 1], 2):
        insert = "INSERT INTO hourly_usage (hour, key_id, requests) VALUES (?, ?, ?)"
        change(server, insert, hour - ago * 3600, key_id, requests)
    page.goto("/settings/security")
    heights = "bars => bars.map(bar => bar.getBoundingClientRect().height)"
    bars = page.locator(".chart rect:not(.ground)").evaluate_all(heights)
    assert sum(height >= 2 for height in bars) == 4


def change(server: Server, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(server.database, timeout=5)) as database, database:
        database.execute(statement, values)


def test_copy_says_when_nothing_was_copied(page: Page) -> None:
    page.add_init_script(
        "navigator.clipboard.writeText = async () => { throw Error(); };"
        "document.execCommand = () => false;"
    )
    sign_up(page)
    create_key(page)
    page.get_by_role("button", name="Copy API key").click()
    expect(page.get_by_text("Press Ctrl+C")).to_be_visible()


# The console's explanations


def test_slower_answer_of_two_does_not_win(page: Page) -> None:
    held: list[Any] = []

    def answer(route: Any) -> None:
        if held:
            route.fulfill(json={"turn": "second"})
            held[0].fulfill(json={"turn": "first"})
        else:
            held.append(route)

    page.route("**/demo/year", answer)
    page.goto("/")
    for _ in range(2):
        card(page, "/demo/year").get_by_role("button", name="Try it").click()
    expect(card(page, "/demo/year").get_by_role("group", name="Answer")).to_contain_text("second")


def test_log_stays_where_it_is_read(page: Page) -> None:
    page.goto("/")
    echo = card(page, "/ws/echo")
    log = echo.get_by_role("log")
    for _ in range(10):
        echo.get_by_role("button", name="Send").click()
    expect(log.locator("p")).to_have_count(20)
    log.evaluate("log => log.scrollTop = 0")
    echo.get_by_role("button", name="Send").click()
    expect(log.locator("p")).to_have_count(22)
    assert log.evaluate("log => log.scrollTop") == 0


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", "Enter an API key first."),
        ("wrong", "This API key is not valid."),
        ("half a key…", "This is not an API key."),
    ],
)
def test_refused_time_socket_says_what_is_wrong_with_the_key(
    page: Page, key: str, words: str
) -> None:
    page.goto("/")
    page.get_by_label("API key", exact=True).fill(key)
    card(page, "/ws/time").get_by_role("button", name="Connect").click()
    expect(socket_status(page, "/ws/time")).to_have_text(words)
    expect(socket_status(page, "/ws/time")).to_have_class(re.compile("bad"))


def test_refused_sockets_say_what_is_wrong_beside_the_key(
    browser: Browser, start_server: StartServer
) -> None:
    server = start_server(MAX_SOCKETS="0", RATE_LIMITS="free=1/day")
    page = browser.new_page(base_url=server.url)
    page.goto("/")
    page.get_by_label("API key", exact=True).fill(server.new_key())

    def connect(path: str) -> Page:
        card(page, path).get_by_role("button", name="Connect").click()
        return expect(socket_status(page, path))

    too_many = "Too many sockets are open. Close one and try again."
    connect("/ws/echo").to_have_text(too_many)
    connect("/ws/time").to_have_text(too_many)  # to ask took the one request of the day
    connect("/ws/time").to_have_text(
        re.compile("All 1 requests .* Try again in [0-9]+ (s|minutes).")
    )
    server.close()
    for path in ["/ws/echo", "/ws/time"]:
        connect(path).to_have_text("The server cannot be reached.")
        expect(socket_status(page, path)).to_have_class(re.compile("bad"))
    page.get_by_label("API key", exact=True).fill("")
    card(page, "/user/me").get_by_role("button", name="Try it").click()
    expect(card(page, "/user/me")).to_contain_text("No answer: The server cannot be reached.")
    page.context.close()


def test_log_before_a_refusal_is_gone(page: Page, server: Server) -> None:
    page.goto("/")
    page.get_by_label("API key", exact=True).fill(server.new_key())
    clock = card(page, "/ws/time")
    clock.get_by_role("button", name="Connect").click()
    expect(clock.get_by_role("log")).to_be_visible()
    clock.get_by_role("button", name="Disconnect").click()
    expect(socket_status(page, "/ws/time")).to_have_text("Disconnected")
    page.get_by_label("API key", exact=True).fill("wrong")
    clock.get_by_role("button", name="Connect").click()
    expect(socket_status(page, "/ws/time")).to_have_class(re.compile("bad"))
    expect(clock.get_by_role("log")).to_be_hidden()


# Every page and state: narrow, accessible


def states(page: Page, server: Server) -> Iterator[str]:
    """Leads through every page in every state."""
    for path in ["/", "/log-in?next=/settings/profile", "/sign-up", "/nowhere"]:
        page.goto(path)
        yield path
    page.get_by_role("link", name="Sign up").click()
    page.get_by_role("button", name="Sign up").click()
    yield "sign-up with messages"
    sign_up(page, "quite-a-long-user-name")
    yield "no key"
    key = create_key(page, "n" * 64, end="30 days")
    for language in ["curl", "Python", "JavaScript"]:
        page.get_by_role("radio", name=language, exact=True).check()
        yield f"new key, {language}"
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_text("200 OK")).to_be_visible()
    yield "new key, tried"
    create_key(page, "a key with quite a long name, as some people like them")
    ended = "UPDATE api_key SET expires_at = 1 + created_at - 60 WHERE id = ?"
    change(server, ended, create_key(page, "over")[8:16])
    page.goto("/settings/security")
    page.get_by_text("Rename", exact=True).first.click()
    page.get_by_text("Show as table").click()
    yield "keys"
    page.get_by_label(re.compile("New name of")).first.fill("")
    page.get_by_role("button", name="Save").first.click()
    expect(page.get_by_role("alert")).to_be_visible()
    yield "rename with a message"
    for action in ["Rotate", "Revoke"]:
        page.goto("/settings/security")
        page.get_by_role("link", name=action).first.click()
        expect(page.get_by_role("button", name=action)).to_be_visible()
        yield action
    page.get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("is revoked")).to_be_visible()
    yield "revoked"
    page.goto("/settings/profile")
    yield "profile"
    page.goto("/")
    page.get_by_label("API key", exact=True).fill("wrong")
    card(page, "/ws/time").get_by_role("button", name="Connect").click()
    try_it(page, "/user/me")
    expect(socket_status(page, "/ws/time")).to_have_text("This API key is not valid.")
    yield "console, refused"
    page.get_by_label("API key", exact=True).fill(key)
    for path in ["/demo/year", "/protected/test"]:
        try_it(page, path)
    for path in ["/ws/echo", "/ws/time"]:
        card(page, path).get_by_role("button", name="Connect").click()
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("log")).to_have_count(2)
    expect(page.get_by_role("timer")).to_be_visible()
    for language in ["curl", "Python", "JavaScript"]:
        page.get_by_role("radio", name=language, exact=True).check()
        yield f"console, {language}"


WIDE = """() => [document.documentElement, ...document.querySelectorAll("pre, .scroll, .log")]
    .filter(element => element.scrollWidth > element.clientWidth)
    .map(element => element.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize(("page", "width"), [("light", 320), ("dark", 360)], indirect=["page"])
def test_no_state_is_cut_off_and_axe_finds_nothing(page: Page, server: Server, width: int) -> None:
    if not AXE.exists():
        pytest.skip(f"no axe-core: {AXE} does not exist; set AXE to the path of axe.min.js")
    page.set_viewport_size({"width": width, "height": 740})
    found = {}
    for state in states(page, server):
        page.evaluate(AXE.read_text())
        violations = page.evaluate("axe.run()")["violations"]
        nodes = [(rule["id"], node["html"]) for rule in violations for node in rule["nodes"]]
        found[state] = [*page.evaluate(WIDE), *nodes]
    assert {state: nodes for state, nodes in found.items() if nodes} == {}
