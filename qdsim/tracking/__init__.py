"""Runs in the trackers that people use: the rows of the tables as series, while a run goes on or after it."""
