"""WebSockets (RFC 6455): the connection and its outbox, those that are open, and the ticker."""
