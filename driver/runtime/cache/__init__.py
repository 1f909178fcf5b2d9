"""The client's side of compilation caching: it keeps files, and knows nothing of what is in them."""
