"""Chromium, from a page of another origin: fetch and WebSocket.

A page sees no status of a refused socket: only an `error` event, then `close` with 1006.
"""

import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from playwright.sync_api import sync_playwright
from script import CALLS, KEY, LIMITED, LIMITED_KEY, MESSAGES, PATHS, TIME, URL, report

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
SCRIPT = """
async ({url, key, limitedKey, paths, limited, calls, time, messages}) => {
  const get = async (path, key) => {
    for (;;) {
      const response = await fetch(url + path, {headers: {'X-API-Key': key}})
      if (response.status !== 429) return response.json()
      await new Promise((done) => setTimeout(done, 1000 * response.headers.get('Retry-After')))
    }
  }
  const answers = {}
  for (const path of paths) answers[path] = await get(path, key)
  report('answers', answers)

  const moments = []
  for (let call = 0; call < calls; call++) moments.push((await get(limited, limitedKey)).timestamp)
  report('limited', moments)

  report('refused', await new Promise((resolve) => {
    const ws = new WebSocket(time)
    const events = []
    ws.onerror = () => events.push('error')
    ws.onclose = (event) => resolve({events, code: event.code})
  }))

  const types = []
  const ws = new WebSocket(`${time}?api_key=${key}`)
  ws.onmessage = (event) => {
    types.push(JSON.parse(event.data).type)
    if (types.length === messages) report('ticks', types)
  }
  report('closed', await new Promise((resolve) => (ws.onclose = (event) => resolve(event.code))))
}
"""


class Page(BaseHTTPRequestHandler):
    """An empty page at an origin that is not the service's."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title>")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


elsewhere = HTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
given = {
    "url": URL,
    "key": KEY,
    "limitedKey": LIMITED_KEY,
    "paths": PATHS,
    "limited": LIMITED,
    "calls": CALLS,
    "time": TIME,
    "messages": MESSAGES,
}
with sync_playwright() as runner:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    browser = runner.chromium.launch(executable_path=path, args=["--no-sandbox"])
    page = browser.new_page()
    page.expose_function("report", report)
    page.goto(f"http://127.0.0.1:{elsewhere.server_port}/")
    page.evaluate(SCRIPT, given)
    browser.close()
