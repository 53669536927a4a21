// ws: a refusal has the status and the problem, in the event `unexpected-response`.
import WebSocket from 'ws'
import { key, messages, report, time } from './script.mjs'

const refused = await new Promise((resolve) => {
  new WebSocket(time).on('unexpected-response', (request, response) => {
    let body = ''
    response.on('data', (data) => (body += data))
    response.on('end', () => resolve({ status: response.statusCode, code: JSON.parse(body).code }))
  })
})
report('refused', refused)

const types = []
const ws = new WebSocket(time, { headers: { 'X-API-Key': key } })
ws.on('message', (data) => {
  types.push(JSON.parse(data).type)
  if (types.length === messages) report('ticks', types)
})
ws.on('close', (code) => report('closed', code))
