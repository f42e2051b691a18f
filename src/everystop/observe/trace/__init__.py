"""A history as tracks on one time axis, for viewers of traces; knows nothing of records or files' places."""
