"""Conversations and answers as token ids and loss masks."""
