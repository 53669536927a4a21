// axios-retry: its default retries wait for Retry-After; nothing has to be set.
import axios from 'axios'
import axiosRetry from 'axios-retry'
import { calls, key, limited, limitedKey, paths, report, url } from './script.mjs'

const client = axios.create({ baseURL: url })
axiosRetry(client)
const get = async (path, key) => (await client.get(path, { headers: { 'X-API-Key': key } })).data

const answers = {}
for (const path of paths) answers[path] = await get(path, key)
report('answers', answers)

const moments = []
for (let call = 0; call < calls; call++) moments.push((await get(limited, limitedKey)).timestamp)
report('limited', moments)
