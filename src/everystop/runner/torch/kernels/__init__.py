"""Triton kernels, one module a family, and `reference`, the slow obvious torch version of each; importing the package
loads neither.
"""
