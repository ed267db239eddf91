"""The commands and everything that a person sees in a terminal."""
