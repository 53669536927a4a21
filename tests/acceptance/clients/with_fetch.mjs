// Node's fetch: it retries no answer by itself; a loop of five lines does.
import { ask, url } from './script.mjs'

async function get(path, key) {
  for (;;) {
    const response = await fetch(url + path, { headers: { 'X-API-Key': key } })
    if (response.status !== 429) return response.json()
    await new Promise((done) => setTimeout(done, 1000 * response.headers.get('Retry-After')))
  }
}

await ask(get)
