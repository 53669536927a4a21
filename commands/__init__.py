"""What is run in a shell: `flask user`, `flask key`, `flask backup`, and the demo."""
