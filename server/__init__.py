"""How the service is served: its life cycle, the gunicorn worker, the log."""
