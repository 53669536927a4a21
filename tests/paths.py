"""The paths of the API and of the settings' pages."""

YEAR, STATUS = PUBLIC = ("/api/v1/demo/year", "/api/v1/status")
TEST, ME, STATS = PROTECTED = (
    "/api/v1/protected/test",
    "/api/v1/user/me",
    "/api/v1/usage/stats",
)
ECHO, TIME = SOCKETS = ("/api/v1/ws/echo", "/api/v1/ws/time")
PROFILE, SECURITY = "/settings/profile", "/settings/security"
KEYS = f"{SECURITY}/keys"
