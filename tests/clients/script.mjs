// What every Node script in this directory shares; script.py says what the steps are.
export const url = process.env.URL
export const key = process.env.KEY
export const limitedKey = process.env.LIMITED_KEY
export const paths = ['demo/year', 'status', 'protected/test', 'user/me', 'usage/stats'].map(
  (name) => `/api/v1/${name}`,
)
export const limited = '/api/v1/protected/test'
export const calls = 3 // with the limited key
export const time = `ws${url.slice('http'.length)}/api/v1/ws/time`
export const messages = 4 // one greeting and three seconds

export function report(step, value) {
  console.log(JSON.stringify({ [step]: value }))
}
