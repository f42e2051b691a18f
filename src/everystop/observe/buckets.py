"""The bounds of all histograms: those that vLLM's dashboards expect, and own ones that hold these and are fine below
300 ms, where steps and gaps between tokens of a small model lie.

Since the own bounds include the others, one count serves both names.
"""

from __future__ import annotations

from everystop.observe.histogram import geometric, merged

VLLM_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
VLLM_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
VLLM_LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
VLLM_STEP_TOKENS = (1.0, 8.0, *(16.0 * 2**k for k in range(11)))  # up to 16,384
FEW = (1.0, 2.0, 5.0, 10.0, 20.0)  # choices, preemptions

TTFT_S = merged(VLLM_TTFT_S, geometric(0.0005, 0.3))
ITL_S = merged(VLLM_ITL_S, geometric(0.00025, 0.3))
LATENCY_S = merged(VLLM_LATENCY_S, geometric(0.0005, 0.3))
STEP_S = merged((0.3, 0.5, 1.0, 2.5, 5.0), geometric(0.00025, 0.3))
STEP_TOKENS = (0.0, 1.0, 2.0, 4.0, *VLLM_STEP_TOKENS[1:])
HTTP_S = merged((0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0), geometric(0.001, 0.3, ratio=2.0))
