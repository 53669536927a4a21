// What every Node script in this directory shares; script.py says what the steps are.
export const url = process.env.URL
export const key = process.env.KEY
const limitedKey = process.env.LIMITED_KEY
const names = ['demo/year', 'status', 'protected/test', 'user/me', 'usage/stats']
const calls = 3 // with the limited key
export const time = `ws${url.slice('http'.length)}/api/v1/ws/time`
export const messages = 4 // one greeting and three seconds

export function report(step, value) {
  console.log(JSON.stringify({ [step]: value }))
}

// The steps of an HTTP client; `get` asks with a key, and returns the body.
export async function ask(get) {
  const answers = {}
  for (const path of names.map((name) => `/api/v1/${name}`)) answers[path] = await get(path, key)
  report('answers', answers)

  const moments = []
  while (moments.length < calls) {
    moments.push((await get('/api/v1/protected/test', limitedKey)).timestamp)
  }
  report('limited', moments)
}
