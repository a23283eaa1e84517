"""Training rows for people to look at."""
