"""Take the picture in this folder, of two pages: `python docs/screenshots.py`.

Needs the playwright package and Chromium. `console.sha256` says of what the picture was taken, so
that `.ci/run` can tell when it no longer shows what there is.
"""

import secrets
import shutil
import sys
import tempfile
import time
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from playwright.sync_api import ViewportSize, sync_playwright

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from helpers.server import Server  # noqa: E402

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
SIZE = ViewportSize(width=1024, height=720)  # README shows both pages 300 pixels high
SHOWN = [
    "static/app.css",
    "static/app.js",
    *(f"templates/{n}.html" for n in ("console", "layout", "parts", "reference", "security")),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as runner:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = runner.chromium.launch(executable_path=path, args=["--no-sandbox"])
        server = Server(Path(directory), PORT="8000")
        server.port, server.url = 8000, "http://127.0.0.1:8000"
        with server.start():
            page = browser.new_page(base_url=server.url, viewport=SIZE)
            sign_up(page)
            shots = [show_keys(page, server), try_console(page, server.new_key("my laptop"))]
            side_by_side(browser, *reversed(shots))
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


def try_console(page: Any, key: str) -> bytes:
    """The key is shown as dots, in its field and in the code."""
    page.goto("/")
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Send GET /api/v1/protected/test").click()
    page.get_by_text("left this hour").wait_for()
    page.evaluate("scrollTo(0, 0)")
    return picture(page)


def show_keys(page: Any, server: Server) -> bytes:
    """Two keys, with a day of requests."""
    for name in ("laptop", "phone app"):
        page.goto("/settings/security")
        page.evaluate("document.querySelector('.new-key').open = true")
        page.get_by_label("Name", exact=True).fill(name)
        page.get_by_role("button", name="Create key").click()
    now = int(time.time())
    this_hour = now // 3600 * 3600
    used = "used = CASE name WHEN 'laptop' THEN 130 ELSE 870 END, total = 2170, reset = ?"
    server.execute(f"UPDATE api_key SET last_used_at = ?, {used}", now, this_hour + 3600)
    for age in range(24):
        requests = 40 + 11 * age * (24 - age) % 290
        values = f"SELECT {this_hour - 3600 * age}, id, {requests} FROM api_key LIMIT 1"
        server.execute(f"INSERT INTO hourly_usage (hour, key_id, requests) {values}")
    page.goto("/settings/security")
    return picture(page)


def picture(page: Any) -> bytes:
    page.mouse.move(0, 0)  # no button under the pointer
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(300)
    return bytes(page.screenshot())


def side_by_side(browser: Any, *pictures: bytes) -> None:
    """Half as large as the pages are, and sharp on screens with more pixels."""
    size = ViewportSize(width=SIZE["width"] + 12, height=SIZE["height"] // 2)
    page = browser.new_page(viewport=size, device_scale_factor=1.5)
    sources = [f"data:image/png;base64,{b64encode(each).decode()}" for each in pictures]
    images = "".join(f'<img src="{source}" width="{SIZE["width"] // 2}">' for source in sources)
    page.set_content(f'<body style="margin: 0; display: flex; gap: 12px">{images}')
    page.screenshot(path=HERE / "console.png", omit_background=True)


if __name__ == "__main__":
    main()
