"""Virtual time: replay of recorded runs."""
