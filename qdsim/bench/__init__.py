"""Benchmarks: ratios measured in one run on one machine, ``qdsim bench``.

Each file measures one thing and returns rows; :mod:`qdsim.bench.suite` knows them all, and what is aimed at. Images are
noise in the shape of the real ones: how long a step takes does not depend on what they show.
"""
