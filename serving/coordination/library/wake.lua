-- Deployments that requests ask for while they have no worker: fl:wake:<deployment id>, until the controller has seen it.

local WAKE_TTL = 60

local function wake(_, argv)
  local args = cmsgpack.unpack(argv[1])
  redis.call('SET', 'fl:wake:' .. args[1], clock(), 'EX', WAKE_TTL)
  return cmsgpack.pack({ 'noted' })
end
