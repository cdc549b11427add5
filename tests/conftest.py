"""How hypothesis runs, everywhere in the tests: no deadline for one example, since a busy machine may stop any process for a while.

Where ``CI`` is set the examples are always the same ones, so that a change is judged by itself and not by chance; elsewhere each run looks
at new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("offbeat", deadline=None)
settings.register_profile("offbeat-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("offbeat-ci" if os.environ.get("CI") else "offbeat")
