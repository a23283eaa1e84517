"""Asking a server, judging its replies, and keeping every answer."""
