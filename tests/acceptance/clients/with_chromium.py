"""Chromium, from a page of another origin, this folder: fetch and WebSocket in chromium.mjs."""

import os
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler

from playwright.sync_api import ConsoleMessage, sync_playwright

SCRIPT = "async (env) => { globalThis.process = { env }; await import('/chromium.mjs') }"


def show(message: ConsoleMessage) -> None:
    """Print what `report` logs, and not what the browser logs by itself."""
    if message.type == "log":
        print(message.text, flush=True)


elsewhere = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
with sync_playwright() as runner:
    browser = runner.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
    page = browser.new_page()
    page.on("console", show)
    page.goto(f"http://127.0.0.1:{elsewhere.server_port}/")
    page.evaluate(SCRIPT, {name: os.environ[name] for name in ("URL", "KEY", "LIMITED_KEY")})
    browser.close()
