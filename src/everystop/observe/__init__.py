"""Views of the engine's events: metrics, status lines, records; nothing here can reach into the engine."""
