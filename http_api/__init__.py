"""What HTTP needs: checks of requests, who sent them, headers, errors, how times are written."""
