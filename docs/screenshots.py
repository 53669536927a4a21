"""Take the picture in this folder from a running service: `python docs/screenshots.py`.

Needs the playwright package and Chromium. `console.sha256` says of what the picture was taken, so
that `.ci/run` can tell when it no longer shows what there is.
"""

import secrets
import shutil
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from playwright.sync_api import ViewportSize, sync_playwright

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from helpers.server import Server  # noqa: E402

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
SIZE = ViewportSize(width=960, height=480)  # README shows it 300 pixels high
SHOWN = [
    "static/app.css",
    "static/app.js",
    *(f"templates/{n}.html" for n in ("console", "layout", "parts", "reference")),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as runner:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = runner.chromium.launch(executable_path=path, args=["--no-sandbox"])
        server = Server(Path(directory), PORT="8000")
        server.port, server.url = 8000, "http://127.0.0.1:8000"
        server.start()
        try:
            page = browser.new_page(base_url=server.url, viewport=SIZE, device_scale_factor=1.5)
            sign_up(page)
            try_console(page, server.new_key("my laptop"))
            page.screenshot(path=HERE / "console.png")
        finally:
            server.close()
    lines = [
        f"{sha256((HERE.parent / 'web' / name).read_bytes()).hexdigest()}  web/{name}\n"
        for name in SHOWN
    ]
    (HERE / "console.sha256").write_text("".join(lines))


def sign_up(page: Any) -> None:
    page.goto("/sign-up")
    page.get_by_label("User name").fill("ada")
    page.get_by_label("Email").fill("ada@example.com")
    page.get_by_label("Password", exact=True).fill(secrets.token_urlsafe())
    page.get_by_role("button", name="Sign up").click()


def try_console(page: Any, key: str) -> None:
    """The key is shown as dots, in its field and in the code."""
    page.goto("/")
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Try it: /api/v1/protected/test").click()
    page.get_by_text("200 OK").wait_for()
    page.mouse.move(0, 0)  # no button under the pointer
    page.locator("[data-path$='/protected/test']").evaluate("card => card.scrollIntoView()")
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(300)


if __name__ == "__main__":
    main()
