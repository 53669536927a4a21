// What with_chromium.py runs in a page of another origin. A page sees no status of a refused
// socket: only an `error` event, then `close` with 1006.
import './with_fetch.mjs'
import { key, messages, report, time } from './script.mjs'

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
