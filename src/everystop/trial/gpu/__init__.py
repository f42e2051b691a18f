"""`everystop bench gpu`: what the PyTorch runner does on the device at hand, against what the device could do.

It needs the core, the runner and the model's description: no server, no native module, no files, no network.
"""
