"""Where runs lie and how they are read again: paths and URIs, arrays in files, the lock, the run directory, the tables.

Nothing here knows a model, a client or a round.
"""
