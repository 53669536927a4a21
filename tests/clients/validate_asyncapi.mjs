// Print what @asyncapi/parser, which `asyncapi validate` runs, finds wrong with a file.
import { readFileSync } from 'node:fs'
import { Parser } from '@asyncapi/parser'

const found = await new Parser().validate(readFileSync(process.argv[2], 'utf8'))
const newer = 'asyncapi-latest-version' // 3.0 is meant
for (const { code, message, path } of found) {
  if (code !== newer) console.log(`${path.join('.')}: ${message}`)
}
