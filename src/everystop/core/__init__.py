"""The deterministic heart: requests, blocks, plans and the scheduler; standard library only, no clock, no randomness."""
