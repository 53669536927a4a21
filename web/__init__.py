"""The website: where people sign up, create keys and try the API."""
