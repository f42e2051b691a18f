"""The PyTorch runner: one decoder on a GPU or, for tests and as the oracle, on the CPU; importing this loads none."""
