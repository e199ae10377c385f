-- Admission: limits asked and reserved, a slot or a place in the queue taken, in one step or not at all.

local function member(process, epoch)
  return tonumber(redis.call('HGET', process_key(process), 'e') or -1) == epoch
end

local function commit_limits(record, scopes, budgets_cost)
  local args = record.args
  for index, limits in ipairs(args[SCOPES]) do
    local scope = scopes[index]
    add(scope, 1, args[INPUT], args[OUTPUT])
    scope.concurrency, scope.last = scope.concurrency + 1, scope.at
    save_scope(scope)
    for _, budget in ipairs(limits[7]) do
      reserve(budget[1], budget[2], budgets_cost)
    end
  end
end

-- Open every scope and ask every limit. Returns the scopes, and the refusal if there is one.
local function ask_limits(args, second, now)
  local scopes, refusal = {}, nil
  local wanted = { 1, args[INPUT] + args[OUTPUT], args[INPUT], args[OUTPUT] }
  for index, limits in ipairs(args[SCOPES]) do
    scopes[index] = open_scope(limits[1], second, second)
    if not refusal then
      local found = rates_refuse(scopes[index], limits, wanted, now) or budgets_refuse(limits[7], args[COST], now)
      if found then
        refusal = { 'limit', string.match(limits[1], '^(%a+):'), unpack(found) }
      end
    end
  end
  return scopes, refusal
end

local function queue_full(queue, args)
  if queue.depth >= args[MAX_QUEUED] then
    return true
  end
  local tokens = tonumber(redis.call('HGET', PREFIX .. 'tokens', queue.pool) or 0)
  return queue.depth > 0 and tokens + cost_of(args) > args[MAX_TOKENS]
end

-- Place a request whose limits allow it. Returns its slots {replica, slots}, a place {position}, or nil: the queue is full.
local function place(record, queue, used, now)
  local args = record.args
  local replica, slots
  if queue.depth == 0 then
    replica, slots = choose(args, used, {})
  end
  if replica then
    take_slots(record, replica, slots)
    return { replica, slots }
  end
  local overtaken = queue.depth > 0
  if queue_full(queue, args) then
    remember_try(args, record.number or next_number(), now)
    return nil
  end
  record.number = record.number or next_number()
  enqueue(queue, record)
  save_record(record) -- grant reads it
  local granted = overtaken and grant(queue, record.id)
  if granted then
    record.replica, record.slots = granted[1], granted[2]
    return granted
  end
  local rank = redis.call('ZRANK', tickets_key(queue.pool, args), record.process .. ' ' .. record.id)
  return { position_of(queue, args[CLASS], args[TENANT], rank) }
end

-- -> {'granted', replica, slots, in use, requests, tokens, retries} | {'waiting', position, depth, in use, requests, tokens,
-- retries} | {'limit', scope, limit, allowed, used, wanted, retry after, retryable, requests, tokens} | {'full', depth,
-- retry after, requests, tokens} | {'stranger'}: say hello first | {'clock', now}: a budget's window is another by now
local function admit(_, argv)
  local args = cmsgpack.unpack(argv[1])
  if not member(args[PROCESS], args[EPOCH]) then
    return cmsgpack.pack({ 'stranger' })
  end
  local second, now = clock()
  for _, limits in ipairs(args[SCOPES]) do
    if window_missed(limits[7], now) then
      return cmsgpack.pack({ 'clock', now })
    end
  end
  local scopes, refusal = ask_limits(args, second, now)
  if refusal then
    refusal[9], refusal[10] = allowances(scopes, args[SCOPES], now)
    return cmsgpack.pack(refusal)
  end
  local queue, used = open_queue({}, args[POOL]), slots_in_use(args[CANDIDATES])
  local number, retries = earlier_try(args, now)
  local record = {
    process = args[PROCESS], id = args[ID], second = second, replica = '', slots = 0, number = number,
    body = argv[1], args = args,
  }
  local placed = place(record, queue, used, now)
  if not placed then
    local requests, tokens = allowances(scopes, args[SCOPES], now)
    return cmsgpack.pack({ 'full', queue.depth, drain_s(queue.pool, queue.depth + 1, now), requests, tokens })
  end
  record.number = record.number or 0
  save_record(record)
  save_queue(queue)
  commit_limits(record, scopes, args[COST])
  local requests, tokens = allowances(scopes, args[SCOPES], now)
  if record.replica ~= '' then
    return cmsgpack.pack({ 'granted', record.replica, record.slots, used, requests, tokens, retries })
  end
  return cmsgpack.pack({ 'waiting', placed[1], queue.depth, used, requests, tokens, retries })
end
