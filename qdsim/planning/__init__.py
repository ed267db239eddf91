"""Does a job fit, where are its clients placed, how long will it take? No Ray here."""
