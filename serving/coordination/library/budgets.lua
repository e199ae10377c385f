-- Money in whole nano-units, by scope and calendar window.
--
-- fl:g:b:<scope>:<currency>:<window>:<start of the window> is a hash of `reserved` and `spent`. Both only change by
-- HINCRBY, exact in 64 bits; Lua's doubles are exact up to 2^53 and only compare.

local BUDGET_TTL = { hour = 7200, day = 172800, month = 2851200, total = 34560000 } -- window and a while

local function budget_key(name)
  return PREFIX .. 'b:' .. name
end

local function nano(amount)
  return string.format('%.0f', amount + 0) -- not '-0'
end

local function read_budget(name)
  local found = redis.call('HMGET', budget_key(name), 'reserved', 'spent')
  return tonumber(found[1] or 0), tonumber(found[2] or 0)
end

local function reserve(name, window, cost)
  local key = budget_key(name)
  if redis.call('HINCRBY', key, 'reserved', nano(cost)) == cost or window == 'total' then
    redis.call('EXPIRE', key, BUDGET_TTL[window])
  end
end

local function unreserve(name, cost, spent)
  local key = budget_key(name)
  redis.call('HINCRBY', key, 'reserved', nano(-cost))
  if spent > 0 then
    redis.call('HINCRBY', key, 'spent', nano(spent))
  end
end

-- Count money that was spent without a reservation here.
local function spend(name, spent)
  local key = budget_key(name)
  redis.call('HINCRBY', key, 'spent', nano(spent))
  redis.call('EXPIRE', key, BUDGET_TTL[string.match(name, ':(%a+):%d+$')], 'NX')
end

-- The first budget {name, window, amount, start, end} that `cost` would break, as the reply of admit; nil if none.
local function budgets_refuse(budgets, cost, now)
  for index = 1, #budgets do
    local name, window, amount, _, ends = unpack(budgets[index])
    local reserved, spent = read_budget(name)
    if reserved + spent + cost > amount then
      local wait, retryable = 60, false
      if spent + cost <= amount then
        wait, retryable = 1, true -- requests that run now may give it back
      elseif window ~= 'total' and ends - now <= 60 and cost <= amount then
        wait, retryable = ends - now, true
      end
      return { 'budget_' .. window, amount, reserved + spent, cost, whole_seconds(wait), retryable }
    end
  end
  return nil
end

-- Whether a window has not begun or is over by Valkey's clock: the caller's idea of the time was wrong.
local function window_missed(budgets, now)
  for index = 1, #budgets do
    local _, window, _, starts, ends = unpack(budgets[index])
    if window ~= 'total' and (now < starts or now >= ends) then
      return true
    end
  end
  return false
end
