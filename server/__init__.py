"""How the service is served: the gunicorn worker, its log, and the start from a terminal."""
