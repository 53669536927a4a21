// got: its default retries wait for Retry-After; nothing has to be set.
import got from 'got'
import { calls, key, limited, limitedKey, paths, report, url } from './script.mjs'

const get = (path, key) => got(url + path, { headers: { 'X-API-Key': key } }).json()

const answers = {}
for (const path of paths) answers[path] = await get(path, key)
report('answers', answers)

const moments = []
for (let call = 0; call < calls; call++) moments.push((await get(limited, limitedKey)).timestamp)
report('limited', moments)
