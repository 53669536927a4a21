"""What goes over the network: problem responses, headers, timestamps, WebSocket frames."""
