"""What listens: the service process, its socket, health and metrics."""
