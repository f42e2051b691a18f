"""What holds for all tests: how long an example of hypothesis takes is the machine's affair, and Triton's functions,
wherever it is imported first, are made for its interpreter (it reads the variable then).
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
