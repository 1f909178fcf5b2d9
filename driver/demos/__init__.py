"""The two demos: `camera` and `audio` show the API, to be copied as a start; the rest is what they look at and leave.

They need the extra `demo`, import nothing of these packages but what is public, and `burst demo` runs them. Beside
them lies a model file of 1 kB for first programs, which needs no extra.
"""

from driver.demos.edges import EDGES

__all__ = ["EDGES"]
