"""How the service is served: the gunicorn worker, its background, its log, the checks at a start."""
