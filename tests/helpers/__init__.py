"""What several test files use: servers, clients, stored rows, documents."""
