"""The deterministic heart: requests, blocks, plans, the scheduler; standard library only, no clock, no randomness."""
