"""Guessing the next tokens of a sequence cheaply, so that one step of the model can check many."""
