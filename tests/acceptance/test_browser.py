"""The web application in a real browser, as a person uses it, against the real server."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from helpers.browsers import CONTROL, Browser, Chromium, Firefox, WebKit
from helpers.paths import ECHO, GATE, KEYS, ME, PROFILE, SECURITY, STATUS, TEST, TIME, YEAR
from helpers.server import REPOSITORY, Server, bash, eventually, find_program
from test_deploy import proxy

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
expect.set_options(timeout=30_000)

AXE = Path(os.environ.get("AXE", REPOSITORY / "node_modules/axe-core/axe.min.js"))
PASSWORD = secrets.token_urlsafe()

Page = Any
# The element with the focus, if the key's field hides it, or if nobody sees which one it is.
UNSEEN = """() => {
    const { activeElement: focused } = document
    const { x, y, width, height } = focused.getBoundingClientRect()
    const top = document.elementFromPoint(x + width / 2, y + height / 2)
    const isCovered = top?.closest(".key-row") && !focused.closest(".key-row")
    const isSeen = [focused, ...(focused.labels ?? [])].some(each => {
        const { top, left, right, bottom, width, height } = each.getBoundingClientRect()
        return getComputedStyle(each).outlineStyle === "solid" && Math.min(width, height) > 2 &&
            left >= 0 && right <= innerWidth && bottom > 0 && top < innerHeight
    })
    return isCovered || !(isSeen || focused === document.body) ? focused.outerHTML : null
}"""
# What has moved since the page was opened.
MOVED = """() => {
    const observer = new PerformanceObserver(() => {})
    observer.observe({ type: "layout-shift", buffered: true })
    return observer.takeRecords().flatMap(({ sources }) => sources.map(each => each.node.outerHTML))
}"""
# Whether a log shows its end; and, after it was scrolled up, after the next two lines.
SCROLLED = """async ({ parentElement: log }) => {
    const isAtEnd = () => log.scrollHeight - log.clientHeight - log.scrollTop < 10
    const before = log.clientHeight < log.scrollHeight && isAtEnd()
    log.scrollTop = 0
    const { lastElementChild: last, parentElement: entry } = log
    entry.querySelector("form button").click()
    while (log.lastElementChild.previousElementSibling?.previousElementSibling !== last)
        await new Promise(requestAnimationFrame)
    return [before, isAtEnd()]
}"""
# The headers of a window that ends in a second.
ENDING = {
    "X-RateLimit-Limit": "9",
    "RateLimit-Policy": '"free";q=9;w=60',
    "RateLimit": '"free";r=0;t=1',
}
OPEN_ALL = "() => { for (const each of document.querySelectorAll('details')) each.open = true }"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as runner:
        yield runner.chromium.launch(
            executable_path=find_program("chromium", "chromium-browser", "google-chrome"),
            args=[
                "--no-sandbox",
                # Each context would start one more process, for the popup of an address bar that
                # nobody sees.
                "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup",
            ],
        )


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Page]:
    """A new person's empty page, in which no script error and no CSP violation may happen."""
    page = browser.new_context(
        base_url=server.url,
        ignore_https_errors=True,
        **getattr(request, "param", {"permissions": ["clipboard-read", "clipboard-write"]}),
    ).new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    page.context.close()
    assert [
        text
        for text in complaints
        if not re.match(
            "Failed to load resource|WebSocket connection to .* failed|\\[DOM\\] ", text
        )
    ] == []


@pytest.fixture(params=[Chromium, Firefox, WebKit])
def person(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Browser]:
    """A new person with one of the three browsers."""
    with contextlib.ExitStack() as running:
        if request.param is Chromium:
            yield Chromium(request.getfixturevalue("page"))
        else:
            yield request.param(tmp_path, running)


def sign_up(person: Browser, server: Server, prefix: str = "ada") -> None:
    person.open(server.url)
    person.click("Create a free key")
    name = f"{prefix}-{secrets.token_hex(4)}"
    for label, text in [
        ("User name", name),
        ("Email", f"{name}@example.com"),
        ("Password", PASSWORD),
    ]:
        person.type(label, text)
    person.click("Sign up")
    person.expect("You have no API keys.")


def make_key(person: Browser, name: str = "ci") -> str:
    person.run("() => document.querySelector('.new-key > summary')?.click()")
    person.type("Name", name)
    person.click("Create key")
    person.expect("Shown once. Store it now.")
    return str(person.run("() => document.getElementById('key').value"))


def paste(person: Browser, label: str) -> str:
    """Replace what is in a field by the clipboard; returns what the field holds then."""
    person.click(label)  # which also selects all of it
    person.press(CONTROL + "v")
    return str(person.run("() => document.activeElement.value"))


def listed(person: Browser) -> int:
    person.expect("Create New API Key")
    return int(person.run("() => document.querySelectorAll('tbody th code').length"))


def card(page: Page, path: str) -> Page:
    return page.get_by_role("article").filter(has_text=path).first


def press(page: Page, path: str, name: str) -> Page:
    card(page, path).get_by_role("button", name=name).click()
    return card(page, path).get_by_role("status")


def style(locator: Page, name: str) -> str:
    return str(locator.evaluate("(element, name) => getComputedStyle(element)[name]", name))


@pytest.mark.long
def test_story_of_a_user(person: Browser, server: Server) -> None:
    """A key is copied, tried, rotated, and pasted; no reload and no way back makes or shows one."""
    sign_up(person, server)
    key = make_key(person)
    for name, words in [
        ("Copy API key", "Copied"),
        (f"Send GET {TEST}", "free: 999 of 1,000 left this hour"),
    ]:
        person.click(name)
        person.expect(words)
    for go in [person.reload, person.reload, person.back]:
        go()
        assert listed(person) == 1
    person.click(f"Rotate ci, {key[8:16]}")
    person.click("Rotate this key")
    person.expect("(in 24 h).")
    person.reload()
    person.open(f"{server.url}/settings/security")
    assert listed(person) == 2
    last_key = make_key(person)
    page = """() => { // and what is shown from the memory of the browser is noted
        if (!location.hash) history.replaceState(null, "", "#main") // as after Skip to content
        onpageshow = ({ persisted }) => {
            const shown = document.querySelector("[action$='/log-out']")?.checkVisibility()
            if (persisted && shown) window.name += "shown after Back"
        }
        return document.documentElement.outerHTML + document.getElementById("key")?.value
    }"""
    person.click("Use it in the console")
    person.wait(lambda: last_key in person.run(page), "the key in the console")
    person.click("Log out")
    person.wait(lambda: 'action="/log-out"' not in person.run(page), "the log-out")
    person.back()
    person.wait(lambda: last_key not in person.run(page), "the console without the key")
    person.back()
    person.expect("Log in to open Profile Settings.")
    assert last_key not in person.run(page)
    person.open(f"{server.url}/log-in")
    for label in ("Show Password", "User name or email", "Password"):
        person.type(label, "wrong")
    person.click("Log in")
    person.wait(
        lambda: person.run(
            "() => document.activeElement.matches('.row:has([aria-invalid=true]) *')"
        ),
        "the focus on the wrong field: is the form sent to an address with an anchor?",
    )
    person.back()
    person.wait(
        lambda: person.run(
            "() => !document.querySelector(':disabled, [aria-invalid=true]') && !password.value"
        ),
        "buttons, but not the shown password, after Back",
    )
    person.open(server.url)
    person.click(f"Send GET {ME}")
    person.click("Enter a key above")
    person.wait(lambda: person.run("() => document.activeElement.id") == "key", "the focus")
    person.wait(lambda: paste(person, "API key") == key, "the pasted key")
    person.click(f"Send GET {ME}")
    person.expect('"api_key_count": 3')
    assert person.run(
        "() => [document.cookie + name, localStorage.length + sessionStorage.length, history.state]"
    ) == ["", 0, None], (
        "edit app.js: nothing keeps a key, made or typed; and after Log out, Back shows no account "
        "while the server is slow: see pageshow"
    )
    person.run("() => document.querySelector('[data-path$=time] [data-connect]').click()")
    person.expect('"type":"time_update"')
    server.execute("DELETE FROM api_key WHERE id = ?", key[8:16])
    person.expect("The API key was revoked or has expired (1008)")


@pytest.mark.parametrize("page", [{"java_script_enabled": False}], indirect=True)
def test_pages_work_without_a_script_and_without_a_mouse(page: Page, server: Server) -> None:
    """The whole journey but for the console."""

    def press_on(role: str, name: str) -> None:
        wanted = page.get_by_role(role, name=name).first
        expect(wanted).to_be_visible()
        for _ in range(80):
            page.keyboard.press("Tab")
            if wanted.evaluate("element => element == document.activeElement"):
                # The style sheet may still be on its way.
                expect(wanted, "where is the focus?").to_have_css("outline-style", "solid")
                expect(wanted, "where is the focus?").to_be_in_viewport()
                return page.keyboard.press("Enter")
        raise AssertionError(f"{name} cannot be reached")

    person = Chromium(page)
    sign_up(person, server)
    page.get_by_label("Name", exact=True).fill("plain")
    for name in ["Create key", "Done", "Rotate plain", "Rotate this key", "Done"]:
        press_on("button" if "key" in name else "link", name)
    assert listed(person) == 2
    press_on("link", "Revoke plain")
    press_on("button", "Revoke this key")
    expect(page.get_by_text("The key “plain” was revoked.")).to_be_visible()
    press_on("button", "Log out")
    assert "turn on JavaScript" in page.locator("noscript").inner_html()
    expect(page.get_by_role("button", name=re.compile("Send|Copy|Show"))).to_have_count(0)
    expect(page.get_by_role("region", name=f"GET {YEAR}")).to_contain_text("Example")
    while page.go_back():  # fails at the response to a form: edit Done in key.html, or redirect
        assert "sk_" not in page.content(), "the page before Done is still there"


def test_double_click_on_a_slow_server_makes_one_key(page: Page, server: Server) -> None:
    person = Chromium(page)
    sign_up(person, server)
    person.type("Name", "once")
    with server.frozen():
        page.get_by_role("button", name="Create key").dblclick(delay=80, no_wait_after=True)
    expect(page.get_by_label("API key", exact=True)).to_have_value(re.compile("^sk_"))
    page.goto(SECURITY)
    assert listed(person) == 1


def test_console_is_live_and_its_command_works(page: Page, server: Server) -> None:
    """A key may be pasted with spaces; what is none gets into no command.

    Why the first attempt was refused is told when the last one has connected.
    """
    late: list[Any] = []
    page.route(f"**{TEST}", lambda route: late.append(route), times=1)
    used_up = server.new_key(tier="once")
    assert server.ask(TEST, X_API_Key=used_up).status == 200
    # As without https, and as in a browser that stores nothing for this site.
    page.add_init_script("""Object.defineProperty(navigator, "clipboard", {})
        Object.defineProperty(window, "sessionStorage", { get: () => { throw "blocked" } })""")
    page.goto("/")
    card(page, TEST).locator("summary").first.click()
    code = page.get_by_role("group", name=f"Shell code for {TEST}")
    press(page, TIME, "Connect")
    for key, words in [
        ("", "This endpoint needs a key. Enter a key above, or create a free key."),
        ("$(reboot)#", "This API key is not valid."),
        ("schlüssel", "This is not an API key."),
        (used_up, "The limit of 1 request per day is used up. Try again in "),
        (f" {server.new_key()} ", "Connected"),
    ]:
        assert re.search(rf"\$KEY|{used_up}", code.text_content())
        page.get_by_label("API key", exact=True).fill(key)
        expect(press(page, TIME, "Connect")).to_contain_text(words)
        expect(
            page.locator(
                ".allowance:has([value='0'][low='0.5'][high='0.7'][optimum='1']):visible"
            ).filter(has_text=re.compile("^ once: 0 of 1 left today$")),
            "edit showAllowance: what is left, and a red meter; with another key, nothing",
        ).to_have_count(int(key == used_up))
    late.pop().fulfill(
        status=401, headers={"X-RateLimit-Limit": "9", "RateLimit-Policy": '"free";q=9;w=60'}
    )
    expect(code.locator("wbr")).to_have_count(4)  # an address breaks only after a slash
    command = code.text_content()
    assert '"success":true' in bash(command, REPOSITORY)
    # The late answer was not for the key that is in the field now.
    page.locator(f"body:has(.allowance[hidden]) [aria-label='Copy Shell code for {TEST}']").click()
    assert paste(Chromium(page), "API key") == command, "edit copySelected"
    expect(
        press(page, TIME, "Connect"), "edit call in app.js: of two clicks, the later one counts"
    ).to_have_text("Disconnected")


def test_console_says_what_is_wrong(page: Page) -> None:
    """Of two clicks on Send, the later one counts."""
    page.route_web_socket(re.compile(ECHO), lambda ws: ws.on_message(lambda _: ws.close(code=1011)))
    page.goto("/")
    Chromium(page).run(OPEN_ALL)
    expect(press(page, ECHO, "Send")).to_have_text("ClosedThis is a bug in the service (1011)")
    asked: list[Any] = []
    page.route(f"**{GATE}", lambda route: asked.append(route))
    page.route(f"**{TEST}", lambda route: route.fulfill(status=200, headers=ENDING))  # a good key
    for status, headers, words in [
        (502, {}, "This response is not from the API."),
        (503, {"Retry-After": "Sun, 29 Nov 2026 09:00:00 GMT"}, "ms<i> {"),
        (429, {"Retry-After": "119"}, "Try again in 119 s."),
        (429, {"Retry-After": "120"}, "Try again in 2 min."),
        (429, {"Retry-After": "3540"}, "Try again in 59 min."),
        (429, {"Retry-After": "3541"}, "Try again in 1 h."),
        (429, {"Retry-After": "9420"}, "Try again in 2 h 37 min."),
        (429, {"Retry-After": "7200"}, "Try again in 2 h."),
    ]:
        card(page, GATE).get_by_role("button", name="Send").dblclick()
        eventually(
            lambda: card(page, GATE).locator(".chip:text-is('Waiting…')").count() and asked[1:],
            what="Waiting…, and two requests",
        )
        asked.pop().fulfill(
            status=status,
            headers=headers | {"a": "<i>"},
            json={"title": "<i>", "detail": "<i>"} if headers else "<i>",
        )
        asked.pop().fulfill(status=204)
        expect(press(page, YEAR, "Send")).to_contain_text("200 OK")
        expect(
            card(page, GATE).locator(".response:has(.bad):has(.body:visible):not(:has(i))"),
            "of two clicks, the later one counts; and what comes from the API is text",
        ).to_contain_text(words)
    expect(press(page, TIME, "Connect")).to_contain_text("or a proxy blocks WebSockets.")
    page.context.set_offline(True)
    press(page, YEAR, "Send")
    expect(
        card(page.locator("body:has(.allowance[hidden])"), YEAR).locator(
            ".response:not(:has(.body:visible))"
        ),
        "nothing of the earlier answer, nor of a window that has ended",
    ).to_have_text(
        re.compile(r"^No response\s*The server cannot be reached[.]$"), use_inner_text=True
    )


def test_every_button_of_the_console_does_what_it_says(
    page: Page, server: Server, tmp_path: Path
) -> None:
    """Over https and HTTP/2, which has no words for a status, as in production."""
    with proxy("Caddyfile", tmp_path, server.port) as port:
        page.goto(f"https://localhost:{port}")
        page.get_by_label("API key", exact=True).fill(server.new_key())
        Chromium(page).run(OPEN_ALL)
        pressed = "[data-send], [data-copy], [data-show], [data-connect], .socket form button"
        expect(
            page.locator(f"main button:not({pressed}), #environment:visible"),
            "press it, too; and code with the typed key takes none from the environment",
        ).to_have_count(0)
        for button, kind in product(page.locator("[data-show]").all(), ("none", "disc")):
            button.click()
            expect(
                page.locator(f"#key[type=text] + [aria-pressed={str(kind == 'none').lower()}]"),
                "edit console.html: Firefox fills in a password, and code shows it",
            ).to_be_visible()
            assert {
                style(each, "webkitTextSecurity") for each in page.locator("#key, .secret").all()
            } == {kind}, "the key in its field and in the code"
        for language, button in product(
            page.get_by_label("Language of the code").locator("label").all(),
            page.locator("[data-copy]").all(),
        ):
            language.click()
            name = button.get_attribute("data-copy")
            assert button.is_visible() == name.endswith(language.text_content().lower()), (
                f"{name}: edit app.css: the language of the code"
            )
            if button.is_visible():
                text = page.locator(f"[id='{name}']").text_content()
                button.click()
                expect(
                    page.locator("body:has([role=status] > #said:text-is('Copied'))").locator(
                        button
                    )
                ).to_have_text("Copied")
                assert page.evaluate("navigator.clipboard.readText()") == text
                assert not re.search("KEY|import os", text), "the typed key is not in this code"
                assert text.count('"') % 2 == 0, f"a quote is missing: edit fillIn: {text}"
        expect(page.locator("main, #said").filter(has_text="Copied"), "for 2 s").to_have_count(0)
        for button in page.locator("[data-send]").all():
            button.click()
            expect(
                button.locator("xpath=ancestor::article").locator(
                    ".response:has(.headers:has-text('no-store')) .status:has(.good)"
                )
            ).to_have_text(re.compile(r"^20[04] [A-Z]\D+ \d+ ms$"))
        assert card(page, STATUS).locator(".body").evaluate(
            """element => Object.fromEntries([...CSS.highlights].map(([kind, ranges]) => [kind,
                [...ranges].filter(each => element.contains(each.startContainer)).map(String)]))"""
        ) == {
            "name": ['"status"', '"version"', '"authenticated"'],
            "string": ['"operational"', '"1.0.0"'],
            "value": ["true"],  # because the key was sent
        }, "edit app.js: colour, or when it is called"
        with server.frozen():
            for action, words in [("Connect", "Connecting…"), ("Cancel", "Not connected")]:
                expect(press(page, TIME, action)).to_have_text(words)
        sockets = page.locator(".socket").all()
        for words, action in [("Connected", "Disconnect"), ("Disconnected", "Connect")] * 2:
            for socket in sockets:
                socket.locator("[data-connect]").click()
            for socket in sockets:
                expect(
                    socket.get_by_role("status"), "edit app.js: is that allowed on https?"
                ).to_have_text(words)
                expect(socket.locator("[data-connect]")).to_have_text(action)
            expect(page.get_by_role("timer", name="Server time")).to_be_visible(
                visible=words == "Connected"
            )
            expect(page.locator(".log p:has-text('auth_success')")).to_have_count(1)
        eventually(lambda: len(server.log_lines("open /")) == len(server.log_lines("closed /")))
        lines = card(page, ECHO).get_by_role("log", name=f"Messages of {ECHO}").locator("p")
        for message in [f"<i>message {number}</i>" for number in range(60)]:
            card(page, ECHO).get_by_label("Message", exact=True).fill(message)
            press(page, ECHO, "Send")
            expect(lines.last).to_contain_text(f'"message":"{message}"')
            expect(lines.nth(-2)).to_have_text(message)
        expect(lines).to_have_count(50)
        assert lines.last.evaluate(SCROLLED) == [True, False], (
            "the log scrolls to its end, unless somebody has scrolled up: see note in app.js"
        )


@pytest.mark.parametrize(("width", "most"), [(1280, 2200), (360, 3400)])
def test_first_screen_shows_an_answer_and_nothing_hides_the_focus(
    page: Page, server: Server, width: int, most: int
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_viewport_size({"width": width, "height": 800})
    page.goto("/")
    answer = page.get_by_role("region", name=f"GET {YEAR}")
    expect(answer).to_contain_text("200 OK")
    expect(answer.locator("pre").first).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("link", name="Create a free key")).to_be_in_viewport(ratio=1)
    assert [url for url in asked if "/api/" in url] == [f"{server.url}{YEAR}"]
    assert page.evaluate("document.documentElement.scrollHeight") <= most
    assert page.evaluate(MOVED) == [], "the answer moves what somebody is about to click on"
    for _ in range(60):
        page.keyboard.press("Shift+Tab")
        assert page.evaluate(UNSEEN) is None, "edit app.css: scroll-padding-top, :focus-visible"


def test_chosen_shows_in_forced_colours(page: Page, server: Server) -> None:
    page.emulate_media(forced_colors="active", reduced_motion="reduce")
    sign_up(Chromium(page), server)
    assert len({style(tab, "borderBottomWidth") for tab in page.locator(".tabs a").all()}) == 2, (
        "the current tab looks like the others"
    )
    page.goto("/")
    assert page.evaluate(
        """() => [CSS.highlights.size, ...[...document.querySelectorAll("*")].filter(element => {
            const { animationName, transitionDuration } = getComputedStyle(element)
            return animationName !== "none" || transitionDuration !== "0s"
        }).map(element => element.outerHTML)]"""
    ) == [0], (
        "edit app.css: prefers-reduced-motion; and no colours in code, or it would look selected"
    )
    assert len({style(label, "color") for label in page.locator(".switch label").all()}) == 2, (
        "the chosen language looks like the others"
    )


def states(page: Page, server: Server) -> Iterator[str]:
    person = Chromium(page)
    for path in ["/", "/sign-up", "/log-in", "/nowhere"]:
        page.goto(path)
        yield path
    sign_up(person, server, "quite-a-long-user-name")
    yield "no key"
    key = make_key(person, "n" * 64)
    person.click(f"Send GET {TEST}")
    person.expect("200 OK")
    person.click("Response headers")
    yield "new key, tried"
    page.goto(f"{KEYS}/{key[8:16]}/rotate")
    yield "rotate"
    person.click("Rotate this key")
    person.expect("works until")
    yield "successor"
    ada = '(SELECT max(id) FROM "user")'
    server.execute(
        f"UPDATE api_key SET name = ?, expires_at = created_at + 2592000 WHERE user_id = {ada}",
        "W" * 64,
    )
    server.execute(
        f'UPDATE "user" SET username = ? || substr(username, 24) WHERE id = {ada}', "W" * 23
    )
    page.goto(SECURITY)
    person.click("Show as table")
    yield "long names"
    person.run(OPEN_ALL)
    page.get_by_label("Current password", exact=True).fill("wrong")
    page.get_by_label("New password", exact=True).fill("long enough")
    page.get_by_role("button", name="Change password").click()
    person.expect("This is not your current password.")
    yield "forms open, one refused"
    for path in (PROFILE, f"{PROFILE}/delete"):
        page.goto(path)
        yield path
    page.goto("/")
    expect(press(page, ME, "Send")).to_contain_text("needs a key")
    page.get_by_label("API key", exact=True).fill(key)
    for path, name in [(TEST, "Send"), (TIME, "Connect"), (ECHO, "Connect")]:
        expect(press(page, path, name)).to_contain_text(re.compile("200 OK|Connected"))
    card(page, ECHO).get_by_role("button", name="Send").click()
    expect(page.get_by_role("log")).to_have_count(2)
    person.run(OPEN_ALL)
    yield "console, a 401, live, all open"


# What axe finds; then whether everything can be read under the pointer, with the focus, and in the
# colours of code, which axe doesn't know.
AUDIT = """async () => {
    const { violations } = await axe.run()
    for (const rule of document.styleSheets[0].cssRules) {
        if (!rule.selectorText) continue
        const [, kind] = /::highlight[(](.*)[)]/.exec(rule.selectorText) ?? []
        for (const code of kind ? document.querySelectorAll("pre") : []) {
            code.append(document.createElement("b"))
            Object.assign(code.lastChild, { className: kind, textContent: kind })
        }
        rule.selectorText = rule.selectorText.replace(/::highlight[(](.*)[)]/, "pre > .$1")
            .replaceAll(/:hover|:focus-visible/g, ":not(.x)")
    }
    const states = await axe.run({ runOnly: ["color-contrast"] })
    return [...violations, ...states.violations]
}"""
# What is cut off, or shown although it is hidden, and live regions or groups with text of their
# own, which Orca does not read; links or buttons that sound alike but differ; cells without their
# label; what a screen reader should read, but is not rendered; code and answers that Firefox would
# translate (it leaves out `code`); a button that moves what is around it; an empty form that
# Firefox calls invalid; what is only read aloud, but copied; a light page in the dark.
FAULTS = """() => {
    const all = selector => [...document.querySelectorAll(selector)]
    const wide = all("html, pre, .scroll, .log, .bar").filter(e => e.scrollWidth > e.clientWidth)
    const bare = all("[role=status], [role=alert], [role=group]").filter(
        e => [...e.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
    const tiny = all('html:not(:has([name=viewport]))') // on a phone
    const prose = all("pre, .log").filter(e => e.translate)
    const shown = all("[hidden]").filter(e => e.checkVisibility())
    const invalid = all("form:invalid:not([aria-invalid=false])")
    const copied = all(".unseen").filter(e => getComputedStyle(e).userSelect !== "none")
    const says = ["Copied", "Selected", "Copy"]
    const jumpy = all("[data-copy]").filter(e =>
        new Set(says.map(text => (e.textContent = text, e.offsetWidth))).size > 1)
    for (const e of all("textarea")) e.style.letterSpacing = "0.5em" // as some readers set it
    const cut = all("textarea, pre, .card").filter(e =>
        getComputedStyle(e).overflowY === "hidden" && e.scrollHeight > e.clientHeight + 1)
    const sound = ({ localName, ariaLabel, textContent: text, attributes }) =>
        localName + (ariaLabel ?? text.trim()) + attributes["aria-describedby"]?.value
    const seen = all("main a, main button").filter(e => e.checkVisibility())
    const alike = seen.filter(e => seen.some(
        other => other !== e && sound(other) === sound(e) && !(e.href && other.href === e.href)))
    const nameless = all("[data-label]").filter(e => innerWidth < 640 &&
        getComputedStyle(e, "::before").content !== `"${e.dataset.label}"`)
    const read = { visibilityProperty: true }
    const unread = all(".unseen, [role=status]").filter(e => !e.checkVisibility(read) &&
        !e.closest("[hidden], details:not([open])"))
    const faults = [...wide, ...bare, ...tiny, ...shown, ...cut, ...alike, ...nameless, ...unread,
        ...prose, ...jumpy, ...invalid, ...copied]
    const green = getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[1]
    const { matches } = matchMedia(`(prefers-color-scheme: ${green < 128 ? "dark" : "light"})`)
    return [...faults.map(e => e.outerHTML.slice(0, 200)), ...(matches ? [] : ["color-scheme"])]
}"""


@pytest.mark.skipif(not AXE.exists(), reason=f"no axe-core: {AXE} does not exist; set AXE to it")
@pytest.mark.parametrize(("scheme", "width"), [("light", 320), ("dark", 640), ("dark", 896)])
def test_no_state_is_cut_off_and_axe_finds_nothing(
    page: Page, server: Server, scheme: str, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    wrong = {state: found for state in states(page, server) if (found := faults(page))}
    assert not wrong, f"edit app.css or a template: {wrong}"[:5000]


def faults(page: Page) -> list[Any]:
    page.evaluate(AXE.read_text())
    return [
        *page.evaluate(FAULTS),
        *((rule["id"], node["html"]) for rule in page.evaluate(AUDIT) for node in rule["nodes"]),
    ]


@pytest.mark.skipif(not AXE.exists(), reason=f"no axe-core: {AXE} does not exist; set AXE to it")
def test_pages_of_a_guarded_api_lead_to_it_and_never_call_it(
    page: Page, start_server: StartServer
) -> None:
    """The browser would complain of a request to another host, and so does `page`."""
    server = start_server(API_URL="https://api.example.com/v1", SITE_NAME="Weather" * 8)
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(server.url)
    found = faults(page)
    sign_up(Chromium(page), server)
    make_key(Chromium(page))
    assert found + faults(page) == []
