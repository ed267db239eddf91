"""One method a file, in the order of its paper's pseudo-code; torch only.

``local_sgd.py`` is the inner loop of Algorithm 1, ``fedavg.py`` its server, ``distillation.py`` the gradient matching
of §3.2; ``methods.py`` lists the methods, ``phase.py`` says what a phase is.
"""
