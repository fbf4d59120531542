"""How long Hypothesis looks.

``default`` is the same short search every time; ``HYPOTHESIS_PROFILE=nightly`` is a long new one.
"""

import os

from hypothesis import settings

settings.register_profile("default", derandomize=True, database=None, deadline=None, max_examples=200)
settings.register_profile("nightly", deadline=None, max_examples=10_000, stateful_step_count=100, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
