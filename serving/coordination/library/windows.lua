-- Sliding windows of a key or a tenant (a "scope"), and how many of its requests are admitted and not settled.
--
-- fl:g:s:<scope> is a hash: w = (second of the last change, requests, input tokens, output tokens, second of the last
-- addition) over the last 61 seconds; b0..b63 = (second, requests, input, output) for each of those seconds; c = the
-- requests admitted. A bucket counts while any part of it lies within the last 60 s, so that no window of 60 s, wherever
-- it begins, holds more than the limit.

local PREFIX = 'fl:g:'
local SPAN = 61 -- buckets that can overlap 60 s
local RING = 64 -- buckets kept
local SCOPE_TTL = 86400 -- outlives every request, whose concurrency stands here
local RATES = { 'requests_per_minute', 'tokens_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute' }

-- Valkey's time in seconds: whole, and exact.
local function clock()
  local time = redis.call('TIME')
  local second = tonumber(time[1])
  return second, second + tonumber(time[2]) / 1000000
end

local function whole_seconds(wait)
  return math.max(1, math.min(60, math.ceil(wait)))
end

local function save_scope(scope)
  redis.call('HSET', scope.key,
    'w', cmsgpack.pack(scope.at, scope.requests, scope.input, scope.output, scope.last),
    scope.field, cmsgpack.pack(scope.bucket, scope.r, scope.i, scope.o),
    'c', scope.concurrency)
  if scope.fresh then
    redis.call('EXPIRE', scope.key, SCOPE_TTL)
  end
end

-- Take what no longer overlaps the last 60 s off the sums.
local function lapse(scope, second)
  local first, last = scope.at - SPAN + 1, second - SPAN
  if last >= scope.at then
    scope.requests, scope.input, scope.output = 0, 0, 0
  else
    local fields = {}
    for gone = first, last do
      fields[#fields + 1] = 'b' .. (gone % RING)
    end
    local found = redis.call('HMGET', scope.key, unpack(fields))
    for index = 1, #fields do
      if found[index] then
        local bucket, r, i, o = cmsgpack.unpack(found[index])
        if bucket == first + index - 1 then
          scope.requests, scope.input, scope.output = scope.requests - r, scope.input - i, scope.output - o
        end
      end
    end
  end
  scope.at = second
  redis.call('HSET', scope.key, 'w', cmsgpack.pack(second, scope.requests, scope.input, scope.output, scope.last))
  redis.call('EXPIRE', scope.key, SCOPE_TTL)
end

-- The clock went back: everything counted ages anew from now, so that a step neither frees a limit nor blocks it for long.
local function collapse(scope, second)
  scope.at, scope.last = second, second
  redis.call('DEL', scope.key)
  redis.call('HSET', scope.key,
    'w', cmsgpack.pack(second, scope.requests, scope.input, scope.output, second),
    'b' .. (second % RING), cmsgpack.pack(second, scope.requests, scope.input, scope.output),
    'c', scope.concurrency)
  redis.call('EXPIRE', scope.key, SCOPE_TTL)
  scope.live = scope.bucket == second
  if scope.live then
    scope.r, scope.i, scope.o = scope.requests, scope.input, scope.output
  else
    scope.r, scope.i, scope.o = 0, 0, 0
  end
end

-- The state of a scope, brought up to `second`, with the bucket that is about to change; `live`: it is there and counts.
local function open_scope(name, second, bucket)
  local key = PREFIX .. 's:' .. name
  local field = 'b' .. (bucket % RING)
  local found = redis.call('HMGET', key, 'w', field, 'c')
  local scope = {
    key = key, field = field, bucket = bucket, concurrency = tonumber(found[3] or 0), fresh = not found[1],
    at = second, requests = 0, input = 0, output = 0, last = 0, r = 0, i = 0, o = 0, live = false,
  }
  if found[2] then
    local kept, r, i, o = cmsgpack.unpack(found[2])
    if kept == bucket and kept + SPAN > second then
      scope.r, scope.i, scope.o, scope.live = r, i, o, true
    end
  end
  if found[1] then
    scope.at, scope.requests, scope.input, scope.output, scope.last = cmsgpack.unpack(found[1])
    if scope.at < second then
      lapse(scope, second)
    elseif scope.at > second then
      collapse(scope, second)
    end
  end
  return scope
end

-- Change the open bucket. It never falls below zero, though a clock that went back and forth may have replaced what was
-- counted there.
local function add(scope, requests, input, output)
  requests, input, output = math.max(requests, -scope.r), math.max(input, -scope.i), math.max(output, -scope.o)
  scope.r, scope.i, scope.o = scope.r + requests, scope.i + input, scope.o + output
  scope.requests, scope.input, scope.output = scope.requests + requests, scope.input + input, scope.output + output
end

-- What four limits of rates compare: requests, tokens, input tokens, output tokens.
local function used_rates(scope)
  return { scope.requests, scope.input + scope.output, scope.input, scope.output }
end

-- Seconds until `need` of a rate has left the window.
local function wait_for(scope, now, rate, need)
  local fields, first = {}, scope.at - SPAN + 1
  for bucket = first, scope.at do
    fields[#fields + 1] = 'b' .. (bucket % RING)
  end
  local found, gone = redis.call('HMGET', scope.key, unpack(fields)), 0
  for index = 1, SPAN do
    if found[index] then
      local bucket, r, i, o = cmsgpack.unpack(found[index])
      if bucket == first + index - 1 then
        gone = gone + ({ r, i + o, i, o })[rate]
        if gone >= need then
          return bucket + SPAN - now
        end
      end
    end
  end
  return 60
end

-- The first limit that a request of {1, tokens, input, output} would break, as the reply of admit; nil if none.
-- limits: {scope, four rates, concurrency, budgets}; -1: no such limit.
local function rates_refuse(scope, limits, wanted, now)
  local used = used_rates(scope)
  for rate = 1, 4 do
    local allowed = limits[rate + 1]
    if allowed >= 0 and used[rate] + wanted[rate] > allowed then
      local fits = wanted[rate] <= allowed
      local wait = fits and wait_for(scope, now, rate, used[rate] + wanted[rate] - allowed) or 60
      return { RATES[rate], allowed, used[rate], wanted[rate], whole_seconds(wait), fits }
    end
  end
  if limits[6] >= 0 and scope.concurrency + 1 > limits[6] then
    return { 'concurrency', limits[6], scope.concurrency, 1, limits[6] > 0 and 1 or 60, limits[6] > 0 }
  end
  return nil
end

-- The tighter of a known allowance {limit, remaining, seconds until all is back} and this one.
local function tighter(known, allowed, used, scope, now)
  if allowed < 0 then
    return known
  end
  local left = math.max(0, allowed - used)
  if known and known[2] <= left then
    return known
  end
  return { allowed, left, used > 0 and math.max(0, scope.last + SPAN - now) or 0 }
end

-- Allowances of requests and of tokens over all scopes; false where nothing limits them.
local function allowances(scopes, limits, now)
  local requests, tokens
  for index = 1, #limits do
    local used = used_rates(scopes[index])
    requests = tighter(requests, limits[index][2], used[1], scopes[index], now)
    for rate = 2, 4 do
      tokens = tighter(tokens, limits[index][rate + 1], used[rate], scopes[index], now)
    end
  end
  return requests or false, tokens or false
end
