"""Chromium, from a page of another origin, this folder: fetch and WebSocket.

A page sees no status of a refused socket: only an `error` event, then `close` with 1006.
"""

import os
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler

from playwright.sync_api import ConsoleMessage, sync_playwright

SCRIPT = """
async (env) => {
  globalThis.process = { env }
  await import('/with_fetch.mjs')
  const { key, messages, report, time } = await import('/script.mjs')

  report('refused', await new Promise((resolve) => {
    const ws = new WebSocket(time), events = []
    ws.onerror = () => events.push('error')
    ws.onclose = (event) => resolve({events, code: event.code})
  }))

  const types = [], ws = new WebSocket(`${time}?api_key=${key}`)
  ws.onmessage = (event) => {
    types.push(JSON.parse(event.data).type)
    if (types.length === messages) report('ticks', types)
  }
  report('closed', await new Promise((resolve) => (ws.onclose = (event) => resolve(event.code))))
}
"""


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
