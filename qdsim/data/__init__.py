"""Images, who holds which of them, and what a request takes away."""
