"""A request's life as OpenTelemetry spans, made when it is over; importing the package loads no SDK."""
