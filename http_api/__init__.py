"""What HTTP needs: checks of requests, whose they are, headers, errors, and how times are written."""
