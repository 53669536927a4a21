"""`Usage.within` and `Usage.plus` of ratelimit.py in SQL: for what a key has used of its window."""

# SQLite: adds a Usage to the row. The window is the same one, or `used` starts again. `Limiter.hit`
# has compared the two ends already: a window that goes on has the `reset` of the row.
SAVE = """UPDATE api_key SET total = total + ?,
    used = ? + CASE WHEN reset = ? THEN used ELSE 0 END, reset = ?, last_used_at = ?
    WHERE id = ?"""

# PostgreSQL: adds one request if the limit allows it. Either end of `Quota.window_ends` is that of
# the same window.
SAME_WINDOW = "reset IN (%(end)s, %(ahead)s)"
USED_AFTER = f"1 + CASE WHEN {SAME_WINDOW} THEN used ELSE 0 END"
HIT = f"""UPDATE api_key SET total = total + 1, used = {USED_AFTER}, last_used_at = %(now)s,
    reset = CASE WHEN {SAME_WINDOW} THEN reset ELSE %(end)s END
    WHERE id = %(id)s AND {USED_AFTER} <= %(limit)s RETURNING total, reset, used"""
