-- Locks the rows in the order of their ids, so two processes cannot deadlock; takes the window from
-- the server's clock, once the rows are locked; grants what is left of each quota and counts it.
-- set_config: a commit does not wait for the disk, so a crash of the server may lose the counts of
-- its last second; no lock is waited for long. Poolers refuse these settings for the connection.
WITH asked AS MATERIALIZED (
    SELECT *, set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '300', true)
    FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::bigint[])
        AS hit (id, seconds, quota, hits)
), locked AS MATERIALIZED (
    SELECT id, seconds, quota, hits, total, reset, used FROM api_key JOIN asked USING (id)
    ORDER BY id FOR UPDATE OF api_key
), timed AS MATERIALIZED (
    SELECT *, extract(epoch FROM clock_timestamp())::float8 AS now FROM locked
), windowed AS (
    SELECT id, quota, hits, total, now, next.reset,
        CASE WHEN timed.reset = next.reset THEN used ELSE 0 END AS used
    FROM timed, LATERAL (SELECT (floor(now / seconds)::bigint + 1) * seconds AS reset) AS next
), counted AS MATERIALIZED (
    SELECT *, least(hits, greatest(0, quota - used)) AS granted FROM windowed
), saved AS (
    UPDATE api_key SET total = api_key.total + granted, reset = counted.reset,
        used = counted.used + granted, last_used_at = floor(now)::bigint
    FROM counted WHERE api_key.id = counted.id AND granted > 0
), charted AS (
    INSERT INTO hourly_usage (hour, key_id, requests)
    SELECT floor(now / 3600)::bigint * 3600, id, granted FROM counted WHERE granted > 0
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests
)
SELECT id, total, reset, used, granted, now FROM counted
