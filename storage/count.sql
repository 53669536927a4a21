-- Counts hits of many keys at once. Each hit has a number, a key's id, and the quota of its tier.
-- set_config: the commit does not wait for the disk, and the query waits only briefly for a lock.
-- These are set here and not for the connection, because a pooler would refuse that. MATERIALIZED
-- keeps the order of the parts: settings, locks, clock, counts. Without it, PostgreSQL may merge them.
WITH asked AS MATERIALIZED (
    SELECT *, set_config('synchronous_commit', 'off', true),
        set_config('lock_timeout', '25ms', true)
    FROM unnest(%s::text[], %s::bigint[], %s::bigint[]) WITH ORDINALITY
        AS hit (id, quota, seconds, number)
),
-- A key has one quota. If its tier was just changed, the one of its last hit holds for all.
wanted AS (
    SELECT DISTINCT ON (id) id, quota, seconds, number AS chosen,
        count(*) OVER (PARTITION BY id) AS hits
    FROM asked ORDER BY id, number DESC
),
-- In the order of the ids: two processes that lock the same rows cannot deadlock. If this fails,
-- postgres.py leaves out the locked rows.
locked AS MATERIALIZED (
    SELECT id, quota, seconds, chosen, hits, total, reset, used FROM api_key JOIN wanted USING (id)
    ORDER BY id FOR UPDATE OF api_key
),
-- The server's clock, read after the rows are locked: the same for all processes, and never stale.
timed AS MATERIALIZED (
    SELECT *, extract(epoch FROM clock_timestamp())::float8 AS now FROM locked
),
windowed AS (
    SELECT id, quota, chosen, hits, total, now, next.reset,
        CASE WHEN timed.reset = next.reset THEN used ELSE 0 END AS used
    FROM timed, LATERAL (SELECT (floor(now / seconds)::bigint + 1) * seconds AS reset) AS next
),
counted AS MATERIALIZED (
    SELECT *, least(hits, greatest(0, quota - used)) AS granted FROM windowed
),
-- READ COMMITTED is needed: FOR UPDATE has read the newest version of a row, and the UPDATE follows
-- it to that version. At a stricter level, a row that another process has just counted is an error.
saved AS (
    UPDATE api_key SET total = counted.total + granted, reset = counted.reset,
        used = counted.used + granted, last_used_at = floor(now)::bigint
    FROM counted WHERE api_key.id = counted.id AND granted > 0
),
charted AS (
    INSERT INTO hourly_usage (hour, key_id, requests)
    SELECT floor(now / 3600)::bigint * 3600, id, granted FROM counted WHERE granted > 0
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests
),
-- Of the hits of one key, the first ones are granted.
placed AS (
    SELECT number, id, row_number() OVER (PARTITION BY id ORDER BY number) AS place FROM asked
)
-- For each hit: its number, that of the hit whose quota holds, and the rest of its Allowance.
SELECT number, chosen, place <= granted, greatest(0, quota - used - least(place, granted)), reset,
    ceil(reset - now)::int, total + least(place, granted)
FROM placed JOIN counted USING (id)
