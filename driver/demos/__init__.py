"""The two demos: `camera` and `audio` show the API, to be copied as a start; the rest is what they look at and leave.

They need the extra `demo`, import nothing of these packages but what is public, and `burst demo` runs them.
"""
