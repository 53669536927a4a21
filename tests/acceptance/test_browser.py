"""The web application in a real browser, as a person uses it, against the real server."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from auth import NOT_VALID
from browsers import CONTROL, Browser, Chromium, Firefox, WebKit, find_program
from paths import PROFILE, SECURITY, TEST
from serving import REPOSITORY, Server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
expect.set_options(timeout=30_000)

AXE = Path(os.environ.get("AXE", REPOSITORY / "node_modules/axe-core/axe.min.js"))
PASSWORD = secrets.token_urlsafe()

Page = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Each context would start one more process, for the popup of an address bar that nobody sees.
    unseen = "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup"
    path = find_program("chromium", "chromium-browser", "google-chrome")
    with playwright.sync_playwright() as runner:
        yield runner.chromium.launch(executable_path=path, args=["--no-sandbox", unseen])


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Page]:
    """A new person's empty page, in which no script error and no CSP violation may happen."""
    options = getattr(request, "param", {"permissions": ["clipboard-read", "clipboard-write"]})
    page = browser.new_context(base_url=server.url, **options).new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    page.context.close()
    harmless = re.compile("Failed to load resource|WebSocket connection to .* failed|\\[DOM\\] ")
    assert [text for text in complaints if not harmless.match(text)] == []


def sign_up(person: Browser, server: Server, prefix: str = "ada") -> str:
    person.open(server.url)
    person.click("create a free key")
    name = f"{prefix}-{secrets.token_hex(4)}"
    fields = {"User name": name, "Email": f"{name}@example.com", "Password": PASSWORD}
    for label, text in fields.items():
        person.type(label, text)
    person.click("Sign up")
    person.expect("You have no API keys.")
    return name


def log_in(page: Page, name: str) -> None:
    page.get_by_label("User name or email").fill(name)
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()


def create_key(page: Page, name: str = "ci", kind: str = "Production", end: str = "Never") -> str:
    page.goto(SECURITY)
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


def rows(page: Page) -> Page:
    return page.get_by_role("region", name="Table of API keys").locator("tbody tr")


def works(page: Page, key: str) -> bool:
    answer = page.request.get(TEST, headers={"X-API-Key": key})
    return bool(answer.ok)


def card(page: Page, path: str) -> Page:
    return page.get_by_role("article").filter(has_text=path).first


def press(page: Page, path: str, name: str) -> Page:
    card(page, path).get_by_role("button", name=name).click()
    return card(page, path).get_by_role("status")


def style(locator: Page, name: str) -> str:
    return str(locator.evaluate("(element, name) => getComputedStyle(element)[name]", name))


def try_it(page: Page, path: str) -> str:
    expect(press(page, path, "Try it")).to_have_text(re.compile(r"^\s*\d{3} "))
    shown: str = card(page, path).locator(".response").inner_text()
    return shown


@pytest.fixture(params=[Chromium, Firefox, WebKit])
def person(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Browser]:
    """A new person with one of the three browsers, by default with Chromium."""
    with contextlib.ExitStack() as running:
        if request.param is Chromium:
            yield Chromium(request.getfixturevalue("page"))
        else:
            yield request.param(tmp_path, running)


def make_key(person: Browser) -> str:
    person.type("Name", "ci")
    person.click("Create key")
    person.expect("Copy the key now. It is shown only once.")
    return str(person.run("() => document.getElementById('key').textContent"))


def paste(person: Browser, label: str) -> str:
    """Replace what is in a field by the clipboard; returns what the field holds then."""
    person.click(label)
    person.press(CONTROL + "a", CONTROL + "v")
    return str(person.run("() => document.activeElement.value"))


def listed(person: Browser) -> int:
    person.expect("Create New API Key")
    return int(person.run("() => document.querySelectorAll('tbody th code').length"))


def test_story_of_a_user(person: Browser, server: Server) -> None:
    """A key is copied, tried, rotated, and pasted; no reload and no way back makes or shows one."""
    sign_up(person, server)
    key = make_key(person)
    line = person.run("() => document.getElementById('use-shell').textContent")
    assert '"api_key_name":"ci"' in subprocess.check_output(["bash", "-c", line], text=True)
    person.click("Copy API key")
    said = "() => [getSelection().toString(), said.textContent]"
    person.wait(lambda: person.run(said) == ["", "Copied"], "Copied")
    person.click("Try it")
    person.expect("200 OK")
    person.expect("2 of 1,000 requests used this hour")
    for go in [person.reload, person.reload, person.back]:
        go()
        assert listed(person) == 1
    person.click(f"Rotate ci, {key[8:16]}")
    person.click("Rotate this key")
    person.expect("(in 24 h).")
    person.reload()
    person.open(f"{server.url}/settings/security")
    assert listed(person) == 2
    person.type("Current password", PASSWORD)
    person.type("New password", PASSWORD[::-1])
    person.click("Change password")
    person.expect("Your password is changed.")
    last_key = make_key(person)
    person.click("Log out")
    person.expect("A demo API to test your client against")
    person.back()
    person.expect("Log in to open Profile Settings.")
    assert last_key not in person.run("() => document.documentElement.outerHTML")
    person.open(server.url)
    stored = "() => JSON.stringify([document.cookie, localStorage, sessionStorage, history.state])"
    assert key not in person.run(stored)
    person.wait(lambda: paste(person, "API key") == key, "the pasted key")
    person.click("Try it: /user/me")
    person.expect('"api_key_count": 3')
    person.run("() => document.querySelector('#time [data-connect]').click()")
    person.expect('"type":"time_update"')
    server.execute("UPDATE api_key SET revoked_at = 1 WHERE id = ?", key[8:16])
    person.expect("The key has been revoked or has expired. (1008)")


@pytest.mark.parametrize(("path", "seen"), [("echo", "Hello"), ("time", "time_update")])
def test_code_of_a_socket_does_it(page: Page, server: Server, path: str, seen: str) -> None:
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


@pytest.mark.parametrize("page", [{"java_script_enabled": False}], indirect=True)
def test_pages_work_without_a_script_and_without_a_mouse(page: Page, server: Server) -> None:
    """The whole journey but for the console."""

    def press_on(role: str, name: str) -> None:
        wanted = page.get_by_role(role, name=name).first
        expect(wanted).to_be_visible()
        for _ in range(80):
            page.keyboard.press("Tab")
            if wanted.evaluate("element => element == document.activeElement"):
                return page.keyboard.press("Enter")
        raise AssertionError(f"{name} cannot be reached")

    name = sign_up(Chromium(page), server)
    key = create_key(page, "plain", end="30 days")
    assert works(page, key)
    expect(page.get_by_role("button", name="Copy")).to_have_count(0)
    press_on("link", "Done")
    press_on("link", "Rename plain")
    page.get_by_label("Name", exact=True).fill("simple")
    press_on("button", "Rename this key")
    press_on("link", "Rotate simple")
    page.get_by_label("The old key expires").select_option("In 5 minutes")
    press_on("button", "Rotate this key")
    assert works(page, key)
    assert works(page, shown_key(page))
    expect(page.get_by_text("(in 5 min")).to_be_visible()
    press_on("link", "Done")
    expect(rows(page)).to_have_count(2)
    for go in [page.go_back] * 3 + [page.go_forward] * 3:
        go()
        expect(page.get_by_role("heading", level=1)).to_be_visible()  # not the browser's question
    expect(rows(page)).to_have_count(2)
    expect(rows(page).filter(has_text="replaced")).to_have_count(1)
    press_on("link", "Revoke simple")
    press_on("button", "Revoke this key")
    expect(page.get_by_text("The key “simple” is revoked.")).to_be_visible()
    press_on("button", "Log out")
    assert "turn on JavaScript" in page.locator("noscript").inner_html()
    expect(page.get_by_role("button", name="Try it")).to_have_count(0)
    press_on("link", "Log in")
    log_in(page, f"{name}@example.com")
    expect(page.get_by_text(name)).to_be_visible()


def test_form_on_its_way_is_sent_again_only_from_a_kept_page(page: Page, server: Server) -> None:
    """A double click on a slow server makes one key; a page that is shown again, another."""
    sign_up(Chromium(page), server)
    page.get_by_label("Name", exact=True).fill("once")
    box = page.get_by_role("button", name="Create key").bounding_box()
    os.kill(server.worker_pid, signal.SIGSTOP)
    page.mouse.dblclick(box["x"] + 20, box["y"] + 20, delay=80)
    os.kill(server.worker_pid, signal.SIGCONT)
    assert works(page, shown_key(page))
    page.goto(SECURITY)
    expect(rows(page)).to_have_count(1)
    button = page.get_by_role("button", name="Create key")
    button.evaluate("""({ form }) => form.dispatchEvent(
        new SubmitEvent("submit", { bubbles: true }))""")  # as of form.requestSubmit()
    expect(button).to_be_disabled()
    page.evaluate('dispatchEvent(new PageTransitionEvent("pageshow", { persisted: true }))')
    expect(button).to_be_enabled()


def test_message_of_a_socket_is_shown_as_text(page: Page) -> None:
    page.goto("/")
    page.get_by_label("Message", exact=True).fill("<i>Hello</i>")
    press(page, "/ws/echo", "Send")
    lines = card(page, "/ws/echo").get_by_role("log").locator("p")
    expect(lines).to_have_text(["<i>Hello</i>", re.compile('"message":"<i>Hello</i>"')])


def test_refused_time_socket_says_what_is_wrong_with_the_key(page: Page, server: Server) -> None:
    page.goto("/")
    page.get_by_label("API key", exact=True).fill(server.new_key())
    expect(press(page, "/ws/time", "Connect")).to_have_text("Connected")
    press(page, "/ws/time", "Disconnect")
    for key, words in [
        ("", "Enter an API key first."),
        ("wrong", NOT_VALID),
        ("half a key…", "This is not an API key."),
    ]:
        page.get_by_label("API key", exact=True).fill(key)
        status = press(page, "/ws/time", "Connect")
        expect(status).to_have_text(words)
        expect(status.get_by_text(words)).to_have_class(re.compile("bad"))
    expect(card(page, "/ws/time").get_by_role("log")).to_be_hidden()  # it was of the good key


def test_pasted_key_may_have_spaces_and_is_in_the_code(page: Page, server: Server) -> None:
    """As readable there as in its field."""
    page.goto("/")
    key, field = server.new_key(), page.get_by_label("API key", exact=True)
    field.fill(f"  {key}\n ")
    assert '"success": true' in try_it(page, "/protected/test")
    code = page.get_by_role("group", name="Shell code for /protected/test")
    line = code.text_content()
    assert '"success":true' in subprocess.check_output(["bash", "-c", line], text=True)
    expect(page.get_by_text("Set it first")).to_be_hidden()
    masked, secret = "webkitTextSecurity", code.locator(".secret")
    assert (field.get_attribute("type"), style(secret, masked)) == ("password", "disc")
    page.get_by_role("button", name="Show API key").click()
    assert (field.get_attribute("type"), style(secret, masked)) == ("text", "none")
    page.get_by_role("button", name="Show API key").click()
    assert (field.get_attribute("type"), style(secret, masked)) == ("password", "disc")
    for nothing in ["", "$(reboot)"]:
        field.fill(nothing)
        assert "$KEY" in code.text_content()
    expect(page.get_by_text("Set it first")).to_be_visible()


@pytest.mark.parametrize("page", [{"viewport": {"width": 375, "height": 740}}], indirect=True)
def test_keys_fit_a_phone_and_a_finger(page: Page, server: Server) -> None:
    """The name of the account is on the page, too; and a button stays readable under a mouse."""
    name = sign_up(Chromium(page), server)
    for number in range(2):
        create_key(page, f"key {number}")
    page.goto("/settings/security")
    expect(page.get_by_text(name)).to_be_visible()
    first, second = (row.bounding_box() for row in rows(page).all())
    form = page.get_by_role("region", name="Create New API Key").bounding_box()
    assert second["y"] - first["y"] < 230
    assert second["y"] < form["y"]
    page.get_by_role("link", name="New key").click()
    expect(page.get_by_label("Name", exact=True)).to_be_in_viewport()
    for action in ["Rename", "Rotate", "Revoke"]:
        link = page.get_by_role("link", name=action).first
        assert link.bounding_box()["height"] >= 44
    link.click()
    button = page.get_by_role("button", name="Revoke this key")
    button.hover()
    settled = "element => Promise.all(element.getAnimations().map(({ finished }) => finished))"
    button.evaluate(settled)
    assert style(button, "color") != style(button, "backgroundColor")


def test_chosen_shows_in_forced_colours_and_nothing_flashes(page: Page, server: Server) -> None:
    page.emulate_media(forced_colors="active", reduced_motion="reduce")
    sign_up(Chromium(page), server)
    tabs = page.get_by_label("Profile Settings", exact=True).get_by_role("link")
    assert style(tabs.first, "borderBottomWidth") != style(tabs.last, "borderBottomWidth")
    page.goto("/")
    labels = page.get_by_label("Language of the code").locator("label")
    assert style(labels.first, "backgroundColor") != style(labels.last, "backgroundColor")
    assert style(page.locator(".clock"), "animationName") == "none"


def states(page: Page, server: Server) -> Iterator[str]:
    for path in ["/", "/log-in?next=/settings/profile", "/sign-up", "/nowhere"]:
        page.goto(path)
        yield path
    page.goto("/log-in")
    log_in(page, "nobody")
    expect(page.get_by_role("alert")).to_be_visible()
    yield "log-in with a message"
    sign_up(Chromium(page), server, "quite-a-long-user-name")
    yield "no key"
    key = create_key(page, "n" * 64, end="30 days")
    yield "new key"
    page.get_by_role("radio", name="JavaScript").check()
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_text("200 OK")).to_be_visible()
    page.get_by_text("Response headers").click()
    yield "new key, tried"
    create_key(page, "a key with quite a long name, as some people like them")
    ended = "UPDATE api_key SET expires_at = 1 + created_at - 60 WHERE id = ?"
    server.execute(ended, create_key(page, "over")[8:16])
    for action, done in [
        ("Rotate", "works until"),
        ("Rename", "Give the key"),
        ("Revoke", "is revoked"),
    ]:
        page.goto(SECURITY)
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
    page.goto(PROFILE)
    yield "profile"
    page.goto("/")
    page.get_by_label("API key", exact=True).fill("wrong")
    try_it(page, "/user/me")
    expect(press(page, "/ws/time", "Connect")).to_have_text(NOT_VALID)
    yield "console, refused"
    page.get_by_label("API key", exact=True).fill(key)
    for path in ["/demo/year", "/protected/test"]:
        try_it(page, path)
    for path in ["/ws/echo", "/ws/time"]:
        press(page, path, "Connect")
    press(page, "/ws/echo", "Send")
    expect(page.get_by_role("log")).to_have_count(2)
    for language in ["Shell", "Python", "JavaScript"]:
        page.get_by_role("radio", name=language, exact=True).check()
        yield f"console, {language}"


# What is cut off, and live regions with text of their own, which Orca does not read.
FAULTS = """() => {
    const all = selector => [...document.querySelectorAll(selector)]
    const wide = all("html, pre, .scroll, .log").filter(e => e.scrollWidth > e.clientWidth)
    const bare = all("[role=status], [role=alert]").filter(
        e => [...e.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
    return [...wide, ...bare].map(element => element.outerHTML.slice(0, 200))
}"""
SPACED = "letter-spacing: 0.12em; word-spacing: 0.16em; line-height: 1.5"  # WCAG 1.4.12


@pytest.mark.parametrize(
    ("scheme", "width", "style"),
    [
        ("light", 320, SPACED),
        ("dark", 375, "font-size: 200%"),
        ("dark", 640, ""),
        ("dark", 1280, ""),
    ],
)
def test_no_state_is_cut_off_and_axe_finds_nothing(
    page: Page, server: Server, scheme: str, width: int, style: str
) -> None:
    if not AXE.exists():
        pytest.skip(f"no axe-core: {AXE} does not exist; set AXE to the path of axe.min.js")
    page.set_viewport_size({"width": width, "height": 740})
    page.emulate_media(color_scheme=scheme)
    found = {}
    for state in states(page, server):
        page.evaluate("style => document.documentElement.style.cssText = style", style)
        page.evaluate(AXE.read_text())
        violations = page.evaluate("axe.run()")["violations"]
        nodes = [(rule["id"], node["html"]) for rule in violations for node in rule["nodes"]]
        found[state] = [*page.evaluate(FAULTS), *nodes]
    assert {state: nodes for state, nodes in found.items() if nodes} == {}
