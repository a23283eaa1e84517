"""The facts about rows, the checks on them, and the verdict."""
