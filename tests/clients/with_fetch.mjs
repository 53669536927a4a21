// Node's fetch: it retries no answer by itself; a loop of five lines does.
import { calls, key, limited, limitedKey, paths, report, url } from './script.mjs'

async function get(path, key) {
  for (;;) {
    const response = await fetch(url + path, { headers: { 'X-API-Key': key } })
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
