"""What the templates say of times in words."""

from models import DAY, HOUR, now


def duration(seconds: int) -> str:
    """How long to wait: "45 s", "37 min", or "2 h 37 min"."""
    hours, minutes = divmod((seconds + 59) // 60, 60)
    words = f"{hours} h {minutes} min".removeprefix("0 h ").replace(" 0 min", "")
    return f"{seconds} s" if seconds < 120 else words


def relative_time(moment: float) -> str:
    """A moment as seen from now: "5 min ago", "in 3 h", or "in 30 days"."""
    left = moment - now()
    if abs(left) < 60:
        return "now" if left > 0 else "just now"
    small = (HOUR, "h") if abs(left) >= HOUR else (60, "min")
    size, unit = (DAY, "days") if abs(left) > 1.5 * DAY else small
    distance = f"{round(abs(left) / size)} {unit}"
    return f"in {distance}" if left > 0 else f"{distance} ago"
