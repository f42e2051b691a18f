"""Other servers of the same weights beside this one: installed apart, run in turns, under the project's own load.

`python -m benchmarks.peers install|run|report`; docs/performance.md says under "Beside other servers" what came of it.
"""
