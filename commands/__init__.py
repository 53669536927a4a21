"""What is run in a shell: `flask user`, `flask key`, and the demo."""
