"""The version of the distribution burst-engine, without a search for its metadata."""

__version__ = "0.3.0"
