"""The database beyond the models: saving counts, upgrading tables, PostgreSQL."""
