"""Clients as Ray actors: the cluster, placement, the actors and their replacement, the driver, jobs."""
