"""The engine: one thread that schedules, executes and updates, and the messages by which the rest of the process talks
to it.
"""
