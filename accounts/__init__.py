"""Users, their passwords and their API keys."""
