"""Arrays and devices. Knows token ids; knows nothing of text, requests or priorities."""

import os

# ONNX Runtime reads this when it is imported. Without it, it makes a device id and a database of
# events in the user's cache, to be sent to its makers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
