-- Gateway processes: fl:g:procs is a sorted set of them by the end of their lease, fl:g:beat when one was last heard.

local LEASE_S = 3
local REAPED_AT_ONCE = 500 -- requests of dead processes given back in one heartbeat

-- Give back what processes hold that have not been heard of for a lease. Nobody is dead while the clock jumped or nobody
-- could be heard.
local function reap(second, now, queues)
  local procs = PREFIX .. 'procs'
  local beat = tonumber(redis.call('GET', PREFIX .. 'beat') or now)
  redis.call('SET', PREFIX .. 'beat', string.format('%.6f', now), 'EX', SCOPE_TTL)
  if now - beat > LEASE_S - 1 or now < beat then
    for _, process in ipairs(redis.call('ZRANGE', procs, 0, -1)) do
      redis.call('ZADD', procs, now + LEASE_S, process)
    end
    return
  end
  local left = REAPED_AT_ONCE
  for _, process in ipairs(redis.call('ZRANGEBYSCORE', procs, '-inf', '(' .. string.format('%.6f', now))) do
    local key = process_key(process)
    redis.call('HDEL', key, 'e') -- a message of its that comes late is refused
    local held = redis.call('HGETALL', key)
    for index = 1, #held, 2 do
      if held[index] ~= 'n' and left > 0 then
        left = left - 1
        release(parse_record(held[index + 1], process, held[index]), 'lost', second, now, queues)
      end
    end
    if left > 0 then
      redis.call('ZREM', procs, process)
      redis.call('EXPIRE', key, SCOPE_TTL)
    end
  end
end

-- How a request stands that its process believes to wait: {id, 'waiting', position} | {id, 'granted', replica, slots} |
-- {id, 'unknown'}.
local function standing(process, id, packed, queues)
  if not packed then
    return { id, 'unknown' }
  end
  local record = parse_record(packed, process, id)
  if record.replica ~= '' then
    return { id, 'granted', record.replica, record.slots }
  end
  local args = record.args
  local rank = redis.call('ZRANK', tickets_key(args[POOL], args), process .. ' ' .. id)
  return { id, 'waiting', position_of(open_queue(queues, args[POOL]), args[CLASS], args[TENANT], rank) }
end

-- {process, epoch, {ids that it believes to wait}} -> {now, processes, {pool, depth, ...}, {replica, in use, ...}, standings}
-- or {'stranger'}. Renews the lease.
local function beat(_, argv)
  local process, epoch, waiting = unpack(cmsgpack.unpack(argv[1]))
  if not member(process, epoch) then
    return cmsgpack.pack({ 'stranger' })
  end
  local second, now = clock()
  redis.call('ZADD', PREFIX .. 'procs', string.format('%.6f', now + LEASE_S), process)
  local queues = {}
  reap(second, now, queues)
  grant_all(queues)
  local standings, fresh = {}, {}
  if #waiting > 0 then
    local found = redis.call('HMGET', process_key(process), unpack(waiting))
    for index, id in ipairs(waiting) do
      standings[index] = standing(process, id, found[index], fresh)
    end
  end
  return cmsgpack.pack({
    now, redis.call('ZCARD', PREFIX .. 'procs'), redis.call('HGETALL', PREFIX .. 'depth'),
    redis.call('HGETALL', PREFIX .. 'slots'), standings,
  })
end

-- {process, epoch}: a new connection; what older ones may still say is refused -> {last batch seen, now, processes}
local function hello(_, argv)
  local process, epoch = unpack(cmsgpack.unpack(argv[1]))
  local _, now = clock()
  local key = process_key(process)
  redis.call('HSET', key, 'e', epoch)
  redis.call('PERSIST', key)
  redis.call('ZADD', PREFIX .. 'procs', string.format('%.6f', now + LEASE_S), process)
  return cmsgpack.pack({ tonumber(redis.call('HGET', key, 'n') or 0), now, redis.call('ZCARD', PREFIX .. 'procs') })
end

-- Put a live request back as its process knows it. One that was known here had been counted in its rates already.
local function put_back(record, known, second, queues)
  local args = record.args
  for _, limits in ipairs(args[SCOPES]) do
    local scope = open_scope(limits[1], second, second)
    scope.concurrency = scope.concurrency + 1
    if not known then
      add(scope, 1, args[INPUT], args[OUTPUT])
      scope.last = second
    end
    save_scope(scope)
    for _, budget in ipairs(limits[7]) do
      reserve(budget[1], budget[2], args[COST])
    end
  end
  if record.replica == '' then
    enqueue(open_queue(queues, args[POOL]), record)
  else
    take_slots(record, record.replica, record.slots)
  end
  save_record(record)
end

-- {process, epoch, {ids that live} or false, {{arguments of admit, replica or '', slots}, ...}} -> {} or {'stranger'}. What this
-- process holds here and is not among the ids is given back; what lives is put back as told.
local function restore(_, argv)
  local process, epoch, ids, entries = unpack(cmsgpack.unpack(argv[1]))
  if not member(process, epoch) then
    return cmsgpack.pack({ 'stranger' })
  end
  local second, now = clock()
  local queues, live = {}, {}
  if ids then
    for _, id in ipairs(ids) do
      live[id] = true
    end
    for _, id in ipairs(redis.call('HKEYS', process_key(process))) do
      if id ~= 'e' and id ~= 'n' and not live[id] then
        release(read_record(process, id), 'refused', second, now, queues)
      end
    end
  end
  for _, entry in ipairs(entries) do
    local args, replica, slots = unpack(entry)
    local known = read_record(process, args[ID])
    if known then
      release(known, 'lost', second, now, queues)
    end
    put_back({
      process = process, id = args[ID], second = known and known.second or second, replica = replica, slots = slots,
      number = known and known.number > 0 and known.number or next_number(), body = cmsgpack.pack(args), args = args,
    }, known, second, queues)
  end
  grant_all(queues)
  return cmsgpack.pack({})
end

-- {process, epoch}: it ends and holds nothing any more -> {}
local function goodbye(_, argv)
  local process, epoch = unpack(cmsgpack.unpack(argv[1]))
  if member(process, epoch) then
    redis.call('ZREM', PREFIX .. 'procs', process)
    redis.call('DEL', process_key(process))
  end
  return cmsgpack.pack({})
end
