"""WebSockets (RFC 6455): the connection, those that are open, and the ticker."""
