"""How the service is served: the gunicorn worker, its tasks, its log, and the checks at a start."""
