"""Units of time, and which latency targets are taken."""

NS_PER_S, NS_PER_MS, NS_PER_US = 1_000_000_000, 1_000_000, 1_000
MIN_TARGET_MS, MAX_TARGET_MS = 1, 3_600_000
