"""``qdsim doctor``: what this machine, or a cluster, can do, checked by doing it."""
