// got: its default retries wait for Retry-After; nothing has to be set.
import got from 'got'
import { ask, url } from './script.mjs'

const get = (path, key) => got(url + path, { headers: { 'X-API-Key': key } }).json()

await ask(get)
