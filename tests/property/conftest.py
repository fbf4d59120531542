"""How long Hypothesis looks.

``default`` is the same short search every time; ``HYPOTHESIS_PROFILE=nightly`` is a long new one; ``breakage`` is the short one
without the search for a smaller example, for ``tests.support.mutants``.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

settings.register_profile("default", derandomize=True, database=None, deadline=None, max_examples=200)
settings.register_profile("breakage", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("nightly", deadline=None, max_examples=10_000, stateful_step_count=100, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
