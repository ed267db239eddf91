"""One round: client hosts, the executor that reaches them, the round loop, evaluation and attacks."""
