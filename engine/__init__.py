"""Arrays and devices. Knows token ids; knows nothing of text, requests or priorities."""
