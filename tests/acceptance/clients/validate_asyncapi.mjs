// Print what @asyncapi/parser, which `asyncapi validate` runs, finds wrong with a file.
import { readFileSync } from 'node:fs'
import { Parser } from '@asyncapi/parser'

const found = await new Parser().validate(readFileSync(process.argv[2], 'utf8'))
process.exitCode = found.length && 1
for (const { message, path } of found) console.log(`${path.join('.')}: ${message}`)
