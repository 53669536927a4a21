"""The web application in a real browser, as a person uses it, against the real server."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from serving import REPOSITORY, Server

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


def open_page(browser: Browser, server: Server, **options: Any) -> Page:
    """An empty page of a new person, whose address is new, too."""
    headers = {"X-Forwarded-For": f"2001:db8:{secrets.token_hex(2)}:{secrets.token_hex(2)}::1"}
    context = browser.new_context(base_url=server.url, extra_http_headers=headers, **options)
    context.set_default_timeout(10_000)
    return context.new_page()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """A page in which no script error and no CSP violation may happen."""
    page = open_page(browser, server, permissions=["clipboard-read", "clipboard-write"])
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    page.context.close()
    harmless = re.compile("Failed to load resource|WebSocket connection to .* failed|\\[DOM\\] ")
    assert [text for text in complaints if not harmless.match(text)] == []


@pytest.fixture
def plain_page(browser: Browser, server: Server) -> Iterator[Page]:
    page = open_page(browser, server, java_script_enabled=False)
    yield page
    page.context.close()


@pytest.fixture(params=["with a script", "without a script"])
def any_page(request: pytest.FixtureRequest) -> Page:
    name = "page" if request.param == "with a script" else "plain_page"
    return request.getfixturevalue(name)


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


def log_in(page: Page, name: str, password: str = PASSWORD) -> None:
    page.get_by_label("User name or email").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def create_key(page: Page, name: str = "ci", kind: str = "Production", end: str = "Never") -> str:
    page.goto("/settings/security")
    form = page.get_by_role("region", name="Create New API Key")
    form.get_by_label("Name").fill(name)
    form.get_by_label("Type").select_option(kind)
    form.get_by_label("Expires").select_option(end)
    form.get_by_role("button", name="Create key").click()
    return shown_key(page)


def shown_key(page: Page) -> str:
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


def card(page: Page, path: str) -> Page:
    return page.get_by_role("article").filter(has_text=path).first


def press(page: Page, path: str, name: str) -> Page:
    """Press a button of a card; returns its line of the status."""
    card(page, path).get_by_role("button", name=name).click()
    return card(page, path).get_by_role("status")


def try_it(page: Page, path: str) -> str:
    """What the console shows for an endpoint."""
    expect(press(page, path, "Try it")).to_have_text(re.compile(r"^\s*\d{3} "))
    shown: str = card(page, path).locator(".response").inner_text()
    return shown


def type_key(page: Page, key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)


def test_person_makes_a_key_uses_it_in_four_clicks_and_revokes_it(
    page: Page, server: Server
) -> None:
    name = f"ada-{secrets.token_hex(4)}"
    page.goto("/")
    page.get_by_role("link", name="create a free key").click()
    for label, text in [("User name", name), ("Email", f"{name}@example.com")]:
        page.get_by_label(label).fill(text)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign up").click()
    page.get_by_label("Name", exact=True).fill("my laptop")
    page.get_by_role("button", name="Create key").click()
    key = shown_key(page)
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_text(re.compile("^200 OK, [0-9]+ ms$"))).to_be_visible()
    expect(page.get_by_text("1 of 1,000 requests used")).to_be_visible()

    assert copy(page, "API key") == key
    line = copy(page, "Shell code")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert '"api_key_name":"my laptop"' in done.stdout

    page.get_by_role("link", name="Open the console").click()
    type_key(page, key)
    assert '"year"' in try_it(page, "/demo/year")
    assert '"authenticated": true' in try_it(page, "/status")
    assert '"api_key_count": 1' in try_it(page, "/user/me")
    assert '"requests_remaining": 996' in try_it(page, "/usage/stats")
    expect(press(page, "/ws/time", "Connect")).to_have_text("Connected")
    clock = card(page, "/ws/time")
    expect(clock.get_by_role("log")).to_contain_text('"api_key_name":"my laptop"')
    expect(clock.get_by_role("log").get_by_text("time_update")).to_have_count(2)
    expect(clock.get_by_role("timer")).to_have_text(re.compile(r"^\d{4}-\d\d-\d\d .* UTC$"))

    settings = page.context.new_page()
    settings.goto("/settings/security")
    settings.get_by_role("link", name="Revoke my laptop").click()
    settings.get_by_role("link", name="Cancel").click()
    assert works(page, key)
    settings.get_by_role("link", name="Revoke my laptop").click()
    settings.get_by_role("button", name="Revoke this key").click()
    expect(settings.get_by_text("The key “my laptop” is revoked.")).to_be_visible()
    expect(clock.get_by_role("status")).to_contain_text("The key has been revoked")
    shown = try_it(page, "/protected/test")
    assert re.match(r"401 Unauthorized, \d+ ms\s+This API key is not valid\.", shown)


def test_secret_is_nowhere_once_the_page_is_left(page: Page, server: Server) -> None:
    sign_up(page)
    secret = create_key(page, "quiet")[-38:]
    page.goto("/")
    type_key(page, "sk_live_12345678_" + secret)
    try_it(page, "/protected/test")
    expect(press(page, "/ws/time", "Connect")).to_have_class(re.compile("bad"))
    for path in ["/", "/settings/profile", "/settings/security"]:
        page.goto(path)
        assert secret not in page.content()
    stored = "JSON.stringify([document.cookie, localStorage, sessionStorage, history.state])"
    assert secret not in page.evaluate(stored)
    assert secret not in str(page.context.cookies())
    files = [path for path in server.directory.rglob("*") if path.is_file()]
    assert {"server.log", "service.db"} <= {path.name for path in files}
    assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize(("path", "seen"), [("echo", "Hello"), ("time", "time_update")])
def test_code_of_a_socket_does_what_it_says(
    page: Page, server: Server, path: str, seen: str
) -> None:
    page.goto("/")
    about = f" for /ws/{path}"
    assert page.get_by_label("line that sets the key", exact=True).inner_text() == "export KEY=..."
    address = f"{server.ws_url}/api/v1/ws/{path}" + ("?api_key=$KEY" if path == "time" else "")
    shell = page.get_by_role("group", name=f"Shell code{about}").inner_text()
    assert shell == f'npx -y wscat -c "{address}"'
    page.get_by_role("radio", name="Python").check()
    code = page.get_by_role("group", name=f"Python code{about}").inner_text()
    command = [sys.executable, "-u", "-c", code]
    env = {**os.environ, "KEY": server.new_key()}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout
        assert any(seen in line for line in client.stdout)
        client.terminate()


def test_bad_form_leads_the_focus_to_the_first_mistake(page: Page) -> None:
    page.goto("/sign-up")
    page.get_by_label("User name").fill("ada")
    page.get_by_label("Email").fill("nowhere@home")  # which browsers take for an address
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign up").click()
    expect(page.get_by_label("Email")).to_be_focused()
    expect(page.get_by_label("Email")).to_have_accessible_description(
        "Enter an address like ada@example.com."
    )
    expect(page.get_by_label("User name")).to_have_value("ada")


@pytest.mark.parametrize(
    ("label", "text"),
    [("User name", "a"), ("User name", "-ada"), ("Email", "nowhere"), ("Password", "too short")],
)
def test_browser_itself_finds_most_mistakes(page: Page, label: str, text: str) -> None:
    page.goto("/sign-up")
    right = {"User name": "ada.Lovelace_1-2", "Email": "a@example.com", "Password": "long enough"}
    for name, value in (right | {label: text}).items():
        page.get_by_label(name).press_sequentially(value)
    page.get_by_role("button", name="Sign up").click()
    assert page.locator(":invalid:not(form)").all() != []
    assert page.get_by_label(label).evaluate("field => !field.validity.valid")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_label(label).fill(right[label])
    expect(page.locator(":invalid")).to_have_count(0)


def test_form_on_another_site_changes_nothing(page: Page, server: Server) -> None:
    sign_up(page)
    form = f'<form method="post" action="{server.url}/log-out"><button>Win</button></form>'
    trap = f"http://localhost:{server.port}/trap"
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
    page.get_by_role("link", name="Back to your keys").click()
    page.get_by_role("link", name="Rename plain").click()
    page.get_by_label("Name", exact=True).fill("simple")
    page.get_by_role("button", name="Rename this key").click()
    page.get_by_role("link", name="Rotate simple").click()
    page.get_by_label("The old key ends").select_option("In 5 minutes")
    page.get_by_role("button", name="Rotate this key").click()
    assert works(page, key)
    assert works(page, shown_key(page))
    expect(page.get_by_text("(in 5 min")).to_be_visible()
    page.get_by_role("link", name="Back to your keys").click()
    expect(rows(page).filter(has_text="replaced, ends in 5 min")).to_have_count(1)
    page.get_by_role("link", name="Revoke simple").first.click()
    page.get_by_role("button", name="Revoke this key").click()
    expect(page.get_by_text("The key “simple” is revoked.")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    assert "turn on JavaScript" in page.locator("noscript").inner_html()
    expect(page.get_by_role("button", name="Try it")).to_have_count(0)
    page.get_by_role("link", name="Log in", exact=True).click()
    log_in(page, f"{name}@example.com")
    expect(page.get_by_text(name)).to_be_visible()


def test_whole_journey_by_keyboard(page: Page) -> None:
    def press_on(role: str, name: str) -> None:
        tab_to(page.get_by_role(role, name=name).first)
        page.keyboard.press("Enter")

    def tab_to(wanted: Page) -> None:
        expect(wanted).to_be_visible()
        for _ in range(80):
            page.keyboard.press("Tab")
            if wanted.evaluate("element => element == document.activeElement"):
                return
        raise AssertionError(f"{wanted} cannot be reached")

    name = f"ada-{secrets.token_hex(4)}"
    page.goto("/")
    press_on("link", "Sign up")
    page.wait_for_url("**/sign-up")
    tab_to(page.get_by_label("User name"))
    for text in [name, f"{name}@example.com", PASSWORD]:
        page.keyboard.type(text)
        page.keyboard.press("Tab" if text != PASSWORD else "Enter")
    page.wait_for_url("**/settings/security")
    tab_to(page.get_by_label("Name", exact=True))
    page.keyboard.type("keyed")
    press_on("button", "Create key")
    expect(page.get_by_role("heading", name="Your new development key “keyed”")).to_be_visible()
    press_on("button", "Try it")
    expect(page.get_by_text("200 OK")).to_be_visible()
    press_on("link", "Back to your keys")
    press_on("link", "Rotate keyed")
    press_on("button", "Rotate this key")
    press_on("link", "Back to your keys")
    press_on("link", "Revoke keyed")
    press_on("button", "Revoke this key")
    expect(page.get_by_text("The key “keyed” is revoked.")).to_be_visible()
    press_on("button", "Log out")
    expect(page.get_by_role("link", name="Log in").first).to_be_visible()


# Several tabs, several clicks


def other_account_in_another_tab(page: Page) -> tuple[Page, str]:
    tab = page.context.new_page()
    tab.goto("/")
    tab.get_by_role("button", name="Log out").click()
    return tab, sign_up(tab, "bob")


def test_log_out_in_an_old_tab_logs_out(page: Page) -> None:
    sign_up(page)
    tab, _ = other_account_in_another_tab(page)
    page.get_by_role("button", name="Log out").click()
    for old in [page, tab]:
        old.goto("/")
        expect(old.get_by_role("link", name="Log in", exact=True)).to_be_visible()


def test_second_log_in_tab_logs_in(page: Page) -> None:
    ada = sign_up(page)
    page.get_by_role("button", name="Log out").click()
    page.goto("/log-in")
    tab = page.context.new_page()
    sign_up(tab, "bob")
    log_in(page, ada)
    expect(page.get_by_role("banner")).to_contain_text(f"Logged in as {ada}")


def test_form_of_an_old_tab_makes_no_key_in_another_account(page: Page) -> None:
    sign_up(page)
    tab, bob = other_account_in_another_tab(page)
    page.get_by_label("Name", exact=True).fill("whose?")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("alert")).to_have_text(
        f"This page was opened under another account. You are now logged in as {bob}."
    )
    tab.reload()
    expect(tab.get_by_text("You have no API keys.")).to_be_visible()


def test_double_click_on_a_slow_server_makes_one_key_and_shows_it(
    page: Page, server: Server
) -> None:
    sign_up(page)
    page.get_by_label("Name", exact=True).fill("once")
    box = page.get_by_role("button", name="Create key").bounding_box()
    with paused(server):
        page.mouse.dblclick(box["x"] + 20, box["y"] + 20, delay=80)
    assert works(page, shown_key(page))
    page.goto("/settings/security")
    expect(rows(page)).to_have_count(1)


def test_form_that_did_not_arrive_can_be_sent_again(page: Page) -> None:
    sign_up(page)
    page.get_by_label("Name", exact=True).fill("again")
    page.route("**/settings/security/keys", lambda route: route.abort())
    page.get_by_role("button", name="Create key").click()
    page.wait_for_url("chrome-error://**")
    page.unroute_all()
    page.go_back()
    expect(page.get_by_role("button", name="Create key")).to_be_enabled()
    assert works(page, create_key(page, "again"))


def test_reload_makes_no_second_key(page: Page) -> None:
    sign_up(page)
    key = create_key(page)
    page.reload()
    expect(rows(page)).to_have_count(1)
    assert key not in page.content()


def test_back_and_forward_after_a_new_key_end_in_no_browser_error(any_page: Page) -> None:
    page = any_page
    sign_up(page)
    create_key(page)
    page.get_by_role("link", name="Back to your keys").click()
    page.get_by_role("link", name="Rotate ci").click()
    page.get_by_role("button", name="Rotate this key").click()
    page.get_by_role("link", name="Back to your keys").click()
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
    log_in(page, name, "a wrong password")
    expect(page.get_by_role("alert")).to_have_text("Wrong user name or password.")
    log_in(page, name)
    expect(page).to_have_url(f"{server.url}/settings/profile")


# What is drawn


def test_every_hour_with_requests_is_seen_in_the_chart(page: Page, server: Server) -> None:
    sign_up(page)
    key_id = create_key(page)[8:16]
    hour = int(time.time()) // 3600 * 3600
    for ago, requests in enumerate([5000, 40, 3, 1], 2):
        insert = "INSERT INTO hourly_usage (hour, key_id, requests) VALUES (?, ?, ?)"
        server.execute(insert, hour - ago * 3600, key_id, requests)
    page.goto("/settings/security")
    heights = "bars => bars.map(bar => bar.getBoundingClientRect().height)"
    bars = page.locator(".chart rect:not(.ground)").evaluate_all(heights)
    assert sum(height >= 2 for height in bars) == 4


def test_one_of_1000_requests_is_seen_in_the_meter(page: Page) -> None:
    sign_up(page)
    key = create_key(page)

    def filled() -> int:
        """Pixels of a row of the meter that have its colour."""
        shot = page.get_by_role("meter").screenshot(type="png")
        pixels = page.evaluate(PIXELS, list(shot))
        return sum(red < 60 and green > 90 and blue < 130 for red, green, blue in pixels)

    page.goto("/settings/security")
    assert filled() == 0
    works(page, key)
    page.reload()
    assert filled() >= 2


PIXELS = """async bytes => {
    const image = await createImageBitmap(new Blob([new Uint8Array(bytes)]));
    const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
    canvas.drawImage(image, 0, 0);
    const { data } = canvas.getImageData(0, image.height >> 1, image.width, 1);
    return Array.from({ length: image.width }, (_, x) => [...data.slice(4 * x, 4 * x + 3)]);
}"""


@pytest.mark.parametrize(("width", "stacked"), [(639, True), (640, False), (1280, False)])
def test_keys_are_a_table_unless_it_is_very_narrow(page: Page, width: int, stacked: bool) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    sign_up(page)
    works(page, create_key(page, "n" * 64, "Development", "1 year"))
    page.goto("/settings/security")
    assert (rows(page).first.evaluate("row => getComputedStyle(row).display") == "grid") == stacked
    table = page.get_by_role("region", name="Table of API keys")
    assert table.evaluate("table => table.scrollWidth == table.clientWidth")


def test_copy_says_when_nothing_was_copied(page: Page) -> None:
    page.add_init_script(
        "navigator.clipboard.writeText = async () => { throw Error(); };"
        "document.execCommand = () => false;"
    )
    page.goto("/")
    page.get_by_role("button", name="Copy line that sets the key").click()
    expect(page.get_by_text("Press Ctrl+C")).to_be_visible()


# The console's explanations


def test_key_can_be_looked_at_and_hidden_again(page: Page) -> None:
    page.goto("/")
    for button, kind in [("Show", "text"), ("Hide", "password")]:
        page.get_by_role("button", name=button).click()
        expect(page.get_by_label("API key", exact=True)).to_have_attribute("type", kind)


def test_response_headers_wait_behind_a_summary(page: Page) -> None:
    page.goto("/")
    try_it(page, "/demo/year")
    headers = card(page, "/demo/year").locator(".headers")
    expect(headers).to_be_hidden()
    card(page, "/demo/year").get_by_text("Response headers").click()
    expect(headers).to_contain_text("content-type: application/json")


def test_slower_response_of_two_does_not_win(page: Page) -> None:
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
        press(page, "/demo/year", "Try it")
    expect(card(page, "/demo/year").get_by_role("group", name="Response")).to_contain_text("second")


def test_log_of_a_socket_is_bounded_and_stays_where_it_is_read(page: Page) -> None:
    page.goto("/")
    press(page, "/ws/echo", "Connect")
    card(page, "/ws/echo").get_by_label("Message", exact=True).fill("Grüße")
    log = card(page, "/ws/echo").get_by_role("log")
    for _ in range(10):
        press(page, "/ws/echo", "Send")
    expect(log.locator("p")).to_have_count(20)
    expect(log).to_contain_text('"message":"Grüße"')
    log.evaluate("log => log.scrollTop = 0")
    press(page, "/ws/echo", "Send")
    expect(log.locator("p")).to_have_count(22)
    assert log.evaluate("log => log.scrollTop") == 0
    for _ in range(20):
        press(page, "/ws/echo", "Send")
    expect(log.locator("p")).to_have_count(50)
    expect(press(page, "/ws/echo", "Disconnect")).to_have_text("Disconnected")


def test_connecting_can_be_given_up(page: Page, server: Server) -> None:
    page.goto("/")
    with paused(server):
        press(page, "/ws/echo", "Connect")
        expect(press(page, "/ws/echo", "Cancel")).to_have_text("Not connected")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", "Enter an API key first."),
        ("wrong", "This API key is not valid."),
        ("half a key…", "This is not an API key."),
    ],
)
def test_refused_time_socket_says_what_is_wrong_with_the_key(
    page: Page, server: Server, key: str, words: str
) -> None:
    page.goto("/")
    type_key(page, server.new_key())
    expect(press(page, "/ws/time", "Connect")).to_have_text("Connected")
    press(page, "/ws/time", "Disconnect")
    type_key(page, key)
    expect(press(page, "/ws/time", "Connect")).to_have_text(words)
    expect(card(page, "/ws/time").get_by_role("status")).to_have_class(re.compile("bad"))
    expect(card(page, "/ws/time").get_by_role("log")).to_be_hidden()  # it was of the other key


def test_refused_sockets_say_what_is_wrong_beside_the_key(
    browser: Browser, start_server: StartServer
) -> None:
    server = start_server(MAX_SOCKETS="0", RATE_LIMITS="free=1/day")
    page = open_page(browser, server)
    page.goto("/")
    type_key(page, server.new_key())
    too_many = "Too many sockets are open. Close one and try again."
    expect(press(page, "/ws/echo", "Connect")).to_have_text(too_many)
    # To ask what is wrong takes the one request of the day.
    expect(press(page, "/ws/time", "Connect")).to_have_text(too_many)
    used_up = re.compile("All 1 requests .* Try again in [0-9]+ (s|minutes).")
    expect(press(page, "/ws/time", "Connect")).to_have_text(used_up)
    server.close()
    expect(press(page, "/ws/time", "Connect")).to_have_text("The server cannot be reached.")
    type_key(page, "")
    press(page, "/user/me", "Try it")
    expect(card(page, "/user/me")).to_contain_text("The server cannot be reached.")
    page.context.close()


# Every page and state: narrow, accessible


def states(page: Page, server: Server) -> Iterator[str]:
    """Leads through every page in every state."""
    for path in ["/", "/log-in?next=/settings/profile", "/sign-up", "/nowhere"]:
        page.goto(path)
        yield path
    page.goto("/log-in")
    log_in(page, "nobody")
    expect(page.get_by_role("alert")).to_be_visible()
    yield "log-in with a message"
    sign_up(page, "quite-a-long-user-name")
    yield "no key"
    key = create_key(page, "n" * 64, end="30 days")
    for language in ["Shell", "Python", "JavaScript"]:
        page.get_by_role("radio", name=language, exact=True).check()
        yield f"new key, {language}"
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_text("200 OK")).to_be_visible()
    page.get_by_text("Response headers").click()
    yield "new key, tried"
    create_key(page, "a key with quite a long name, as some people like them")
    ended = "UPDATE api_key SET expires_at = 1 + created_at - 60 WHERE id = ?"
    server.execute(ended, create_key(page, "over")[8:16])
    for action, done in [("Rotate", "works until"), ("Rename", "Name"), ("Revoke", "is revoked")]:
        page.goto("/settings/security")
        page.get_by_role("link", name=action).first.click()
        expect(page.get_by_role("button", name=action)).to_be_visible()
        yield action
        if action == "Rename":
            page.get_by_label("Name", exact=True).fill("not printable: \u200e")
        page.get_by_role("button", name=action).click()
        expect(page.get_by_text(done).first).to_be_visible()
        yield f"{action}, done"
    page.get_by_text("Show as table").click()
    yield "keys"
    page.goto("/settings/profile")
    yield "profile"
    page.goto("/")
    type_key(page, "wrong")
    try_it(page, "/user/me")
    expect(press(page, "/ws/time", "Connect")).to_have_text("This API key is not valid.")
    yield "console, refused"
    type_key(page, key)
    for path in ["/demo/year", "/protected/test"]:
        try_it(page, path)
    for path in ["/ws/echo", "/ws/time"]:
        press(page, path, "Connect")
    press(page, "/ws/echo", "Send")
    expect(page.get_by_role("log")).to_have_count(2)
    for language in ["Shell", "Python", "JavaScript"]:
        page.get_by_role("radio", name=language, exact=True).check()
        yield f"console, {language}"


WIDE = """() => [document.documentElement, ...document.querySelectorAll("pre, .scroll, .log")]
    .filter(element => element.scrollWidth > element.clientWidth)
    .map(element => element.outerHTML.slice(0, 200))"""


@pytest.mark.ci
@pytest.mark.parametrize(("scheme", "width"), [("light", 320), ("dark", 640), ("dark", 1280)])
def test_no_state_is_cut_off_and_axe_finds_nothing(
    page: Page, server: Server, scheme: str, width: int
) -> None:
    if not AXE.exists():
        pytest.skip(f"no axe-core: {AXE} does not exist; set AXE to the path of axe.min.js")
    page.set_viewport_size({"width": width, "height": 740})
    page.emulate_media(color_scheme=scheme)
    found = {}
    for state in states(page, server):
        page.evaluate(AXE.read_text())
        violations = page.evaluate("axe.run()")["violations"]
        nodes = [(rule["id"], node["html"]) for rule in violations for node in rule["nodes"]]
        found[state] = [*page.evaluate(WIDE), *nodes]
    assert {state: nodes for state, nodes in found.items() if nodes} == {}
