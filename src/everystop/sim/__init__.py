"""Virtual time: traces through the server's own scheduler, and replay of recorded runs."""
