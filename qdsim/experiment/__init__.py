"""A job from its file to its rows: settings, plan, runner, commits, resuming, stored trainings."""
