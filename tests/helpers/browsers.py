"""Chromium, Firefox and WebKitGTK behind one small interface, each driven by its own protocol."""

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from helpers.server import eventually, find_program, free_port

# A link, a button, or the label of a field, by its name; at first in the main part of the page. A
# browser clicks on what it has painted, so the place counts once it was the same at four looks.
FIND = """name => {
    const named = element => (element.ariaLabel ?? element.textContent.trim()) === name
    const all = [...document.querySelectorAll("a, button, label, summary")]
    const found = all.filter(element => element.checkVisibility() && named(element))
    const element = found.find(element => element.closest("main")) ?? found[0]
    element.scrollIntoView({ block: "center" })
    const { x, y, width, height } = element.getClientRects()[0] // of the first line of a link
    const place = [x + width / 2, y + height / 2].map(Math.floor)
    window.looks = String(window.place) === String(place) ? window.looks + 1 : 1
    window.place = place
    return window.looks >= 4 ? place : null
}"""
# Before the script of a page has run, Reload asks a question.
READ = "() => document.readyState === 'complete' ? document.body.innerText : ''"
CONTROL = "\ue009"  # in the actions of WebDriver


class Browser:
    """An empty window of a new person; `evaluate` calls a JavaScript function with a text."""

    open: Callable[[str], object]
    reload: Callable[[], object]
    back: Callable[[], object]
    evaluate: Callable[[str, str], Any]
    act: Callable[..., object]  # of the mouse ("pointer") or of the keyboard ("key")

    def run(self, function: str, *arguments: object) -> Any:
        called = f"text => JSON.stringify(({function})(...JSON.parse(text)) ?? null)"
        return json.loads(self.evaluate(called, json.dumps(arguments)))

    def wait(self, ask: Callable[[], Any], what: str) -> Any:
        """The first true answer."""

        def answer() -> Any:
            with contextlib.suppress(Exception):  # the page is just being left
                return ask()

        return eventually(answer, 30, what)

    def expect(self, words: str) -> None:
        self.wait(lambda: words in self.run(READ), f"{words!r} in the page")

    def click(self, name: str) -> None:
        """Click on what has this name, once it is there and has stopped moving."""
        self.click_at(
            *self.wait(lambda: self.run(FIND, name), f"a link, button or label {name!r} at rest")
        )

    def click_at(self, x: int, y: int) -> None:
        move = {"type": "pointerMove", "x": x, "y": y}
        self.act("pointer", move, *({"type": f"pointer{do}", "button": 0} for do in ("Down", "Up")))

    def type(self, label: str, text: str) -> None:
        self.click(label)
        self.press(*text)

    def press(self, *chords: str) -> None:
        """Press the keys of each chord at once; a text has chords of one key."""
        moves = [(do, key) for chord in chords for do in ("Down", "Up") for key in chord]
        self.act("key", *({"type": f"key{do}", "value": key} for do, key in moves))


class Chromium(Browser):
    """By Playwright."""

    def __init__(self, page: Any) -> None:
        self.open, self.reload, self.back = page.goto, page.reload, page.go_back
        self.evaluate, self._page = page.evaluate, page

    def click_at(self, x: int, y: int) -> None:
        self._page.mouse.click(x, y)

    def press(self, *chords: str) -> None:
        for chord in chords:
            self._page.keyboard.press("+".join(chord).replace(CONTROL, "Control"))


class Firefox(Browser):
    """By WebDriver BiDi: https://w3c.github.io/webdriver-bidi/"""

    def __init__(self, directory: Path, running: contextlib.ExitStack) -> None:
        port = free_port()
        start(
            [
                *(find_program("firefox-esr", "firefox"), "--headless", "--no-remote"),
                *("--profile", str(directory), f"--remote-debugging-port={port}"),
            ],
            running,
        )
        self._socket = self.wait(
            lambda: running.enter_context(connect(f"ws://127.0.0.1:{port}/session")), "Firefox"
        )
        self._ask("session.new", capabilities={})
        self._window = self._ask("browsingContext.getTree")["contexts"][0]["context"]
        ask = partial(self._ask, context=self._window)
        self.open = lambda url: ask("browsingContext.navigate", url=url, wait="complete")
        self.reload = partial(ask, "browsingContext.reload", wait="complete")
        self.back = partial(ask, "browsingContext.traverseHistory", delta=-1)

    def _ask(self, method: str, **parameters: object) -> Any:
        self._socket.send(json.dumps({"id": 1, "method": method, "params": parameters}))
        answer = json.loads(self._socket.recv(timeout=60))
        assert answer["type"] == "success", answer
        return answer["result"]

    def evaluate(self, function: str, text: str) -> str:
        answer = self._ask(
            "script.callFunction",
            functionDeclaration=function,
            arguments=[{"type": "string", "value": text}],
            target={"context": self._window},
            awaitPromise=False,
        )
        return str(answer["result"]["value"])

    def act(self, type: str, *actions: dict[str, object]) -> None:
        self._ask(
            "input.performActions",
            context=self._window,
            actions=[{"type": type, "id": type, "actions": actions}],
        )


class WebKit(Browser):
    """By WebDriver, on a display that nobody sees: https://www.w3.org/TR/webdriver2/"""

    def __init__(self, directory: Path, running: contextlib.ExitStack) -> None:
        port = free_port()
        start(
            [find_program("xvfb-run"), "-a", find_program("WebKitWebDriver"), f"--port={port}"],
            running,
            # Its sandbox does not start in a container, and there is no graphics card.
            WEBKIT_DISABLE_SANDBOX_THIS_IS_DANGEROUS="1",
            LIBGL_ALWAYS_SOFTWARE="1",
        )
        self._url = f"http://127.0.0.1:{port}/session"
        session = self.wait(lambda: self._ask("", capabilities={}), "WebKit")
        self._url += f"/{session['sessionId']}"
        self.open = lambda url: self._ask("/url", url=url)
        self.reload, self.back = partial(self._ask, "/refresh"), partial(self._ask, "/back")

    def _ask(self, path: str, **body: object) -> Any:
        address = self._url + path
        with urllib.request.urlopen(address, json.dumps(body).encode(), timeout=60) as answer:
            return json.load(answer)["value"]

    def evaluate(self, function: str, text: str) -> str:
        return str(
            self._ask("/execute/sync", script=f"return ({function})(arguments[0])", args=[text])
        )

    def act(self, type: str, *actions: dict[str, object]) -> None:
        self._ask("/actions", actions=[{"type": type, "id": type, "actions": actions}])


def start(command: list[str], running: contextlib.ExitStack, **settings: str) -> None:
    """Start a program that is stopped with everything it started."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    running.callback(process.wait, 10)
    running.callback(os.killpg, process.pid, signal.SIGTERM)
