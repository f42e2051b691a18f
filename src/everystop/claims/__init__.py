"""The claims that are made for continuous batching, each measured here and judged by a threshold that it can fail."""
