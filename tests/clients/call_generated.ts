// Call the service with what openapi-typescript made of openapi.json: the types in `api.ts`.
import createClient from 'openapi-fetch'
import type { paths } from './api.js'

const client = createClient<paths>({ baseUrl: process.env.URL })
const headers = { 'X-API-Key': process.env.KEY }

const good = await client.GET('/api/v1/usage/stats', { headers })
const remaining: number | undefined = good.data?.requests_remaining
const bad = await client.GET('/api/v1/usage/stats')
const code: 'missing_api_key' | 'invalid_api_key' | undefined =
  bad.error?.status === 401 ? bad.error.code : undefined
console.log(JSON.stringify({ remaining, code }))
