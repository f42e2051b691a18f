"""Runs a workload, on an engine or against a server, and says what happened; it serves nobody and draws nothing."""
