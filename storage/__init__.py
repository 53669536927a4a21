"""What is stored past SQLite's own part: saving counts, older databases, PostgreSQL."""
