"""Measurements: what a server does under load, how long it takes to start, how fast its parts are."""
