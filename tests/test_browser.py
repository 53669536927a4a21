"""The web application in a real browser, as a person uses it, against the real server."""

import os
import re
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import REPOSITORY, Server, eventually

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
AXE = Path(os.environ.get("AXE", REPOSITORY / "node_modules/axe-core/axe.min.js"))
PASSWORD = secrets.token_urlsafe()

Page = Any
Browser = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not path:
        pytest.skip(f"no browser found: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as runner:
        yield runner.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture(params=["light"])
def page(request: pytest.FixtureRequest, browser: Browser, server: Server) -> Iterator[Page]:
    """An empty page of a new person; no script error and no CSP violation may happen in it."""
    context = browser.new_context(
        base_url=server.url,
        color_scheme=request.param,
        permissions=["clipboard-read", "clipboard-write"],
    )
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    context.close()
    harmless = re.compile("Failed to load resource|WebSocket connection to .* failed|\\[DOM\\] ")
    assert [text for text in complaints if not harmless.match(text)] == []


def sign_up(page: Page) -> None:
    name = f"ada-{secrets.token_hex(4)}"
    page.goto("/sign-up")
    page.get_by_label("User name").fill(name)
    page.get_by_label("Email").fill(f"{name}@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign up").click()


def create_key(page: Page, name: str, kind: str) -> str:
    """Create a key and copy it."""
    page.goto("/settings/security")
    form = page.get_by_role("region", name="Create New API Key")
    form.get_by_label("Name").fill(name)
    form.get_by_label("Type").select_option(kind)
    form.get_by_role("button", name="Create key").click()
    page.get_by_role("button", name="Copy API key").click()
    expect(page.get_by_text("Copied", exact=True)).to_be_visible()
    copied: str = page.evaluate("navigator.clipboard.readText()")
    return copied


def middle_of(element: Page) -> tuple[float, float]:
    box = element.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def card(page: Page, path: str) -> Page:
    return page.get_by_role("article").filter(has_text=path).first


def try_it(page: Page, path: str) -> str:
    """What the console shows for an endpoint."""
    here = card(page, path)
    here.get_by_role("button", name="Try it").click()
    expect(here.get_by_role("status")).to_have_text(re.compile(r"^\d{3} "))
    shown: str = here.locator(".answer").inner_text()
    return shown


def test_person_makes_uses_and_revokes_keys(page: Page, server: Server) -> None:
    sign_up(page)
    page.wait_for_url("**/settings/security")
    key = create_key(page, "my laptop", "Production")
    assert key.startswith("sk_live_")
    assert key in page.get_by_label("curl line", exact=True).inner_text()

    page.reload()
    expect(page.get_by_role("row", name="my laptop")).to_contain_text(key[:16])
    assert key not in page.content()
    assert page.get_by_role("row").count() == 1 + 1  # the reload made no second key

    page.goto("/")
    page.get_by_label("API key", exact=True).fill(key)
    assert '"year"' in try_it(page, "/demo/year")
    assert '"authenticated": true' in try_it(page, "/status")
    assert "x-ratelimit-remaining: 999" in try_it(page, "/protected/test")
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

    settings = page.context.new_page()
    assert create_key(settings, "a test", "Development").startswith("sk_test_")
    settings.get_by_role("link", name="Done").click()
    settings.get_by_role("button", name="Revoke my laptop").click()
    expect(settings.get_by_text("The key my laptop is revoked.")).to_be_visible()
    expect(clock.get_by_role("status").first).to_contain_text("1008: the key was revoked")
    assert '"code": "invalid_api_key"' in try_it(page, "/protected/test")

    settings.get_by_role("button", name="Log out").click()
    settings.goto("/settings/security")
    expect(settings).to_have_url(f"{server.url}/log-in")


def test_secret_is_nowhere_once_the_page_is_left(page: Page, server: Server) -> None:
    sign_up(page)
    secret = create_key(page, "quiet", "Production")[-38:]
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


def test_wrong_key_on_the_time_socket_shows_what_a_program_would_see(page: Page) -> None:
    page.goto("/")
    page.get_by_label("API key", exact=True).fill("wrong")
    clock = card(page, "/ws/time")
    clock.get_by_role("button", name="Connect").click()
    expect(clock).to_contain_text("Refused.")
    expect(clock).to_contain_text("401 ")
    expect(clock).to_contain_text('"code": "invalid_api_key"')


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


def test_double_click_makes_one_key(page: Page, server: Server) -> None:
    sign_up(page)
    page.get_by_label("Name", exact=True).fill("once")
    os.kill(server.worker_pid, signal.SIGSTOP)  # both clicks come before any answer
    try:
        page.mouse.dblclick(*middle_of(page.get_by_role("button", name="Create key")), delay=80)
    finally:
        os.kill(server.worker_pid, signal.SIGCONT)
    expect(page.locator("#key")).to_contain_text("sk_test_")
    page.goto("/settings/security")
    expect(page.get_by_role("button", name="Revoke once")).to_have_count(1)


def test_connecting_can_be_given_up(page: Page, server: Server) -> None:
    page.goto("/")
    echo = card(page, "/ws/echo")
    os.kill(server.worker_pid, signal.SIGSTOP)
    try:
        echo.get_by_role("button", name="Connect").click()
        echo.get_by_role("button", name="Disconnect").click()
        expect(echo.get_by_text("Not connected")).to_be_visible()
    finally:
        os.kill(server.worker_pid, signal.SIGCONT)


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_keys_of_any_name_are_seen_without_scrolling(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    sign_up(page)
    key = create_key(page, "n" * 64, "Development")
    page.request.get("/api/v1/protected/test", headers={"X-API-Key": key})
    table = page.get_by_role("region", name="Table of API keys")
    page.goto("/settings/security")
    eventually(lambda: page.reload() and "never" not in table.inner_text())
    assert table.evaluate("table => table.scrollWidth == table.clientWidth")


def test_form_on_another_site_changes_nothing(page: Page, server: Server) -> None:
    sign_up(page)
    page.wait_for_url("**/settings/security")
    port = server.url.rpartition(":")[2]
    form = f'<form method="post" action="{server.url}/log-out"><button>Win</button></form>'
    trap = f"http://localhost:{port}/trap"
    page.route(trap, lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto(trap)
    page.get_by_role("button", name="Win").click()
    expect(page.get_by_text("sent from another site")).to_be_visible()
    page.goto("/settings/security")
    expect(page).to_have_url(f"{server.url}/settings/security")


def test_pages_work_without_a_script(browser: Browser, server: Server) -> None:
    page = browser.new_page(base_url=server.url, java_script_enabled=False)
    sign_up(page)
    page.get_by_label("Name", exact=True).fill("plain")
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("#key")).to_contain_text("sk_test_")
    expect(page.get_by_role("button", name="Copy")).to_have_count(0)
    page.goto("/")
    assert "needs JavaScript" in page.locator("noscript").inner_html()
    expect(page.get_by_role("button", name="Try it")).to_have_count(0)
    page.context.close()


@pytest.mark.parametrize("path", ["/", "/sign-up", "/settings/profile", "/settings/security"])
def test_page_fits_a_narrow_screen(page: Page, path: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    sign_up(page)
    create_key(page, "a key with quite a long name, as some people like them", "Production")
    page.goto(path)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_longest_name_without_a_space_fits_a_narrow_screen(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    sign_up(page)
    create_key(page, "n" * 64, "Production")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.goto("/settings/security")
    page.get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("is revoked")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_axe_finds_nothing_on_any_page(page: Page) -> None:
    if not AXE.exists():
        pytest.skip(f"no axe-core: {AXE} does not exist; set AXE to the path of axe.min.js")
    for path in ["/log-in", "/sign-up", "/nowhere"]:
        page.goto(path)
        check(page)
    page.get_by_role("link", name="Sign up").click()
    page.get_by_role("button", name="Sign up").click()
    check(page)  # with messages
    sign_up(page)
    page.wait_for_url("**/settings/security")
    check(page)  # without a key
    key = create_key(page, "my laptop", "Production")
    check(page)
    page.goto("/")
    check(page)
    page.get_by_label("API key", exact=True).fill(key)
    for path in ["/demo/year", "/protected/test"]:
        try_it(page, path)
    for path in ["/ws/echo", "/ws/time"]:
        card(page, path).get_by_role("button", name="Connect").click()
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("log")).to_have_count(2)
    check(page)  # with answers
    page.goto("/settings/profile")
    check(page)
    page.goto("/settings/security")
    page.get_by_text("The numbers").click()
    check(page)


def check(page: Page) -> None:
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    assert [(rule["id"], node["html"]) for rule in found for node in rule["nodes"]] == []
