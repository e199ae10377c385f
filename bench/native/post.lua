-- wrk's request and result: `wrk ... -s post.lua URL -- MODEL KEY`. The same body as request() in http.hpp.
function init(args)
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  wrk.headers["Authorization"] = "Bearer " .. args[2]
  wrk.body = '{"model":"' .. args[1] .. '","max_tokens":4096,"messages":[{"role":"user","content":'
    .. '"Write a few words about the sea, its tides and its light."}]}'
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('{"requests":%d,"requests_s":%.2f,"p50_ms":%.3f,"p99_ms":%.3f,"refused":%d,"broken":%d}\n',
    summary.requests, summary.requests / (summary.duration / 1e6), latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
