"""Which sequences run in a step, and where their keys and values live. Ids and counters only."""
