"""What goes over the network: problem responses, headers, forms, timestamps, WebSocket frames."""
