"""The files that trainers read, made from one capture."""
