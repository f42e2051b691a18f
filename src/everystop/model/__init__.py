"""Model files: what they hold, how they are checked, read and fetched; knows nothing of requests, batches or HTTP."""
