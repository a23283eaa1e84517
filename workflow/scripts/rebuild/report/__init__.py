"""The page of what the audit found."""
