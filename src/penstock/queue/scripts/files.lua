-- files: the records of stored files, and of the batches that read them and write others. Contents are in the storage.
-- Of all scripts only this one touches the keys of F. It belongs to no pool, so it has no prelude.
-- KEYS[1]: F:config, which does not exist; it tells F. ARGV: what to do, and msgpack of its arguments, a table.
-- Answer: {OK, …} | {name of a refusal, …}
--
-- Storage: the first process that needs one makes a folder with a random name and a mark behind PENSTOCK_FILES_URL, and notes
-- the name in F:storage. A process that does not find the mark serves no files. If a storage is lost for good, deleting
-- F:storage lets the next process make a new one; the records of lost files stay until they expire.
-- Files: an object never changes. It is written under the id of an upload, which `upload` has counted against the limits before
-- the first byte. Only when it is whole does `save` make it a file, so no reader sees a part of one. An upload has a lease of
-- 10 minutes, which its gateway renews. After it, any gateway drops the upload.
-- Garbage: what drops a record adds its object to F:garbage. A gateway deletes the object and then `forget`s it, so no death
-- between the two leaves an object behind. Once an hour, gateways delete objects older than an hour that no record names.
--
-- A batch is a record, the file that it reads, and parts of the files that it writes.
-- Lease: `take` gives a batch that no process holds to the caller, with a token that is higher than the last by a random number.
-- The holder `keep`s its leases six times within their length, and learns then of a cancellation or a pause. Every other
-- function for a holder compares the token first, and answers LOST to an older one. The holder also stops by its own clock
-- when its lease may be over, so that it submits no row that another process has stored and acknowledged.
-- Rows: the holder keeps as many rows in the queue as twice the sequences of the live nodes, at least 64, at most 4,096 or 32
-- MiB. It divides them among its batches. A row's idempotency key derives from batch and custom_id, so the next holder finds the
-- jobs of an earlier one.
-- Parts: finished rows go to parts/<batch>/<token>-<number>, an object for the output and one for errors. Only when both are
-- whole does `commit` list them and set a bit for each of their rows; it refuses a part with a row whose bit is set. Then the
-- holder acknowledges the jobs. A death before the commit leaves objects that no list names, and the rows' results in Redis.
-- A death behind it leaves a committed part. Either way each row is in one part.
-- End: the holder joins the parts of each kind to one object. `finish` makes them files, ends the batch, and makes its parts
-- garbage in one step. A repeated `commit` or `finish` changes nothing, because the first answer may have been lost. A
-- cancellation or the end of the window stops the expansion: the holder cancels the jobs in the queue, keeps what is answered
-- by then, and commits the other rows as errors.
-- Flows: a row waits for other rows of its batch. The holder submits it once parts have all of these, so a later holder
-- finds the same texts. A row with `for_each` makes rows when a part has it; their numbers follow those of the input, in the
-- order of `made`.
-- Message batches: the body becomes a file of lines while it arrives, and each line is checked for its custom_id then.
-- `create_with_input` saves the file and makes the batch in one step, within the tenant's limits. The end of the batch deletes
-- the input.
local F = string.sub(KEYS[1], 1, -8)
local what, asked = ARGV[1], cmsgpack.unpack(ARGV[2])
local ALL, IDEM_MS, MAX_GARBAGE, MAX_UNTOLD, UNTOLD_MS = '*', 86400000, 500, 32, 259200000
-- Lua writes larger numbers in another way.
local MAX_TOKEN = 1e13
-- The purpose of an input that came with its batch. It ends with the batch.
local OWN_INPUT = 'message_batch'
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local does = {}

-- Records may be damaged by what else writes to Redis. A whole number is digits, at most as many as Lua holds exactly.
local function whole(text) return type(text) == 'string' and #text < 16 and string.match(text, '^%d+$') and tonumber(text) or nil end

-- Runs `work` for one record. Return false if the record is damaged, so that the others go on.
local function alone(work, ...)
  local is_done, problem = pcall(work, ...)
  if is_done then return true end
  local text = type(problem) == 'table' and problem.err or tostring(problem)
  if string.find(text, 'OOM', 1, true) or string.find(text, 'NOPERM', 1, true) then error(problem) end
  return false
end

-- Fields of a record, false for each that is absent; all of them if the key is no hash.
local function fields_of(key, ...)
  local found = redis.pcall('HMGET', F .. ':' .. key, ...)
  if not found.err then return unpack(found) end
  local none = {}
  for i = 1, select('#', ...) do none[i] = false end
  return unpack(none)
end

local function number_in(key, field) return whole((fields_of(key, field))) or 0 end

-- Adds to a sum of a tenant and to that of all. A field of 0 is removed, and one that is no number: its sum is unknown
-- until an audit computes it anew.
local function count(key, tenant, by)
  for _, field in ipairs({tenant or ALL, tenant and ALL}) do
    local sum = by == 0 or redis.pcall('HINCRBY', F .. ':' .. key, field, by)
    if sum == 0 or type(sum) == 'table' then redis.pcall('HDEL', F .. ':' .. key, field) end
  end
end

-- An object of the storage that no record names any more. A gateway deletes it, and then asks to `forget` it.
local function discard(object) redis.call('ZADD', F .. ':garbage', now, object) end

local function object_of(id) return 'files/' .. id end

-- Idempotency keys: the id that was made with one, and a digest of what was asked.
local function made_before(kind)
  if asked.idem == '' then return nil end
  local found = redis.pcall('GET', F .. ':idem:' .. asked.tenant .. ':' .. asked.idem)
  local id, digest = string.match(type(found) == 'string' and found or '', '^(%S+) (.*)$')
  if not id or redis.call('EXISTS', F .. ':' .. kind .. ':' .. id) == 0 then return nil end
  return digest == asked.digest and {'OK', id, 1} or {'CONFLICT', id}
end

local function note_idem(id)
  if asked.idem == '' then return end
  redis.call('SET', F .. ':idem:' .. asked.tenant .. ':' .. asked.idem, id .. ' ' .. asked.digest, 'PX', IDEM_MS)
end

-- Storage -----------------------------------------------------------------------------------------

-- Returns the id of the storage in use, which the first process chose that asked.
function does.storage()
  local known = redis.call('GET', F .. ':storage')
  if known or asked.id == '' then return {'OK', known or ''} end
  redis.call('SET', F .. ':storage', asked.id)
  return {'OK', asked.id}
end

-- Keys of another type than they can have hold up all others. They are deleted, and an audit lists again what they had.
-- Answers with their names.
function does.mend()
  local types, found = {expiry = 'zset', uploads = 'zset', garbage = 'zset', open_batches = 'zset', untold = 'zset',
    storage = 'string', keys = 'hash'}, {}
  for _, name in ipairs({'stored', 'num_files', 'uploading', 'num_uploads', 'num_open', 'rows_left'}) do types[name] = 'hash' end
  if asked.tenant then
    types['files:' .. asked.tenant] = 'zset'
    types['batches:' .. asked.tenant] = 'zset'
  end
  for _, named in ipairs(asked.names or {}) do types[named[1]] = named[2] end
  for name, wanted in pairs(types) do
    local is = redis.call('TYPE', F .. ':' .. name).ok
    if is ~= wanted and is ~= 'none' then
      redis.call('DEL', F .. ':' .. name)
      found[#found + 1] = name
    end
  end
  return {'OK', found}
end

-- Corrects what an audit has found. Sums are {hash, field, by, is_lost} each: one that is no number becomes `by`. Members of
-- lists are {list, member, score} each; a score of '' removes one.
function does.correct()
  for _, one in ipairs(asked.sums) do
    local key, by = F .. ':' .. one[1], string.format('%d', one[3])
    if one[4] then redis.call('HSET', key, one[2], by) else redis.call('HINCRBY', key, one[2], by) end
    if redis.call('HGET', key, one[2]) == '0' then redis.call('HDEL', key, one[2]) end
  end
  for _, one in ipairs(asked.members) do
    if one[3] == '' then redis.call('ZREM', F .. ':' .. one[1], one[2]) else redis.call('ZADD', F .. ':' .. one[1], one[3], one[2]) end
  end
  return {'OK'}
end

-- Files -------------------------------------------------------------------------------------------

local function end_upload(id)
  local tenant, bytes = fields_of('upload:' .. id, 'tenant', 'bytes')
  redis.call('ZREM', F .. ':uploads', id)
  redis.call('DEL', F .. ':upload:' .. id)
  if tenant then
    count('uploading', tenant, -(whole(bytes) or 0))
    count('num_uploads', tenant, -1)
  end
  return tenant ~= false
end

-- Begins an upload: takes its bytes out of the limits. A limit of 0 does not exist.
function does.upload()
  local tenant = asked.tenant
  for _, one in ipairs({{'stored', tenant, 'max_tenant_bytes'}, {'stored', ALL, 'max_bytes'}}) do
    local limit = asked[one[3]] or 0
    if limit > 0 and number_in('stored', one[2]) + number_in('uploading', one[2]) + asked.bytes > limit then
      return {'FULL', one[3], limit}
    end
  end
  for _, one in ipairs({{tenant, 'max_tenant_files'}, {ALL, 'max_files'}}) do
    local limit = asked[one[2]] or 0
    if limit > 0 and number_in('num_files', one[1]) + number_in('num_uploads', one[1]) >= limit then
      return {'FULL', one[2], limit}
    end
  end
  redis.call('ZADD', F .. ':uploads', now + asked.lease_ms, asked.id)
  redis.call('HSET', F .. ':upload:' .. asked.id, 'tenant', tenant, 'bytes', asked.bytes)
  count('uploading', tenant, asked.bytes)
  count('num_uploads', tenant, 1)
  return {'OK'}
end

function does.keep_upload()
  if not redis.call('ZSCORE', F .. ':uploads', asked.id) then return {'LOST'} end
  redis.call('ZADD', F .. ':uploads', now + asked.lease_ms, asked.id)
  return {'OK'}
end

function does.end_upload()
  if end_upload(asked.id) then discard(object_of(asked.id)) end
  return {'OK'}
end

local function save_file(file, tenant)
  local expires = file.life_ms > 0 and now + file.life_ms or ''
  redis.call('HSET', F .. ':file:' .. file.id, 'tenant', tenant, 'name', file.name, 'purpose', file.purpose,
    'bytes', file.bytes, 'created', now, 'expires', expires, 'readers', 0)
  redis.call('ZADD', F .. ':files:' .. tenant, now, file.id)
  if file.life_ms > 0 then redis.call('ZADD', F .. ':expiry', expires, 'file:' .. file.id) end
  count('stored', tenant, file.bytes)
  count('num_files', tenant, 1)
end

-- Turns an upload, whose object is whole, into a file.
function does.save()
  -- The answer of an earlier call may have been lost.
  if redis.call('EXISTS', F .. ':file:' .. asked.file.id) == 1 then return {'OK', asked.file.id, 0} end
  local before = made_before('file')
  if before then
    if end_upload(asked.file.id) then discard(object_of(asked.file.id)) end
    return before
  end
  if not end_upload(asked.file.id) then return {'LOST'} end
  save_file(asked.file, asked.tenant)
  note_idem(asked.file.id)
  return {'OK', asked.file.id, 0}
end

local function drop_file(id, tenant, bytes)
  redis.call('DEL', F .. ':file:' .. id)
  redis.call('ZREM', F .. ':files:' .. tenant, id)
  redis.call('ZREM', F .. ':expiry', 'file:' .. id)
  count('stored', tenant, -(whole(bytes) or 0))
  count('num_files', tenant, -1)
  discard(object_of(id))
end

function does.delete()
  local tenant, bytes, readers = fields_of('file:' .. asked.id, 'tenant', 'bytes', 'readers')
  if tenant ~= asked.tenant then return {'NOT_FOUND'} end
  if (whole(readers) or 0) > 0 then return {'IN_USE'} end
  drop_file(asked.id, tenant, bytes)
  return {'OK'}
end

local function drop_batch(id)
  local tenant = fields_of('batch:' .. id, 'tenant')
  redis.call('DEL', F .. ':batch:' .. id)
  redis.call('ZREM', F .. ':expiry', 'batch:' .. id)
  if tenant then redis.call('ZREM', F .. ':batches:' .. tenant, id) end
end

local function drop_expired(member)
  local kind, id = string.match(member, '^(%a+):([%w_-]+)$')
  local tenant, bytes, readers
  if kind == 'file' then tenant, bytes, readers = fields_of('file:' .. id, 'tenant', 'bytes', 'readers') end
  if kind == 'batch' then
    drop_batch(id)
  elseif not tenant then
    redis.call('ZREM', F .. ':expiry', member)
  elseif (whole(readers) or 0) > 0 then
    redis.call('ZADD', F .. ':expiry', now + 60000, member)
  else
    drop_file(id, tenant, bytes)
  end
end

-- Objects that are garbage. What names no object of ours is forgotten: it might name any file.
local function garbage()
  local objects = {}
  for _, object in ipairs(redis.call('ZRANGE', F .. ':garbage', 0, MAX_GARBAGE - 1)) do
    if string.match(object, '^files/[%w-]+$') or string.match(object, '^parts/[%w_]+/$') then
      objects[#objects + 1] = object
    else
      redis.call('ZREM', F .. ':garbage', object)
    end
  end
  return objects
end

-- Drops what has expired, and uploads that ended without a word. Files that open batches read stay until these end.
function does.expire()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', F .. ':uploads', '-inf', now, 'LIMIT', 0, asked.limit)) do
    end_upload(id)
    discard(object_of(id))
  end
  local due = redis.call('ZRANGEBYSCORE', F .. ':expiry', '-inf', now, 'LIMIT', 0, asked.limit)
  for _, member in ipairs(due) do
    if not alone(drop_expired, member) then redis.call('ZREM', F .. ':expiry', member) end
  end
  redis.call('ZREMRANGEBYSCORE', F .. ':untold', '-inf', now - UNTOLD_MS)
  return {'OK', #due, garbage()}
end

function does.forget()
  for _, object in ipairs(asked.objects) do redis.call('ZREM', F .. ':garbage', object) end
  return {'OK'}
end

-- The storage has lost the contents of these files.
function does.lose()
  for _, id in ipairs(asked.ids) do
    if redis.call('EXISTS', F .. ':file:' .. id) == 1 then redis.call('HSET', F .. ':file:' .. id, 'lost', 1) end
  end
  return {'OK'}
end

-- Which of these ids belong to nothing: not to a file, an upload or an open batch, nor to garbage.
function does.unknown()
  local unknown = {}
  for _, id in ipairs(asked.ids) do
    local is_known = redis.call('EXISTS', F .. ':file:' .. id, F .. ':upload:' .. id) > 0
      or redis.call('ZSCORE', F .. ':open_batches', id) or redis.call('ZSCORE', F .. ':garbage', object_of(id))
    if not is_known then unknown[#unknown + 1] = id end
  end
  return {'OK', unknown}
end

-- Batches -----------------------------------------------------------------------------------------
-- A batch is validating, in_progress, finalizing or cancelling while it is open. One process holds its lease, and each
-- new holder gets a higher token. What a holder asks for with an older token is refused as LOST.

local function read_batch(id, ...) return fields_of('batch:' .. id, ...) end

local function is_held(id, token)
  return redis.call('ZSCORE', F .. ':open_batches', id) and (read_batch(id, 'token')) == tostring(token)
end

local function set_status(id, status) redis.call('HSET', F .. ':batch:' .. id, 'status', status, status .. '_at', now) end

local function close(id, status)
  local tenant, file, left = read_batch(id, 'tenant', 'file', 'left')
  set_status(id, status)
  redis.call('ZREM', F .. ':open_batches', id)
  count('num_open', tenant, -1)
  count('rows_left', tenant, -(whole(left) or 0))
  redis.call('HSET', F .. ':batch:' .. id, 'left', 0, 'waiting', '')
  local purpose, bytes, readers, owner = fields_of('file:' .. (file or ''), 'purpose', 'bytes', 'readers', 'tenant')
  if purpose == OWN_INPUT and owner == tenant then
    drop_file(file, tenant, bytes)
  elseif (whole(readers) or 0) > 0 then
    redis.call('HINCRBY', F .. ':file:' .. file, 'readers', -1)
  end
  redis.call('ZADD', F .. ':expiry', now + asked.life_ms, 'batch:' .. id)
  if tenant then redis.call('ZADD', F .. ':untold', now, table.concat({id, status, tenant}, ' ')) end
end

local function make_batch(tenant, total)
  redis.call('HSET', F .. ':batch:' .. asked.id, 'tenant', tenant, 'file', asked.file, 'request', asked.request,
    'created_at', now, 'expires_at', now + asked.window_ms, 'token', 0, 'total', total, 'left', total,
    'completed', 0, 'failed', 0, 'stopped', 0, 'input_tokens', 0, 'cached_tokens', 0, 'output_tokens', 0, 'reasoning_tokens', 0,
    'paused', '', 'waiting', '')
  redis.call('ZADD', F .. ':batches:' .. tenant, now, asked.id)
  redis.call('ZADD', F .. ':open_batches', 0, asked.id)
  redis.call('HINCRBY', F .. ':file:' .. asked.file, 'readers', 1)
  count('num_open', tenant, 1)
  count('rows_left', tenant, total)
  -- What a change of the key has noted is newer than what the caller knows. Each release that makes batches notes the
  -- terms here, the first one included. So an open batch always has them, however old its key is.
  if asked.terms ~= '' and redis.call('HEXISTS', F .. ':keys', asked.key_id) == 0 then
    redis.call('HSET', F .. ':keys', asked.key_id, asked.terms)
  end
  note_idem(asked.id)
end

function does.create()
  -- The answer of an earlier call may have been lost.
  if redis.call('EXISTS', F .. ':batch:' .. asked.id) == 1 then return {'OK', asked.id, 0} end
  local before = made_before('batch')
  if before then return before end
  local tenant, purpose = unpack(redis.call('HMGET', F .. ':file:' .. asked.file, 'tenant', 'purpose'))
  if tenant ~= asked.tenant then return {'NO_FILE'} end
  if purpose ~= 'batch' then return {'WRONG_PURPOSE', purpose} end
  if redis.call('HGET', F .. ':file:' .. asked.file, 'lost') == '1' then return {'NO_FILE'} end
  if asked.max_open > 0 and number_in('num_open', tenant) >= asked.max_open then return {'FULL', asked.max_open} end
  make_batch(tenant, 0)
  redis.call('HSET', F .. ':batch:' .. asked.id, 'status', 'validating')
  return {'OK', asked.id, 0}
end

-- Makes a batch whose input, an upload that is whole and checked, becomes a file in the same step. So it has no need of
-- `start`. The upload is dropped if the batch is not made.
local function make_with_input()
  local tenant = asked.tenant
  local before = made_before('batch')
  if before then return before end
  if not redis.call('ZSCORE', F .. ':uploads', asked.input.id) then return {'LOST'} end
  if asked.max_open > 0 and number_in('num_open', tenant) >= asked.max_open then return {'FULL', asked.max_open} end
  if asked.max_rows > 0 and number_in('rows_left', tenant) + asked.total > asked.max_rows then
    return {'FULL_ROWS', asked.max_rows}
  end
  end_upload(asked.input.id)
  save_file(asked.input, tenant)
  make_batch(tenant, asked.total)
  set_status(asked.id, 'in_progress')
  return {'OK', asked.id, 0}
end

function does.create_with_input()
  -- The answer of an earlier call may have been lost.
  if redis.call('EXISTS', F .. ':batch:' .. asked.id) == 1 then return {'OK', asked.id, 0} end
  local answer = make_with_input()
  if end_upload(asked.input.id) then discard(object_of(asked.input.id)) end
  return answer
end

-- Gives the leases of batches that no process holds to the caller: first those that have waited longest. `step`: a random
-- number by which tokens grow, so that a Redis that lost a take gives no token twice. Answers also with
-- the ends of batches of which webhook endpoints are to be told. They stay until the caller says `told`.
-- A lease that would last longer than any is of before Redis's clock jumped back. Its holder learns that it is lost.
function does.take()
  local taken, open, untold = {}, F .. ':open_batches', {}
  for _, ended in ipairs(redis.call('ZRANGE', F .. ':untold', 0, MAX_UNTOLD - 1)) do
    if string.match(ended, '^[%w_]+ %l+ [%w._-]+$') then
      untold[#untold + 1] = ended
    else
      redis.call('ZREM', F .. ':untold', ended)
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', open, '(' .. now + asked.lease_ms, '+inf', 'LIMIT', 0, asked.limit)) do
    redis.call('ZADD', open, now, id)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', open, '-inf', now, 'LIMIT', 0, asked.limit)) do
    if redis.call('TYPE', F .. ':batch:' .. id).ok ~= 'hash' or not string.match(id, '^[%w_]+$') then
      redis.call('ZREM', open, id)
    else
      local token = redis.pcall('HINCRBY', F .. ':batch:' .. id, 'token', asked.step)
      if type(token) == 'table' and string.find(token.err, 'OOM', 1, true) then return token end
      if type(token) == 'table' or token > MAX_TOKEN then
        -- A damaged one. Tokens of the past are far below the time.
        token = now + asked.step
        redis.call('HSET', F .. ':batch:' .. id, 'token', string.format('%d', token))
      end
      redis.call('ZADD', F .. ':open_batches', now + asked.lease_ms, id)
      taken[#taken + 1] = {id, token}
    end
  end
  return {'OK', taken, untold}
end

function does.told()
  for _, ended in ipairs(asked.ends) do redis.call('ZREM', F .. ':untold', ended) end
  return {'OK'}
end

-- Renews leases: {id, token, why it waits, rows a second}. Answers for each its status and whether it is paused.
function does.keep()
  local kept = {}
  for i, lease in ipairs(asked.leases) do
    local id = lease[1]
    if is_held(id, lease[2]) then
      redis.call('ZADD', F .. ':open_batches', now + asked.lease_ms, id)
      redis.call('HSET', F .. ':batch:' .. id, 'waiting', lease[3], 'rate', lease[4])
      local status, paused = read_batch(id, 'status', 'paused')
      kept[i] = {status or '', paused or ''}
    else
      kept[i] = {'', ''}
    end
  end
  return {'OK', kept}
end

function does.release()
  if not is_held(asked.id, asked.token) then return {'LOST'} end
  redis.call('ZADD', F .. ':open_batches', now, asked.id)
  return {'OK'}
end

-- The input is valid and has `total` rows. Answers with the status, which another may be than in_progress.
function does.start()
  if not is_held(asked.id, asked.token) then return {'LOST'} end
  local status, tenant = read_batch(asked.id, 'status', 'tenant')
  if status ~= 'validating' then return {'OK', status} end
  if asked.max_rows > 0 and number_in('rows_left', tenant) + asked.total > asked.max_rows then return {'FULL', asked.max_rows} end
  redis.call('HSET', F .. ':batch:' .. asked.id, 'total', asked.total, 'left', asked.total)
  count('rows_left', tenant, asked.total)
  set_status(asked.id, 'in_progress')
  return {'OK', 'in_progress'}
end

function does.fail()
  if read_batch(asked.id, 'status') == 'failed' then return {'OK'} end
  if not is_held(asked.id, asked.token) then return {'LOST'} end
  redis.call('HSET', F .. ':batch:' .. asked.id, 'errors', asked.errors)
  close(asked.id, 'failed')
  return {'OK'}
end

-- Commits a part: its files, {name, kind, bytes} each, and its rows. A row that is in a part already refuses all of it.
-- `made`: rows of a flow that have made others, {row, how many} each. These others are rows of the batch from now on.
function does.commit()
  if not is_held(asked.id, asked.token) then return {'LOST'} end
  local batch, rows = F .. ':batch:' .. asked.id, F .. ':rows:' .. asked.id
  -- The answer of an earlier call may have been lost.
  if redis.call('HGET', batch, 'last_part') == asked.part then return {'OK'} end
  for _, row in ipairs(asked.rows) do
    if redis.call('GETBIT', rows, row) == 1 then return {'DUPLICATE', row} end
  end
  for _, row in ipairs(asked.rows) do redis.call('SETBIT', rows, row, 1) end
  for _, file in ipairs(asked.files) do
    redis.call('RPUSH', F .. ':parts:' .. asked.id, file[1] .. ' ' .. file[2] .. ' ' .. string.format('%d', file[3]))
  end
  for name, by in pairs(asked.counts) do redis.call('HINCRBY', batch, name, by) end
  local by = -#asked.rows
  for _, made in ipairs(asked.made or {}) do
    local known = read_batch(asked.id, 'made')
    redis.call('HSET', batch, 'made', (known and known .. ' ' or '') .. string.format('%d:%d', made[1], made[2]))
    redis.call('HINCRBY', batch, 'total', made[2])
    by = by + made[2]
  end
  redis.call('HINCRBY', batch, 'left', by)
  redis.call('HSET', batch, 'last_part', asked.part)
  count('rows_left', (read_batch(asked.id, 'tenant')), by)
  return {'OK'}
end

-- All rows are committed. A batch that is being canceled stays so until its files are there.
function does.finalize()
  if not is_held(asked.id, asked.token) then return {'LOST'} end
  if read_batch(asked.id, 'status') == 'in_progress' then
    redis.call('HSET', F .. ':batch:' .. asked.id, 'ending', asked.ending)
    set_status(asked.id, 'finalizing')
  end
  return {'OK'}
end

-- Saves the output and the error file, each if there is one, and ends the batch. Its parts are garbage then.
function does.finish()
  local status, token = read_batch(asked.id, 'status', 'token')
  if status == asked.status and token == tostring(asked.token) then return {'OK'} end
  if not is_held(asked.id, asked.token) then return {'LOST'} end
  local tenant = read_batch(asked.id, 'tenant')
  if asked.errors ~= '' then redis.call('HSET', F .. ':batch:' .. asked.id, 'errors', asked.errors) end
  for kind, file in pairs(asked.files) do
    end_upload(file.id)
    save_file(file, tenant)
    redis.call('HSET', F .. ':batch:' .. asked.id, kind .. '_file', file.id)
  end
  close(asked.id, asked.status)
  redis.call('DEL', F .. ':parts:' .. asked.id, F .. ':rows:' .. asked.id)
  discard('parts/' .. asked.id .. '/')
  return {'OK'}
end

function does.cancel()
  local tenant, status = read_batch(asked.id, 'tenant', 'status')
  if tenant ~= asked.tenant then return {'NOT_FOUND'} end
  if status == 'validating' or status == 'in_progress' then
    set_status(asked.id, 'cancelling')
  elseif status ~= 'cancelling' then
    return {'ENDED', status}
  end
  return {'OK'}
end

-- Drops a batch that has ended, with its files.
function does.delete_batch()
  local tenant, status, output, errors = read_batch(asked.id, 'tenant', 'status', 'output_file', 'error_file')
  if tenant ~= asked.tenant then return {'NOT_FOUND'} end
  if redis.call('ZSCORE', F .. ':open_batches', asked.id) then return {'OPEN', status} end
  for _, file in ipairs({output or '', errors or ''}) do
    local owner, bytes = fields_of('file:' .. file, 'tenant', 'bytes')
    if owner == tenant then drop_file(file, tenant, bytes) end
  end
  drop_batch(asked.id)
  return {'OK'}
end

function does.pause()
  local tenant = read_batch(asked.id, 'tenant')
  if tenant ~= asked.tenant then return {'NOT_FOUND'} end
  if not redis.call('ZSCORE', F .. ':open_batches', asked.id) then return {'ENDED', read_batch(asked.id, 'status')} end
  redis.call('HSET', F .. ':batch:' .. asked.id, 'paused', asked.paused)
  return {'OK'}
end

-- Drops up to `limit` batches and as many files of a tenant, open ones too. Answers how many of each there were, and
-- their bytes. With a limit of 0 it only counts.
function does.erase()
  local batches = redis.call('ZRANGE', F .. ':batches:' .. asked.tenant, 0, -1)
  local files = redis.call('ZRANGE', F .. ':files:' .. asked.tenant, 0, -1)
  local counted = {'OK', #batches, #files, number_in('stored', asked.tenant)}
  for i = 1, math.min(asked.limit, #batches) do
    local id = batches[i]
    if redis.call('ZSCORE', F .. ':open_batches', id) then
      asked.life_ms = 0
      close(id, 'cancelled')
      redis.call('ZREM', F .. ':untold', id .. ' cancelled ' .. asked.tenant)
      redis.call('DEL', F .. ':parts:' .. id, F .. ':rows:' .. id)
      discard('parts/' .. id .. '/')
    end
    drop_batch(id)
    redis.call('ZREM', F .. ':batches:' .. asked.tenant, id)
  end
  if #batches > asked.limit then return counted end
  for i = 1, math.min(asked.limit, #files) do
    -- Some of them ended with their batches.
    local owner, bytes = fields_of('file:' .. files[i], 'tenant', 'bytes')
    if owner == asked.tenant then
      drop_file(files[i], asked.tenant, bytes)
    else
      redis.call('ZREM', F .. ':files:' .. asked.tenant, files[i])
    end
  end
  if asked.limit > 0 then
    for _, id in ipairs(redis.call('ZRANGE', F .. ':uploads', 0, -1)) do
      if (fields_of('upload:' .. id, 'tenant')) == asked.tenant then
        end_upload(id)
        discard(object_of(id))
      end
    end
  end
  return counted
end

local run = does[what]
if not run then return redis.error_reply('UNKNOWN_VERB ' .. what) end
return run()
