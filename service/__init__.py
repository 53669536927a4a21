"""The Flask application, and what its parts share: requests, responses, errors, times."""
