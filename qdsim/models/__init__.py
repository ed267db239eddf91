"""Networks as functions of their parameters, and what is computed from them: logits, gradients, matching."""
