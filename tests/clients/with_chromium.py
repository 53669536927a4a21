"""Chromium, from a page of another origin: fetch and WebSocket.

A page sees no status of a refused socket: only an `error` event, then `close` with 1006.
"""

import shutil
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler

import script
from playwright.sync_api import sync_playwright

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
SCRIPT = """
async ({URL, KEY, LIMITED_KEY, PATHS, LIMITED, CALLS, TIME, MESSAGES}) => {
  const get = async (path, key) => {
    for (;;) {
      const response = await fetch(URL + path, {headers: {'X-API-Key': key}})
      if (response.status !== 429) return response.json()
      await new Promise((done) => setTimeout(done, 1000 * response.headers.get('Retry-After')))
    }
  }
  const answers = {}
  for (const path of PATHS) answers[path] = await get(path, KEY)
  report('answers', answers)

  const moments = []
  for (let call = 0; call < CALLS; call++) moments.push((await get(LIMITED, LIMITED_KEY)).timestamp)
  report('limited', moments)

  report('refused', await new Promise((resolve) => {
    const ws = new WebSocket(TIME), events = []
    ws.onerror = () => events.push('error')
    ws.onclose = (event) => resolve({events, code: event.code})
  }))

  const types = [], ws = new WebSocket(`${TIME}?api_key=${KEY}`)
  ws.onmessage = (event) => {
    types.push(JSON.parse(event.data).type)
    if (types.length === MESSAGES) report('ticks', types)
  }
  report('closed', await new Promise((resolve) => (ws.onclose = (event) => resolve(event.code))))
}
"""

elsewhere = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
given = {name: value for name, value in vars(script).items() if name.isupper()}
with sync_playwright() as runner:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    browser = runner.chromium.launch(executable_path=path, args=["--no-sandbox"])
    page = browser.new_page()
    page.expose_function("report", script.report)
    page.goto(f"http://127.0.0.1:{elsewhere.server_port}/")
    page.evaluate(SCRIPT, given)
    browser.close()
