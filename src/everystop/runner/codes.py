"""The failure codes that runners give a row instead of a token."""

NOT_FINITE = "logits_not_finite"
"""The logits of the row hold a NaN or an infinity."""

NOT_TAKEN = "request_not_taken"
"""Of every row of a request that the runner did not take as it is; the log says why."""

FAILURES = {NOT_FINITE: "the numbers overflowed", NOT_TAKEN: "the runner did not take the request"}
"""What a client is told of each."""
