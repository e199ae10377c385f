-- What happens to a request that was admitted: its turn does not come, it tries elsewhere, it is over.

-- {process, batch, {{id, {input, output, cost} or false, {names of its budgets}}, ...}} -> {settlements of requests unknown}
-- Batches of a process are numbered; one that was seen is ignored. An unknown request only counts what it spent.
local function settle(_, argv)
  local process, batch, settlements = unpack(cmsgpack.unpack(argv[1]))
  local key, ids = process_key(process), { 'e', 'n' }
  for index, settlement in ipairs(settlements) do
    ids[index + 2] = settlement[1]
  end
  local found = redis.call('HMGET', key, unpack(ids))
  if batch <= tonumber(found[2] or 0) then
    return cmsgpack.pack({ 0 })
  end
  local second, now = clock()
  local queues, unknown = {}, 0
  for index, settlement in ipairs(settlements) do
    local id, used, budgets = unpack(settlement)
    if found[index + 2] then
      local record = parse_record(found[index + 2], process, id)
      release(record, used or 'refused', second, now, queues)
      if used and record.args[FINGERPRINT] ~= '' then
        redis.call('DEL', retry_key(record.args))
      end
    else
      unknown = unknown + 1
      if used and used[3] > 0 then
        for _, name in ipairs(budgets) do
          spend(name, used[3])
        end
      end
    end
  end
  redis.call('HSET', key, 'n', batch)
  if not found[1] then
    redis.call('EXPIRE', key, SCOPE_TTL)
  end
  grant_all(queues)
  return cmsgpack.pack({ unknown })
end

-- {process, epoch, id}: its turn did not come in time -> {'timeout', retry after, depth} | {'granted', replica, slots, in use}:
-- it came just now | {'unknown'}
local function timeout(_, argv)
  local process, epoch, id = unpack(cmsgpack.unpack(argv[1]))
  local record = member(process, epoch) and read_record(process, id)
  if not record then
    return cmsgpack.pack({ 'unknown' })
  end
  if record.replica ~= '' then
    return cmsgpack.pack({ 'granted', record.replica, record.slots, {} })
  end
  local second, now = clock()
  local queues = {}
  remember_try(record.args, record.number, now)
  release(record, 'refused', second, now, queues)
  local depth = queues[record.args[POOL]].depth
  grant_all(queues)
  return cmsgpack.pack({ 'timeout', drain_s(record.args[POOL], depth + 1, now), depth })
end

-- {process, epoch, id, pool, candidates, least}: another attempt, before all who wait -> as admit without allowances, or
-- {'unknown'}. One that waits already gets its new candidates and keeps its number.
local function move(_, argv)
  local process, epoch, id, pool, candidates, least = unpack(cmsgpack.unpack(argv[1]))
  local record = member(process, epoch) and read_record(process, id)
  if not record then
    return cmsgpack.pack({ 'unknown' })
  end
  local args, queues = record.args, {}
  if record.replica == '' then
    dequeue(open_queue(queues, args[POOL]), record)
  else
    free_slots(record)
    open_queue(queues, args[POOL])
    args[CLASS], record.number = 0, next_number()
  end
  args[POOL], args[CANDIDATES], args[LEAST] = pool, candidates, least
  record.body, record.replica, record.slots = cmsgpack.pack(args), '', 0
  local queue, used = open_queue(queues, pool), slots_in_use(candidates)
  local replica, slots = choose(args, used, {})
  local reply
  if replica and (args[CLASS] == 0 or queue.depth == 0) then
    take_slots(record, replica, slots)
    save_record(record)
    reply = { 'granted', replica, slots, used, false, false, 0 }
  else
    enqueue(queue, record)
    save_record(record)
    local granted = grant(queue, id)
    if granted then
      reply = { 'granted', granted[1], granted[2], used, false, false, 0 }
    else
      local rank = redis.call('ZRANK', tickets_key(pool, args), process .. ' ' .. id)
      reply = { 'waiting', position_of(queue, args[CLASS], args[TENANT], rank), queue.depth, used, false, false, 0 }
    end
  end
  grant_all(queues)
  return cmsgpack.pack(reply)
end
