-- What the console reads and corrects.

-- {name of a budget, spent as read, spent as it should be} (decimal strings) -> {changed?, reserved, spent}
local function correct(_, argv)
  local name, read, right = unpack(cmsgpack.unpack(argv[1]))
  local key = budget_key(name)
  local found = redis.call('HMGET', key, 'reserved', 'spent')
  local same = (found[2] or '0') == read
  if same then
    redis.call('HSET', key, 'spent', right)
    redis.call('EXPIRE', key, BUDGET_TTL[string.match(name, ':(%a+):%d+$')], 'NX')
  end
  return cmsgpack.pack({ same, found[1] or '0', same and right or found[2] or '0' })
end

-- {{scopes}, {names of budgets}} -> {now, {{requests, input, output, concurrency}, ...}, {{reserved, spent}, ...}, {pool, depth,
-- ...}, {replica, in use, ...}}; money as decimal strings
local function read(_, argv)
  local names, budgets = unpack(cmsgpack.unpack(argv[1]))
  local second, now = clock()
  local scopes, money = {}, {}
  for index, name in ipairs(names) do
    local scope = open_scope(name, second, second)
    scopes[index] = { scope.requests, scope.input, scope.output, scope.concurrency }
  end
  for index, name in ipairs(budgets) do
    local found = redis.call('HMGET', budget_key(name), 'reserved', 'spent')
    money[index] = { found[1] or '0', found[2] or '0' }
  end
  return cmsgpack.pack({
    now, scopes, money, redis.call('HGETALL', PREFIX .. 'depth'), redis.call('HGETALL', PREFIX .. 'slots'),
  })
end
