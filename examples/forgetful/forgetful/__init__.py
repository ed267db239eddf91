"""What qdsim takes from outside, one thing a file."""
