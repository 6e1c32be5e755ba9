"""The Lua scripts that change more than one key. Each runs whole or not at all, and may run twice.

A reply can be lost and the call retried, so every script looks at what is there before it writes: a second run of the
same call changes nothing. Scripts that may settle tickets take `Keys.settlement()` as KEYS[1..6] and the prefix of the
group streams as ARGV[1].

A ticket is in exactly one of these states, and only the scripts here move it:

    reserved --issue--> issued --submit--> queued --settle--> (one outcome)
                          └───────────────settle────────────────┘
"""

from __future__ import annotations

from asyncrl_jax.transport.keys import GROUP_CONSUMERS, TASK_CONSUMERS

_SETTLEMENT = f"""
local TICKETS, TASK_ENTRIES, GROUP_ENTRIES = KEYS[1], KEYS[2], KEYS[3]
local TASKS, LEDGER, COUNTS = KEYS[4], KEYS[5], KEYS[6]
local GROUP_PREFIX = ARGV[1]

local function drop(stream, group, entry)
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

local function drop_task(entry) drop(TASKS, '{TASK_CONSUMERS}', entry) end
local function drop_group(partition, entry) drop(GROUP_PREFIX .. partition, '{GROUP_CONSUMERS}', entry) end

-- Partition, entry and submission of the ticket's queued group, or nil.
local function queued_at(ticket)
  local place = redis.call('HGET', GROUP_ENTRIES, ticket)
  if place then return string.match(place, '^(%d+) (%S+) (%S+)') end
end

local function payload_key(submission) return GROUP_PREFIX .. 'payload:' .. submission end

-- One outcome for a live ticket, and nothing of it left in a stream. 1 if this call settled it.
local function settle(ticket, outcome, reason, update)
  if redis.call('HDEL', TICKETS, ticket) == 0 then return 0 end
  local task = redis.call('HGET', TASK_ENTRIES, ticket)
  if task then
    drop_task(task)
    redis.call('HDEL', TASK_ENTRIES, ticket)
  end
  local partition, entry, submission = queued_at(ticket)
  if partition then
    drop_group(partition, entry)
    redis.call('UNLINK', payload_key(submission))
    redis.call('HDEL', GROUP_ENTRIES, ticket)
  end
  redis.call('XADD', LEDGER, '*', 'kind', 'outcome', 'ticket', ticket, 'outcome', outcome, 'reason', reason,
    'update', update)
  redis.call('HINCRBY', COUNTS, outcome, 1)
  return 1
end
"""

# KEYS: epoch, ticket_count, reserved. ARGV: how many. Returns {epoch, last number}, or nil without an epoch.
RESERVE = """
local epoch = redis.call('GET', KEYS[1])
if not epoch then return nil end
local last = redis.call('INCRBY', KEYS[2], ARGV[1])
for n = last - ARGV[1] + 1, last do
  redis.call('SADD', KEYS[3], string.format('%s-%.0f', epoch, n))
end
return {tonumber(epoch), last}
"""

# KEYS: settlement, reserved, epoch, ticket_count. ARGV: prefix, then (ticket id, encoded ticket) pairs.
# Returns {number issued now, an id that was never reserved or ''}; with such an id nothing is issued.
ISSUE = (
    _SETTLEMENT
    + """
local epoch = tonumber(redis.call('GET', KEYS[8]) or '')
if not epoch then return {0, ''} end -- and no id is reserved
local count = tonumber(redis.call('GET', KEYS[9]) or '0')
for i = 2, #ARGV, 2 do
  local of_epoch, number = string.match(ARGV[i], '^(%d+)%-(%d+)$')
  of_epoch, number = tonumber(of_epoch), tonumber(number)
  if not of_epoch or of_epoch > epoch or (of_epoch == epoch and number > count) then return {0, ARGV[i]} end
end
local issued = 0
for i = 2, #ARGV, 2 do
  local ticket, payload = ARGV[i], ARGV[i + 1]
  if redis.call('SREM', KEYS[7], ticket) == 1 then
    redis.call('HSET', TICKETS, ticket, payload)
    redis.call('HSET', TASK_ENTRIES, ticket, redis.call('XADD', TASKS, '*', 'ticket', ticket, 'payload', payload))
    redis.call('XADD', LEDGER, '*', 'kind', 'issued', 'ticket', ticket, 'payload', payload)
    redis.call('HINCRBY', COUNTS, 'issued', 1)
    issued = issued + 1
  end
end
return {issued, ''}
"""
)

# KEYS: settlement. ARGV: prefix, outcome, reason, update, then ticket ids. Returns 1 or 0 for each id.
SETTLE = (
    _SETTLEMENT
    + """
local settled = {}
for i = 5, #ARGV do settled[#settled + 1] = settle(ARGV[i], ARGV[2], ARGV[3], ARGV[4]) end
return settled
"""
)

# KEYS: settlement. ARGV: prefix, then (ticket id, task entry, partition, submission) quadruples. The payload is staged
# under the submission: large arguments are slow in Lua. Returns for each 1 if it is queued, 0 if it is waste, -1 if
# nothing is staged.
# `submission` names this call, so that its own retry is not mistaken for a second attempt at the ticket.
SUBMIT = (
    _SETTLEMENT
    + """
local function submit(ticket, task, partition, submission)
  local place = redis.call('HGET', GROUP_ENTRIES, ticket)
  local payload = payload_key(submission)
  if place and string.match(place, '(%S+)$') == submission then
    redis.call('PERSIST', payload) -- the retry staged it once more
    return 1
  end
  if place or redis.call('HEXISTS', TICKETS, ticket) == 0 then
    drop_task(task)
    redis.call('UNLINK', payload)
    redis.call('HINCRBY', COUNTS, 'duplicates', 1)
    return 0
  end
  if redis.call('PERSIST', payload) == 0 then return -1 end
  drop_task(task)
  local current = redis.call('HGET', TASK_ENTRIES, ticket)
  if current and current ~= task then drop_task(current) end
  redis.call('HDEL', TASK_ENTRIES, ticket)
  local entry = redis.call('XADD', GROUP_PREFIX .. partition, '*', 'ticket', ticket, 'submission', submission)
  redis.call('HSET', GROUP_ENTRIES, ticket, partition .. ' ' .. entry .. ' ' .. submission)
  return 1
end

local answers = {}
for i = 2, #ARGV, 4 do answers[#answers + 1] = submit(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]) end
return answers
"""
)

_HOLDING = (
    _SETTLEMENT
    + f"""
local consumer, ticket, entry = ARGV[2], ARGV[3], ARGV[4]
-- The ticket may be settled, queued, or claimed by another consumer since it was handed out.
local function holds()
  return redis.call('HGET', TASK_ENTRIES, ticket) == entry -- first: after a reset of Redis XPENDING is an error
    and #redis.call('XPENDING', TASKS, '{TASK_CONSUMERS}', entry, entry, 1, consumer) == 1
end
"""
)

# KEYS: settlement. ARGV: prefix, consumer, ticket id, task entry, outcome, reason. Returns 1 if settled by this call.
FAIL = (
    _HOLDING
    + """
return holds() and settle(ticket, ARGV[5], ARGV[6], '') or 0
"""
)

# KEYS: settlement. ARGV: prefix, consumer, ticket id, task entry, deliveries to remember. Returns 1 if given back.
RELEASE = (
    _HOLDING
    + """
if not holds() then return 0 end
local payload = redis.call('HGET', TICKETS, ticket)
drop_task(entry)
redis.call('HSET', TASK_ENTRIES, ticket,
  redis.call('XADD', TASKS, '*', 'ticket', ticket, 'payload', payload, 'deliveries', ARGV[5]))
return 1
"""
)

# KEYS: settlement, dead, its size. ARGV: prefix, stream, consumer group, entry, reason, detail, ticket id or '',
# outcome, then the largest number of letters, of bytes of them all, and of bytes of one.
# Moves one entry to the dead letters and settles its ticket, if the ledger knows the ticket by this very entry. Makes
# room by dropping the oldest letters, which are counted.
DEAD_LETTER = (
    _SETTLEMENT
    + """
local stream, group, entry, reason, detail, ticket = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local DEAD, SIZE = KEYS[7], KEYS[8]
local max_letters, max_bytes, max_letter = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local found = redis.call('XRANGE', stream, entry, entry)
if #found == 0 then return 0 end

local function value_of(fields, name)
  for i = 1, #fields, 2 do if fields[i] == name then return fields[i + 1] end end
end
local fields = found[1][2]
local letter, size = {'stream', stream, 'entry', entry, 'reason', reason, 'detail', detail}, 0
local function add(value)
  letter[#letter + 1] = string.sub(value, 1, math.max(0, max_letter - size))
  size = size + #value
end
for i = 1, math.min(#fields, 20) do add(fields[i]) end -- a hostile entry has thousands
local submission = value_of(fields, 'submission')
local payload = submission and redis.call('GET', payload_key(submission))
if payload then
  add('payload')
  add(payload)
end
size = math.min(size, max_letter)
redis.call('XADD', DEAD, '*', 'size', size, unpack(letter))
local total = redis.call('INCRBY', SIZE, size)
local letters = redis.call('XLEN', DEAD)
while letters > 1 and (letters > max_letters or total > max_bytes) do
  local oldest = redis.call('XRANGE', DEAD, '-', '+', 'COUNT', 1)[1]
  redis.call('XDEL', DEAD, oldest[1])
  total = redis.call('DECRBY', SIZE, value_of(oldest[2], 'size') or 0)
  redis.call('HINCRBY', COUNTS, 'letters_dropped', 1)
  letters = letters - 1
end

drop(stream, group, entry)
if ticket == '' then return 1 end
local partition, queued = queued_at(ticket)
local is_group = partition and GROUP_PREFIX .. partition == stream and queued == entry
local is_task = stream == TASKS and redis.call('HGET', TASK_ENTRIES, ticket) == entry
if is_group or is_task then settle(ticket, ARGV[8], reason, '') end
return 1
"""
)

# KEYS: settlement. ARGV: prefix, partition, outcome, reason, update, then (entry, ticket id) pairs.
# Settles tickets whose group is queued in this entry, which acknowledges and deletes it. Returns the number settled.
COMPLETE = (
    _SETTLEMENT
    + """
local partition, outcome, reason, update = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local settled = 0
for i = 6, #ARGV, 2 do
  local entry, ticket = ARGV[i], ARGV[i + 1]
  local of_ticket, queued = queued_at(ticket)
  if of_ticket == partition and queued == entry then
    settled = settled + settle(ticket, outcome, reason, update)
  end
end
return settled
"""
)

# KEYS: settlement. ARGV: prefix, then ticket ids. Returns those live tickets that no stream holds any more.
MISSING = (
    _SETTLEMENT
    + """
local missing = {}
for i = 2, #ARGV do
  local ticket = ARGV[i]
  local partition, entry = queued_at(ticket)
  local stream = partition and GROUP_PREFIX .. partition or TASKS
  entry = entry or redis.call('HGET', TASK_ENTRIES, ticket)
  local live = redis.call('HEXISTS', TICKETS, ticket) == 1
  if live and not (entry and #redis.call('XRANGE', stream, entry, entry) == 1) then missing[#missing + 1] = ticket end
end
return missing
"""
)

# KEYS: stream. ARGV: consumer group, consumer, 'own' or 'any', least idle time in ms, limit, then entries to leave out.
# Claims pending entries, counting a delivery of each. Returns {{{entry, deliveries, fields}, ...}, {lost entries}}: an
# entry that is pending and deleted is lost; it would stay pending for ever, so it is acknowledged here.
# XAUTOCLAIM is not used: Redis 6.2 does not say which entries were deleted, and neither version tells the deliveries.
CLAIM = """
local group, consumer, own = ARGV[1], ARGV[2], ARGV[3] == 'own'
local limit = tonumber(ARGV[5])
local left_out = {}
for i = 6, #ARGV do left_out[ARGV[i]] = true end
local from, taken, lost = '-', {}, {}
while #taken < limit do
  local query = {'XPENDING', KEYS[1], group, 'IDLE', ARGV[4], from, '+', 100}
  if own then query[#query + 1] = consumer end
  local page = redis.call(unpack(query))
  if #page == 0 then break end
  for _, pending in ipairs(page) do
    local entry = pending[1]
    from = '(' .. entry
    if not left_out[entry] and #taken < limit then
      local found = redis.call('XRANGE', KEYS[1], entry, entry)
      if #found == 0 then
        redis.call('XACK', KEYS[1], group, entry)
        lost[#lost + 1] = entry
      else
        redis.call('XCLAIM', KEYS[1], group, consumer, 0, entry)
        taken[#taken + 1] = {entry, pending[4] + 1, found[1][2]}
      end
    end
  end
end
return {taken, lost}
"""

# KEYS: stream. ARGV: consumer group, consumer, delivery count to set or '', then entries. Resets their idle time.
# Returns the entries that this consumer still holds; one that another consumer claimed meanwhile is not taken back.
KEEP = """
local group, consumer = ARGV[1], ARGV[2]
local held = {}
for i = 4, #ARGV do
  if #redis.call('XPENDING', KEYS[1], group, ARGV[i], ARGV[i], 1, consumer) == 1 then
    local claim = {'XCLAIM', KEYS[1], group, consumer, 0, ARGV[i], 'JUSTID'}
    if ARGV[3] ~= '' then
      claim[#claim + 1] = 'RETRYCOUNT'
      claim[#claim + 1] = ARGV[3]
    end
    redis.call(unpack(claim))
    held[#held + 1] = ARGV[i]
  end
end
return held
"""

# --- Control state ---

# KEYS: versions, latest. ARGV: number, JSON, identity, may point backwards.
# Returns 1 if `latest` is this version, 0 if not, or the JSON of another version of the same number.
ANNOUNCE = """
local existing = redis.call('HGET', KEYS[1], ARGV[1])
local readable, v = pcall(cjson.decode, existing or '')
if readable and type(v) == 'table' and v.manifest_digest and v.line and v.update then
  local parent = v.parent == cjson.null and 'None' or string.format('%.0f', v.parent)
  local identity = string.format('%s %.0f %.0f %s', v.manifest_digest, v.line, v.update, parent)
  if identity ~= ARGV[3] then return existing end
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
local latest = redis.call('GET', KEYS[2])
if not latest or tonumber(ARGV[1]) > tonumber(latest) or ARGV[4] == '1' then
  redis.call('SET', KEYS[2], ARGV[1])
  return 1
end
return latest == ARGV[1] and 1 or 0
"""

# KEYS: hash. ARGV: field, value. Returns the value that the field has now.
ADD_ONCE = """
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1])
"""

_NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local function after(seconds) return string.format('%.6f', now + tonumber(seconds)) end
local NOW = string.format('%.6f', now)
"""

# KEYS: leases, versions. ARGV: version, holder, seconds.
LEASE = (
    _NOW
    + """
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[1], after(ARGV[3]), ARGV[1] .. ' ' .. ARGV[2])
return 1
"""
)

# KEYS: leases. Returns members that have not run out.
LEASED = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', NOW)
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""
)

# KEYS: heartbeats, expiry. ARGV: name, payload, seconds.
BEAT = (
    _NOW
    + """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], after(ARGV[3]), ARGV[1])
return redis.status_reply('OK')
"""
)

# KEYS: heartbeats, expiry. Returns name, payload, name, payload, ... of those that have not run out.
BEATING = (
    _NOW
    + """
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', NOW)) do
  redis.call('HDEL', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
end
return redis.call('HGETALL', KEYS[1])
"""
)

# KEYS: requests, queue. ARGV: id, JSON, update.
REQUEST_EVALUATION = """
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return 1
"""

_EVALUATIONS = (
    _NOW
    + """
local REQUESTS, QUEUE, HOLDERS, EXPIRY, RESULTS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
-- A lease of more than twice `seconds` is none: the clock has jumped back.
local function holder_of(id, seconds)
  local left = tonumber(redis.call('ZSCORE', EXPIRY, id) or now) - now
  return left > 0 and left <= 2 * tonumber(seconds) and redis.call('HGET', HOLDERS, id) or nil
end
local function hold(id, holder, seconds)
  redis.call('HSET', HOLDERS, id, holder)
  redis.call('ZADD', EXPIRY, after(seconds), id)
end
"""
)

# KEYS: requests, queue, holders, expiry, results. ARGV: holder, seconds. Returns the JSON of a request, or nil.
CLAIM_EVALUATION = (
    _EVALUATIONS
    + """
local free
for _, id in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
  local holder = holder_of(id, ARGV[2])
  if holder == ARGV[1] then
    free = id
    break
  end
  if not holder and not free then free = id end
end
if not free then return nil end
hold(free, ARGV[1], ARGV[2])
return redis.call('HGET', REQUESTS, free)
"""
)

# KEYS: as CLAIM_EVALUATION. ARGV: id, holder, seconds. A lease that ran out is renewed if nobody else took it.
RENEW_EVALUATION = (
    _EVALUATIONS
    + """
if not redis.call('ZSCORE', QUEUE, ARGV[1]) then return 0 end
if redis.call('HGET', HOLDERS, ARGV[1]) ~= ARGV[2] then return 0 end
hold(ARGV[1], ARGV[2], ARGV[3])
return 1
"""
)

# KEYS: as CLAIM_EVALUATION. ARGV: id, JSON of the result.
REPORT_EVALUATION = (
    _EVALUATIONS
    + """
if redis.call('HSETNX', RESULTS, ARGV[1], ARGV[2]) == 0 then
  return redis.call('HGET', RESULTS, ARGV[1]) == ARGV[2] and 1 or 0
end
redis.call('ZREM', QUEUE, ARGV[1])
redis.call('HDEL', HOLDERS, ARGV[1])
redis.call('ZREM', EXPIRY, ARGV[1])
return 1
"""
)
