-- Messages to readers, channels, and which jobs lack a reader.

-- Messages ---------------------------------------------------------------------------------------
-- Chunks for one reader are collected over the whole script and sent in as few messages as the size limit allows.

local push, flush
do
  local MAX_MESSAGE_BYTES = 65536
  local outgoing, outgoing_order, boxes_of = {}, {}, {}

  -- The outgoing buffers of a job's readers, cached by the list: the jobs of a batch have few different reader lists.
  local function find_boxes(inboxes)
    local boxes = {}
    for inbox in string.gmatch(inboxes, '%S+') do
      local box = outgoing[inbox]
      if not box then
        box = {size = 0, parts = {}, count = 0, channel = P .. ':inbox:' .. inbox}
        outgoing[inbox] = box
        outgoing_order[#outgoing_order + 1] = box
      end
      boxes[#boxes + 1] = box
    end
    boxes_of[inboxes] = boxes
    return boxes
  end

  local function send(box)
    sure('PUBLISH', box.channel, table.concat(box.parts, '', 1, box.count))
    box.size, box.count = 0, 0
  end

  -- Sends a message to the inboxes of a job's readers.
  function push(job, message)
    local size = #message
    local boxes = boxes_of[job.inboxes] or find_boxes(job.inboxes)
    for i = 1, #boxes do
      local box = boxes[i]
      if box.size + size > MAX_MESSAGE_BYTES and box.size > 0 then send(box) end
      box.size, box.count = box.size + size, box.count + 1
      box.parts[box.count] = message
    end
  end

  function flush()
    for _, box in ipairs(outgoing_order) do send(box) end
  end
end

-- Channels ----------------------------------------------------------------------------------------
-- The field `channel` of a record is '0' or '' for none, else `<format>[:<name>]`: m for msgpack, j for JSON. Without a
-- name the channel has the job's id. Its name contains the tenant, so that a Redis user can be kept to one tenant's.

local channels = {}

local channel_messages = late(function(made)
  local function outcome_of(fields)
    local members = {}
    for at, name in ipairs({'state', 'code', 'message', 'param'}) do
      members[at] = '"' .. name .. '":' .. cjson.encode(fields[name] or '')
    end
    return '{' .. table.concat(members, ',') .. '}'
  end

  -- The members after a chunk's text. Log-probabilities come last, and are not decoded: JSON has none.
  local function rest_of(chunk, at)
    local members = ''
    while at > 0 do
      local name, value
      at, name = cmsgpack.unpack_limit(chunk, 1, at)
      if name == 'l' or name == 'q' then break end
      at, value = cmsgpack.unpack_limit(chunk, 1, at)
      if name == 'f' then
        members = members .. ',"finish_reason":' .. cjson.encode(value)
      elseif name == 'u' then
        members = members .. string.format(',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":%d' ..
          ',"reasoning_tokens":%d}',
          value[1], value[2], value[3], value[4] or 0)
      elseif name == 'n' then
        members = members .. ',"num_prompt_tokens":' .. value
      end
    end
    return members
  end

  -- A chunk as an event of /v1/jobs/ID/stream, with the job's id. A chunk is a map of at most 15 members, so its header is
  -- one byte. Their order is fixed (wire.py, and terminal_chunk in ending.lua), so no table of them is needed.
  local function json_of(chunk)
    local at, _, _, _, id, _, index, key, value, _, position, _, tokens, _, text = cmsgpack.unpack_limit(chunk, 14, 1)
    local head = '{"id":"' .. id .. '","index":' .. index
    if key == 'e' then return head .. ',"outcome":' .. outcome_of(value) .. '}' end
    return head .. ',"choice":' .. value .. ',"position":' .. position .. ',"token_ids":[' .. table.concat(tokens, ',') ..
      '],"text":' .. cjson.encode(text) .. (at > 0 and rest_of(chunk, at) or '') .. '}'
  end

  function made.send(job, chunk)
    if not job.channel_key then
      -- emit does not read the tenant, because few jobs have a channel.
      local tenant = job.tenant or redis.call('HGET', job_key(job.id), 'tenant')
      local name = string.match(job.channel, '^.:(.+)$') or job.id
      job.channel_key, job.sends_json = P .. ':channel:' .. tenant .. ':' .. name, string.sub(job.channel, 1, 1) == 'j'
    end
    if not job.sends_json then return redis.call('PUBLISH', job.channel_key, chunk) end
    -- Nothing here may keep a job from running or ending: a chunk that is not one leaves a gap.
    local ok, message = pcall(json_of, chunk)
    if ok then redis.call('PUBLISH', job.channel_key, message) end
  end
end)

function channels.is(channel) return channel ~= '0' and channel ~= '' end

-- Whether a caller asks for another channel than the one that the job has.
function channels.differ(job, asked)
  return channels.is(asked) and channels.is(job.channel) and asked ~= job.channel
end

local function publish(job, chunk)
  push(job, chunk)
  local channel = job.channel
  if channel ~= '0' and channel ~= '' then channel_messages.send(job, chunk) end
end

-- Readers -----------------------------------------------------------------------------------------

local lacks_reader, grace_left
do
  -- How long a job that needs a reader may be without one: its own time, or else that of the pool.
  local function grace_of(job, of_pool)
    local own = tonumber(job.needs_reader)
    return own > 1 and own or of_pool
  end

  -- By how many ms the grace of a job is shorter than abandon_after_ms.
  function grace_left(job, config)
    return math.max(0, config.abandon_after_ms - grace_of(job, config.reattach_grace_ms))
  end

  local function is_unread(job, config, now)
    return now - (tonumber(job.unread) or now) > grace_of(job, config.reattach_grace_ms)
  end

  -- Whether every reader of a list has been silent for so many ms. `silent` caches the answers during one script.
  local silent = {}
  local function are_silent(inboxes, ms, now)
    for inbox in string.gmatch(inboxes, '%S+') do
      local last = redis.call('ZSCORE', P .. ':readers', inbox)
      if last and now - tonumber(last) <= ms then return false end
    end
    return true
  end

  -- Whether a job that needs a reader has no live reader.
  function lacks_reader(job, config, now)
    if (tonumber(job.needs_reader) or 0) == 0 or not pool_time.has_heartbeats() then return false end
    if job.unread ~= '' then return is_unread(job, config, now) end
    if channels.is(job.channel) then return false end
    local ms = math.max(config.abandon_after_ms, grace_of(job, 0))
    local key = ms .. ' ' .. job.inboxes
    if silent[key] == nil then silent[key] = are_silent(job.inboxes, ms, now) end
    return silent[key]
  end
end

-- Adds a reader to a job. Returns 1 if chunks will be pushed to it, 0 if the job already has MAX_INBOXES readers.
local function add_reader(job, inbox, channel, now)
  local pushed = 1
  if inbox ~= '' and not is_listed(job.inboxes, inbox) then
    local _, count = string.gsub(job.inboxes, '%S+', '')
    if count >= MAX_INBOXES then
      pushed = 0
    else
      job.inboxes = job.inboxes == '' and inbox or (job.inboxes .. ' ' .. inbox)
    end
  end
  if inbox ~= '' then redis.call('ZADD', P .. ':readers', now, inbox) end
  if channels.is(channel) then job.channel = channel end
  if inbox ~= '' or channels.is(channel) then job.unread = '' end
  redis.call('HSET', job_key(job.id), 'inboxes', job.inboxes, 'channel', job.channel, 'unread', job.unread)
  return pushed
end
