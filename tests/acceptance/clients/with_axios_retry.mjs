// axios-retry: its default retries wait for Retry-After; nothing has to be set.
import axios from 'axios'
import axiosRetry from 'axios-retry'
import { ask, url } from './script.mjs'

const client = axios.create({ baseURL: url })
axiosRetry(client)
const get = async (path, key) => (await client.get(path, { headers: { 'X-API-Key': key } })).data

await ask(get)
