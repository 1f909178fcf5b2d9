"""The engine process, which holds prepared models and executes every request."""
