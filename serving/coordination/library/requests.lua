-- Requests admitted and not settled, the slots they hold, and who gets a slot that is free.
--
-- fl:g:p:<process>: a hash of what a gateway process holds: id -> (second of admission, replica or '' while waiting, slots,
-- number in the queue) followed by the arguments of admit as they came; e = the epoch of its connection, n = the last
-- batch of settlements. fl:g:slots: replica -> slots in use. fl:g:f:<tenant>:<fingerprint> = (number, times turned
-- away, until when that is remembered).
--
-- Arguments of admit, by position:
local PROCESS, EPOCH, ID, SCOPES, INPUT, OUTPUT, COST = 1, 2, 3, 4, 5, 6, 7
local POOL, CANDIDATES, LEAST, SLOTS = 8, 9, 10, 11
local TENANT, WEIGHT, CLASS, MAX_QUEUED, MAX_TOKENS, FINGERPRINT = 12, 13, 14, 15, 16, 17

local function process_key(process)
  return PREFIX .. 'p:' .. process
end

local function parse_record(packed, process, id)
  local offset, second, replica, slots, number = cmsgpack.unpack_limit(packed, 4, 0)
  local body = string.sub(packed, offset + 1)
  return {
    process = process, id = id, second = second, replica = replica, slots = slots, number = number,
    body = body, args = cmsgpack.unpack(body),
  }
end

local function read_record(process, id)
  local packed = redis.call('HGET', process_key(process), id)
  return packed and parse_record(packed, process, id)
end

local function save_record(record)
  local header = cmsgpack.pack(record.second, record.replica, record.slots, record.number)
  redis.call('HSET', process_key(record.process), record.id, header .. record.body)
end

local function cost_of(args)
  return math.max(1, args[INPUT] + args[OUTPUT])
end

local function tickets_key(pool, args)
  return PREFIX .. 'q:' .. pool .. ':' .. args[CLASS] .. ':' .. args[TENANT]
end

-- Slots in use of each candidate, in their order.
local function slots_in_use(candidates)
  local ids, used = {}, {}
  for index = 1, #candidates do
    ids[index] = candidates[index][1]
  end
  if #ids > 0 then
    used = redis.call('HMGET', PREFIX .. 'slots', unpack(ids))
  end
  for index = 1, #ids do
    used[index] = tonumber(used[index] or 0)
  end
  return used
end

-- The replica to take and how many of its slots: a request that wants more than any has takes the most that one has.
-- used: in the candidates' order; held: replicas kept free for somebody who was first.
local function choose(args, used, held)
  local candidates, wanted, largest = args[CANDIDATES], args[SLOTS], 0
  for index = 1, #candidates do
    local total = candidates[index][2]
    largest = math.max(largest, total == 0 and wanted or total)
  end
  wanted = math.min(wanted, largest)
  local best, best_share
  for index = 1, #candidates do
    local replica, total = candidates[index][1], candidates[index][2]
    if not held[replica] and (total == 0 or used[index] + wanted <= total) then
      if not args[LEAST] then
        return replica, wanted
      end
      local share = total == 0 and 0 or used[index] / total
      if not best or share < best_share then
        best, best_share = replica, share
      end
    end
  end
  return best, wanted
end

local function take_slots(record, replica, slots)
  record.replica, record.slots = replica, slots
  redis.call('HINCRBY', PREFIX .. 'slots', replica, slots)
end

local function free_slots(record)
  if redis.call('HINCRBY', PREFIX .. 'slots', record.replica, -record.slots) <= 0 then
    redis.call('HDEL', PREFIX .. 'slots', record.replica)
  end
end

local function enqueue(queue, record)
  local args = record.args
  redis.call('ZADD', tickets_key(queue.pool, args), record.number, record.process .. ' ' .. record.id)
  join_ring(rings_of(queue)[args[CLASS]], args[TENANT], args[WEIGHT])
  queue.depth, queue.tokens = queue.depth + 1, queue.tokens + cost_of(args)
  local totals = {}
  for index = 1, #args[CANDIDATES] do
    totals[2 * index - 1], totals[2 * index] = args[CANDIDATES][index][1], args[CANDIDATES][index][2]
  end
  if #totals > 0 then
    redis.call('HSET', PREFIX .. 'n:' .. queue.pool, unpack(totals))
  end
end

local function dequeue(queue, record)
  local args = record.args
  local ring = rings_of(queue)[args[CLASS]]
  redis.call('ZREM', tickets_key(queue.pool, args), record.process .. ' ' .. record.id)
  leave_ring(ring, find_row(ring, args[TENANT]))
  queue.depth, queue.tokens = queue.depth - 1, queue.tokens - cost_of(args)
end

-- Slots of the pool's replicas: {total and in use by replica}.
local function capacity(pool)
  local totals, used, ids = {}, {}, {}
  local found = redis.call('HGETALL', PREFIX .. 'n:' .. pool)
  for index = 1, #found, 2 do
    ids[#ids + 1] = found[index]
    totals[found[index]] = tonumber(found[index + 1])
  end
  local slots = #ids > 0 and redis.call('HMGET', PREFIX .. 'slots', unpack(ids)) or {}
  for index = 1, #ids do
    used[ids[index]] = tonumber(slots[index] or 0)
  end
  return totals, used
end

local function any_free(totals, used, held)
  for replica, total in pairs(totals) do
    if not held[replica] and (total == 0 or used[replica] < total) then
      return true
    end
  end
  return false
end

local function first_ticket(pool, class, tenant)
  local key = PREFIX .. 'q:' .. pool .. ':' .. class .. ':' .. tenant
  local process, id = string.match(redis.call('ZRANGE', key, 0, 0)[1], '^(%S+) (.+)$')
  return read_record(process, id)
end

-- Give `replica` to a waiting request, and tell its process unless it is the one being decided about.
local function give(queue, row, record, replica, slots, before, mine)
  row[2] = row[2] - cost_of(record.args)
  dequeue(queue, record)
  take_slots(record, replica, slots)
  save_record(record)
  if record.id == mine then
    return { replica, slots, before }
  end
  redis.call('PUBLISH', PREFIX .. 'c:' .. record.process, cmsgpack.pack({ record.id, replica, slots, before }))
  return nil
end

-- Serve one class of a queue. Whose turn it is but for whom no slot is free keeps its replicas free for itself, so that a
-- large request is not overtaken for ever, while others may use the rest.
local function grant_class(queue, class, totals, used, held, mine)
  local ring, skipped, heads, granted = rings_of(queue)[class], {}, {}, nil
  local function head(row)
    heads[row[1]] = heads[row[1]] or first_ticket(queue.pool, class, row[1])
    return heads[row[1]]
  end
  local function cost(row)
    return cost_of(head(row).args)
  end
  while #ring.rows > 0 and any_free(totals, used, held) do
    local index = turn(ring, skipped, cost)
    if not index then
      break
    end
    local row = ring.rows[index]
    local record, before = head(row), {}
    for place, candidate in ipairs(record.args[CANDIDATES]) do
      before[place] = used[candidate[1]] or 0
    end
    local replica, slots = choose(record.args, before, held)
    if replica then
      heads[row[1]] = nil
      granted = give(queue, row, record, replica, slots, before, mine) or granted
      used[replica] = (used[replica] or 0) + slots
    else
      skipped[row[1]] = true
      for _, candidate in ipairs(record.args[CANDIDATES]) do
        held[candidate[1]] = true
      end
    end
  end
  return granted
end

-- Hand out what is free to who waits. Returns {replica, slots, in use before} of `mine` if it was among them.
local function grant(queue, mine)
  if queue.depth == 0 then
    return nil
  end
  local totals, used = capacity(queue.pool)
  local held, granted = {}, nil
  for class = 0, CLASSES do
    granted = grant_class(queue, class, totals, used, held, mine) or granted
  end
  return granted
end

local function grant_all(queues)
  for _, queue in pairs(queues) do
    grant(queue, nil)
    save_queue(queue)
  end
end

-- Take a request off everything that it holds. used: {input, output, cost}, with which it is settled; 'refused': it counts
-- for nothing; 'lost': rates stay as reserved, for it may have run.
local function release(record, used, second, now, queues)
  local args = record.args
  local requests, input, output, cost = 0, 0, 0, 0
  if used == 'refused' then
    requests, input, output = -1, -args[INPUT], -args[OUTPUT]
  elseif used ~= 'lost' then
    input, output, cost = used[1] - args[INPUT], used[2] - args[OUTPUT], used[3]
  end
  for _, limits in ipairs(args[SCOPES]) do
    local scope = open_scope(limits[1], second, record.second)
    scope.concurrency = math.max(0, scope.concurrency - 1)
    if scope.live then
      add(scope, requests, input, output)
      save_scope(scope)
    elseif not scope.fresh then
      redis.call('HSET', scope.key, 'c', scope.concurrency)
    end
    for _, budget in ipairs(limits[7]) do
      unreserve(budget[1], args[COST], cost)
    end
  end
  local queue = open_queue(queues, args[POOL])
  if record.replica == '' then
    dequeue(queue, record)
  else
    free_slots(record)
    if type(used) == 'table' then
      completed(args[POOL], now)
    end
  end
  redis.call('HDEL', process_key(record.process), record.id)
end

local function retry_key(args)
  return PREFIX .. 'f:' .. args[TENANT] .. ':' .. args[FINGERPRINT]
end

-- What is known of a client call that was turned away before: its number in the queue (nil: none) and how often.
local function earlier_try(args, now)
  local found = args[FINGERPRINT] ~= '' and redis.call('GET', retry_key(args))
  if not found then
    return nil, 0
  end
  local number, times, till = cmsgpack.unpack(found)
  if till <= now then
    return nil, 0
  end
  return number, times
end

local function remember_try(args, number, now)
  if args[FINGERPRINT] ~= '' then
    local _, times = earlier_try(args, now)
    redis.call('SET', retry_key(args), cmsgpack.pack(number, times + 1, now + RETRY_TTL), 'EX', RETRY_TTL)
  end
end

local function next_number()
  return redis.call('INCR', PREFIX .. 'seq')
end
