"""A search over keys of a job: Ray Tune proposes and schedules, each trial is a run."""
