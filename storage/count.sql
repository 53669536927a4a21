-- Counts hits of many keys at once: for each key its quota, and how many hits there are.
-- set_config: the commit does not wait for the disk, and a lock is not waited for for long. A pooler
-- would refuse these settings for the connection.
WITH asked AS MATERIALIZED (
    SELECT *, set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '300', true)
    FROM json_to_recordset(%s) AS hit (id text, seconds bigint, quota bigint, hits bigint)
),
-- In the order of the ids: two processes that lock the same rows cannot deadlock.
locked AS MATERIALIZED (
    SELECT id, seconds, quota, hits, total, reset, used FROM api_key JOIN asked USING (id)
    ORDER BY id FOR UPDATE OF api_key
),
-- The server's clock, read once a row is locked: the same for all processes, and never too old.
timed AS MATERIALIZED (
    SELECT *, extract(epoch FROM clock_timestamp())::float8 AS now FROM locked
),
windowed AS (
    SELECT id, quota, hits, total, now, next.reset,
        CASE WHEN timed.reset = next.reset THEN used ELSE 0 END AS used
    FROM timed, LATERAL (SELECT (floor(now / seconds)::bigint + 1) * seconds AS reset) AS next
),
counted AS MATERIALIZED (
    SELECT *, least(hits, greatest(0, quota - used)) AS granted FROM windowed
),
saved AS (
    UPDATE api_key SET total = api_key.total + granted, reset = counted.reset,
        used = counted.used + granted, last_used_at = floor(now)::bigint
    FROM counted WHERE api_key.id = counted.id AND granted > 0
),
charted AS (
    INSERT INTO hourly_usage (hour, key_id, requests)
    SELECT floor(now / 3600)::bigint * 3600, id, granted FROM counted WHERE granted > 0
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests
)
-- The numbers before these hits, how many of them were granted, and the seconds left.
SELECT id, total, reset, used, granted, reset - now FROM counted
