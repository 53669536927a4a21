"""Take the pictures in this folder from a running service: `python docs/screenshots.py`.

Needs the playwright package and Chromium; the key in the pictures is revoked afterwards.
"""

import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import ViewportSize, sync_playwright

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from serving import Server  # noqa: E402

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
NARROW = ViewportSize(width=620, height=1080)  # README shows two pictures side by side


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as runner:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = runner.chromium.launch(executable_path=path, args=["--no-sandbox"])
        server = Server(Path(directory), PORT="8000")
        server.port, server.url = 8000, "http://127.0.0.1:8000"
        server.start()
        try:
            visit(browser.new_page(base_url=server.url, viewport=NARROW, device_scale_factor=2))
        finally:
            server.close()


def visit(page: Any) -> None:
    sign_up(page)
    key = create_key(page)
    page.screenshot(path=HERE / "key-created.png")
    try_console(page, key)
    page.screenshot(path=HERE / "console.png")
    page.goto("/settings/security")
    page.get_by_role("link", name="Revoke").click()
    page.get_by_role("button", name="Revoke").click()
    page.get_by_text("is revoked").wait_for()


def sign_up(page: Any) -> None:
    page.goto("/sign-up")
    page.get_by_label("User name").fill("ada")
    page.get_by_label("Email").fill("ada@example.com")
    page.get_by_label("Password", exact=True).fill(secrets.token_urlsafe())
    page.get_by_role("button", name="Sign up").click()


def create_key(page: Any) -> str:
    page.get_by_label("Name", exact=True).fill("my laptop")
    page.get_by_label("Type").select_option("Production")
    page.get_by_role("button", name="Create key").click()
    key: str = page.locator("#key").inner_text()
    page.get_by_role("button", name="Try it").click()
    page.get_by_text("200 OK").wait_for()
    settle(page)
    return key


def try_console(page: Any, key: str) -> None:
    page.goto("/")
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Try it: /demo/year").click()
    page.get_by_text('"year": ').wait_for()
    settle(page)


def settle(page: Any) -> None:
    """Show the page from its beginning, with no button under the pointer."""
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    page.wait_for_timeout(300)


if __name__ == "__main__":
    main()
