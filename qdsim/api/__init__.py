"""What `import qdsim` offers: a job run, planned or read again, and what a person sees of it."""
