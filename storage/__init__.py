"""Where users, keys and counts are stored: in SQLite or in PostgreSQL."""
