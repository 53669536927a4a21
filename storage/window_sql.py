"""`Usage.in_current_window` and `Usage.followed_by` of ratelimit.py in SQL."""

# SQLite: adds a Usage to the row. `used` starts again in a new window. The counted
# `reset` was taken over from the row if the window is the same, so comparing them is enough.
SAVE = """UPDATE api_key SET total = total + ?,
    used = ? + CASE WHEN reset = ? THEN used ELSE 0 END, reset = ?, last_used_at = ?
    WHERE id = ?"""

# PostgreSQL: adds one request if the limit allows it. A row whose `reset` is one of the two ends of
# `Quota.window_ends`, or between them, belongs to the current window.
SAME_WINDOW = "reset BETWEEN %(end)s AND %(latest)s"
USED_AFTER = f"1 + CASE WHEN {SAME_WINDOW} THEN used ELSE 0 END"
HIT = f"""UPDATE api_key SET total = total + 1, used = {USED_AFTER}, last_used_at = %(now)s,
    reset = CASE WHEN {SAME_WINDOW} THEN reset ELSE %(end)s END
    WHERE id = %(id)s AND {USED_AFTER} <= %(limit)s RETURNING total, reset, used"""
