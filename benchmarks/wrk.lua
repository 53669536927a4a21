-- For wrk: send the keys in the file KEYS in turn, and print requests a second, p50 and p99 in
-- milliseconds, the number of requests, and of those that failed.
local requests, turn = {}, 0

function init()
  for key in io.lines(os.getenv("KEYS")) do
    requests[#requests + 1] = wrk.format(nil, nil, {["Host"] = "localhost", ["X-API-Key"] = key})
  end
  math.randomseed(os.time())
  turn = math.random(#requests)
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local errors = summary.errors
  print("figures", 1e6 * summary.requests / summary.duration, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, summary.requests, errors.status + errors.connect + errors.read + errors.timeout)
end
