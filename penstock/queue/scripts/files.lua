-- files: the records of stored files, and of the batches that read them and write others. Contents are in the storage.
-- Of all scripts only this one touches the keys of F. It belongs to no pool, so it has no prelude.
-- KEYS[1]: F:config, which does not exist; it tells F. ARGV: what to do, and msgpack of its arguments, a table.
-- Answer: {OK, …} | {name of a refusal, …}
local F = string.sub(KEYS[1], 1, -8)
local what, asked = ARGV[1], cmsgpack.unpack(ARGV[2])
local ALL, IDEM_MS, MAX_GARBAGE = '*', 86400000, 500
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local does = {}

local function number_in(key, field) return tonumber(redis.call('HGET', F .. ':' .. key, field) or '0') end

-- Adds to a sum of a tenant and to that of all. A field of 0 is removed.
local function count(key, tenant, by)
  for _, field in ipairs({tenant, ALL}) do
    if by ~= 0 and redis.call('HINCRBY', F .. ':' .. key, field, by) == 0 then redis.call('HDEL', F .. ':' .. key, field) end
  end
end

-- An object of the storage that no record names any more. A gateway deletes it, and then asks to `forget` it.
local function discard(object) redis.call('ZADD', F .. ':garbage', now, object) end

local function object_of(id) return 'files/' .. id end

-- Idempotency keys: the id that was made with one, and a digest of what was asked.
local function made_before(kind)
  if asked.idem == '' then return nil end
  local found = redis.call('GET', F .. ':idem:' .. asked.tenant .. ':' .. asked.idem)
  if not found then return nil end
  local id, digest = string.match(found, '^(%S+) (.*)$')
  if redis.call('EXISTS', F .. ':' .. kind .. ':' .. id) == 0 then return nil end
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

-- Files -------------------------------------------------------------------------------------------

local function end_upload(id)
  local tenant, bytes = unpack(redis.call('HMGET', F .. ':upload:' .. id, 'tenant', 'bytes'))
  redis.call('ZREM', F .. ':uploads', id)
  redis.call('DEL', F .. ':upload:' .. id)
  if tenant then
    count('uploading', tenant, -tonumber(bytes))
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
  count('stored', tenant, -tonumber(bytes))
  count('num_files', tenant, -1)
  discard(object_of(id))
end

function does.delete()
  local tenant, bytes, readers = unpack(redis.call('HMGET', F .. ':file:' .. asked.id, 'tenant', 'bytes', 'readers'))
  if tenant ~= asked.tenant then return {'NOT_FOUND'} end
  if tonumber(readers) > 0 then return {'IN_USE'} end
  drop_file(asked.id, tenant, bytes)
  return {'OK'}
end

local function drop_batch(id)
  local tenant = redis.call('HGET', F .. ':batch:' .. id, 'tenant')
  redis.call('DEL', F .. ':batch:' .. id, F .. ':parts:' .. id, F .. ':rows:' .. id)
  redis.call('ZREM', F .. ':expiry', 'batch:' .. id)
  if tenant then redis.call('ZREM', F .. ':batches:' .. tenant, id) end
end

-- Drops what has expired, and uploads that ended without a word. Files that open batches read stay until these end.
function does.expire()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', F .. ':uploads', '-inf', now, 'LIMIT', 0, asked.limit)) do
    end_upload(id)
    discard(object_of(id))
  end
  local due = redis.call('ZRANGEBYSCORE', F .. ':expiry', '-inf', now, 'LIMIT', 0, asked.limit)
  for _, member in ipairs(due) do
    local kind, id = string.match(member, '^(%a+):(.*)$')
    if kind == 'batch' then
      drop_batch(id)
    else
      local tenant, bytes, readers = unpack(redis.call('HMGET', F .. ':file:' .. id, 'tenant', 'bytes', 'readers'))
      if not tenant then
        redis.call('ZREM', F .. ':expiry', member)
      elseif tonumber(readers) > 0 then
        redis.call('ZADD', F .. ':expiry', now + 60000, member)
      else
        drop_file(id, tenant, bytes)
      end
    end
  end
  return {'OK', #due, redis.call('ZRANGE', F .. ':garbage', 0, MAX_GARBAGE - 1)}
end

function does.forget()
  for _, object in ipairs(asked.objects) do redis.call('ZREM', F .. ':garbage', object) end
  return {'OK'}
end

-- Which of these ids of files are neither a file nor an upload nor garbage: their objects belong to nothing.
function does.unknown()
  local unknown = {}
  for _, id in ipairs(asked.ids) do
    if redis.call('EXISTS', F .. ':file:' .. id, F .. ':upload:' .. id) == 0
      and not redis.call('ZSCORE', F .. ':garbage', object_of(id)) then unknown[#unknown + 1] = id end
  end
  return {'OK', unknown}
end

local run = does[what]
if not run then return redis.error_reply('UNKNOWN_VERB ' .. what) end
return run()
