"""What is known before any job runs: configuration, recipe, checks, and whether another driver is at work."""
