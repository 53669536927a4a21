// ratelimit-header-parser 0.1: it takes `RateLimit` for the form of draft 7 (`limit=..., reset=...`)
// and finds no number in it. Given the X-RateLimit headers alone, it reads them.
import { parseRateLimit } from 'ratelimit-header-parser'
import { key, limited, report, url } from './script.mjs'

const response = await fetch(url + limited, { headers: { 'X-API-Key': key } })
const older = [...response.headers].filter(([name]) => name.startsWith('x-ratelimit-'))
report('all headers', parseRateLimit(response).limit) // NaN is null in JSON
report('older headers', parseRateLimit(new Headers(older)).limit)
