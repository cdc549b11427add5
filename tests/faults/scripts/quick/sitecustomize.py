"""Python imports this by itself where its folder is on PYTHONPATH."""

import nothing_compiled  # type: ignore[import-not-found]  # noqa: F401
import one_gpu  # type: ignore[import-not-found]  # noqa: F401
import soon_written  # type: ignore[import-not-found]  # noqa: F401
