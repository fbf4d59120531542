"""How long Hypothesis looks in these suites: briefly, and the same search every time."""

from hypothesis import settings

BRIEFLY = settings(derandomize=True, database=None, deadline=None, max_examples=200)
