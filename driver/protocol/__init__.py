"""What crosses the socket between client, service and engine: calls, models, requests, fences."""
