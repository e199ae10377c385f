-- The queue of a pool: classes in strict order, within a class deficit round robin over tenants, within a tenant by number.
--
-- fl:g:depth, fl:g:tokens: hashes pool -> requests and tokens waiting. fl:g:q:<pool>: a hash class -> (position of the
-- head, {{tenant, deficit, weight, waiting}, ...}). fl:g:q:<pool>:<class>:<tenant>: a sorted set of "<process> <id>" by
-- number. fl:g:n:<pool>: replica -> slots, of the candidates of who waits. Class 0 is for requests that already ran once.

local CLASSES = 3
local QUANTUM = 1024 -- tokens of credit in each round, at weight 100
local DRAIN_S = 30 -- completions are counted in spans of this length
local RETRY_TTL = 120

local function open_queue(queues, pool)
  local queue = queues[pool]
  if not queue then
    local depth = tonumber(redis.call('HGET', PREFIX .. 'depth', pool) or 0)
    queue = { pool = pool, depth = depth, was = depth, tokens = 0 }
    queues[pool] = queue
  end
  return queue
end

local function rings_of(queue)
  if not queue.rings then
    local found = redis.call('HMGET', PREFIX .. 'q:' .. queue.pool, 0, 1, 2, 3)
    queue.rings = {}
    for class = 0, CLASSES do
      local ring = { head = 1, rows = {} }
      if found[class + 1] then
        ring.head, ring.rows = cmsgpack.unpack(found[class + 1])
      end
      queue.rings[class] = ring
    end
  end
  return queue.rings
end

local function save_queue(queue)
  if queue.depth == 0 then
    if queue.was > 0 then
      redis.call('DEL', PREFIX .. 'q:' .. queue.pool, PREFIX .. 'n:' .. queue.pool)
      redis.call('HDEL', PREFIX .. 'depth', queue.pool)
      redis.call('HDEL', PREFIX .. 'tokens', queue.pool)
    end
    return
  end
  for class, ring in pairs(queue.rings or {}) do
    if ring.changed and #ring.rows == 0 then
      redis.call('HDEL', PREFIX .. 'q:' .. queue.pool, class)
    elseif ring.changed then
      redis.call('HSET', PREFIX .. 'q:' .. queue.pool, class, cmsgpack.pack(ring.head, ring.rows))
    end
  end
  if queue.depth ~= queue.was then
    redis.call('HSET', PREFIX .. 'depth', queue.pool, queue.depth)
  end
  if queue.tokens ~= 0 then
    redis.call('HINCRBY', PREFIX .. 'tokens', queue.pool, nano(queue.tokens))
  end
end

local function quantum(row)
  return math.max(1, math.floor(QUANTUM * row[3] / 100))
end

local function find_row(ring, tenant)
  for index = 1, #ring.rows do
    if ring.rows[index][1] == tenant then
      return index
    end
  end
  return nil
end

-- A tenant that begins to wait comes last in the round, which is just before the head.
local function join_ring(ring, tenant, weight)
  ring.changed = true
  local index = find_row(ring, tenant)
  if index then
    ring.rows[index][3] = weight
    ring.rows[index][4] = ring.rows[index][4] + 1
    return
  end
  local row = { tenant, 0, weight, 1 }
  if #ring.rows == 0 then
    row[2] = quantum(row)
    ring.head = 1
    ring.rows[1] = row
  else
    table.insert(ring.rows, ring.head, row)
    ring.head = ring.head + 1
  end
end

-- A tenant of whom nobody waits any more leaves the round and takes no credit along.
local function leave_ring(ring, index)
  ring.changed = true
  local row = ring.rows[index]
  row[4] = row[4] - 1
  if row[4] > 0 then
    return
  end
  table.remove(ring.rows, index)
  if index < ring.head then
    ring.head = ring.head - 1
  elseif index == ring.head and #ring.rows > 0 then
    ring.head = (ring.head - 1) % #ring.rows + 1
    ring.rows[ring.head][2] = ring.rows[ring.head][2] + quantum(ring.rows[ring.head])
  end
end

-- Rounds until somebody's credit pays: nobody is served in those before. nil: nobody is left.
local function idle_rounds(ring, skipped, cost_of)
  local rounds
  for _, row in ipairs(ring.rows) do
    if not skipped[row[1]] then
      local missing = math.ceil((cost_of(row) - row[2]) / quantum(row))
      rounds = math.min(rounds or missing, missing)
    end
  end
  return rounds and math.max(0, rounds)
end

-- Index of the tenant whose turn it is: the first from the head on whose credit pays its first request. nil: none is left.
local function turn(ring, skipped, cost_of)
  local count = #ring.rows
  for _ = 1, 2 do
    for _ = 1, count do
      local row = ring.rows[ring.head]
      if not skipped[row[1]] and row[2] >= cost_of(row) then
        return ring.head
      end
      ring.changed = true
      ring.head = ring.head % count + 1
      row = ring.rows[ring.head]
      if not skipped[row[1]] then
        row[2] = row[2] + quantum(row)
      end
    end
    local rounds = idle_rounds(ring, skipped, cost_of)
    if not rounds then
      return nil
    end
    for _, row in ipairs(ring.rows) do
      if not skipped[row[1]] then
        row[2] = row[2] + rounds * quantum(row)
      end
    end
  end
  return nil
end

-- How many requests are served before one that has `rank` of its own tenant's before it, and itself.
local function position_of(queue, class, tenant, rank)
  local position, rings = rank + 1, rings_of(queue)
  for above = 0, class - 1 do
    for _, row in ipairs(rings[above].rows) do
      position = position + row[4]
    end
  end
  local own = rings[class].rows[find_row(rings[class], tenant)]
  for _, row in ipairs(rings[class].rows) do
    if row ~= own then
      position = position + math.min(row[4], math.floor(rank * row[3] / own[3]))
    end
  end
  return position
end

-- fl:g:d:<pool> = (span, completions in it, in the one before, since when): what the pool finished lately.
local function completed(pool, now)
  local key, span = PREFIX .. 'd:' .. pool, math.floor(now / DRAIN_S)
  local found = redis.call('GET', key)
  local at, count, before, since = span, 0, 0, now
  if found then
    at, count, before, since = cmsgpack.unpack(found)
    if at ~= span then
      before, count, at = (at == span - 1) and count or 0, 0, span
    end
  end
  redis.call('SET', key, cmsgpack.pack(at, count + 1, before, since), 'EX', RETRY_TTL)
end

-- Whole seconds until `ahead` requests are through, by what was finished lately; 10 where nothing is known.
local function drain_s(pool, ahead, now)
  local found = redis.call('GET', PREFIX .. 'd:' .. pool)
  if not found then
    return 10
  end
  local at, count, before, since = cmsgpack.unpack(found)
  local span = math.floor(now / DRAIN_S)
  if at ~= span then
    before, count = (at == span - 1) and count or 0, 0
  end
  if count + before == 0 then
    return 60
  end
  local elapsed = math.max(0, math.min(now - since, now - (span - 1) * DRAIN_S))
  return whole_seconds(ahead * elapsed / (count + before))
end
